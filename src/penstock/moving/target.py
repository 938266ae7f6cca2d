"""Penstock's side of a move: one transaction for each step, written by a thread while the next rows are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

import psycopg
from psycopg import Connection

from penstock.db import sql
from penstock.db.pool import KEEPALIVE
from penstock.errors import PenstockError
from penstock.intake.copying import COPY_SIGNATURE, COPY_TRAILER, PromptWriter

SQL = sql.load("penstock.moving", "moving.sql")

SEGMENT_BYTES = 2 * 1024 * 1024
SEGMENT_ROWS = 5_000
"""What is packed before it is written."""

_SEND_BYTES = 256 * 1024


@contextmanager
def connect_target(conninfo: str) -> Iterator[Connection]:
    """A connection to Penstock's database."""
    with closing(
        psycopg.connect(conninfo, autocommit=True, prepare_threshold=None, connect_timeout=10, **KEEPALIVE)
    ) as connection:
        yield connection


@contextmanager
def step(connection: Connection) -> Iterator[StepWriter]:
    """One file or batch: whole when the block ends, or not at all."""
    with connection.transaction():
        try:
            connection.execute(SQL["hold_import"])
        except psycopg.errors.LockNotAvailable as error:
            raise PenstockError(
                "another import is under way on this database",
                hint="Wait for its end. If it was killed, its connection ends shortly: run the command again.",
            ) from error
        with StepWriter(connection) as writer:
            yield writer


class StepWriter:
    """Writes one thing after the other in a step's transaction, in a thread of its own. At most one waits."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        """For the step's own statements: only while nothing is being written."""
        self._thread = ThreadPoolExecutor(1, "penstock-import")
        self._under_way: Future[None] | None = None

    def __enter__(self) -> StepWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self._thread.shutdown(cancel_futures=True)

    def submit(self, work: Callable[[Connection], None]) -> None:
        """Have something written once what was submitted before is; raises if that failed."""
        self.flush()
        self._under_way = self._thread.submit(work, self.connection)

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None


def copy_packed(connection: Connection, statement: bytes, packed: bytes) -> None:
    """Copy packed rows in the connection's transaction."""
    with connection.cursor() as cursor, cursor.copy(statement, writer=PromptWriter(cursor)) as copy:
        copy.write(COPY_SIGNATURE)
        for at in range(0, len(packed), _SEND_BYTES):
            copy.write(packed[at : at + _SEND_BYTES])
        copy.write(COPY_TRAILER)
