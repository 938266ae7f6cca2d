"""A file's way into the database: opened, filled batch by batch, then sealed or given up.

Nobody can see a file before its seal, so batches commit on their own and no transaction is long. A
file that is not sealed is given up.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from uuid import UUID

import psycopg
from psycopg import Copy, Cursor
from psycopg.abc import Buffer
from psycopg.copy import LibpqWriter

from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.errors import PenstockError
from penstock.intake import sweep
from penstock.intake.jsonl import FileLane
from penstock.model import new_id

_BACKLOG_BYTES = 4 * 1024 * 1024
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_SQL = sql.load("penstock.intake", "intake.sql")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A sealed file."""

    id: UUID
    source_id: int
    filename: str
    lines: int
    """Requests in the file."""
    size_bytes: int
    """As it was handed in, before decompression."""
    digest: bytes
    """SHA-256 of those bytes."""
    lanes: tuple[FileLane, ...]


class PromptWriter(LibpqWriter):
    """Keeps the server busy and lets the parser go on while it is not.

    Left to itself, psycopg piles what the socket does not take into libpq's buffer, which moves all of
    it at every write: three to four times slower than handing it one block when it has sent the last.
    Blocks wait here meanwhile, as far as the backlog goes: the server pauses for milliseconds now and
    then, longer than the socket's own buffer lasts.
    """

    def __init__(self, cursor: Cursor) -> None:
        super().__init__(cursor)
        self._backlog: deque[Buffer] = deque()
        self._backlog_bytes = 0

    def write(self, data: Buffer) -> None:
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        self._send(keep_bytes=_BACKLOG_BYTES)

    def finish(self, exc: BaseException | None = None) -> None:
        if exc is None:
            self._send(keep_bytes=0)
        super().finish(exc)

    def _send(self, *, keep_bytes: int) -> None:
        pgconn = self.connection.pgconn
        while True:
            if not pgconn.flush():
                if not self._backlog:
                    return
                data = self._backlog.popleft()
                self._backlog_bytes -= len(data)
                super().write(data)
            elif self._backlog_bytes > keep_bytes:
                writable = select.poll()
                writable.register(pgconn.socket, select.POLLOUT)
                writable.poll()
            else:
                return


class FileWriter:
    """Writes one file. Used by one thread at a time."""

    def __init__(self, conninfo: str, *, owner: str, worker_id: UUID, filename: str, limits: IntakeLimits) -> None:
        self.file_id = new_id()
        self._conninfo = conninfo
        self._filename = filename
        self._limits = limits
        self._batch = ExitStack()
        self._copy: Copy | None = None
        self._batch_rows = 0
        self._batch_bytes = 0
        self.rows = 0
        """Rows committed so far."""
        with _database_errors(filename):
            self._connection = sweep.connect(conninfo)
            parameters = {
                "file_id": self.file_id,
                "owner": owner,
                "filename": filename,
                "worker_id": worker_id,
            }
            try:
                (self.source_id,) = self._connection.execute(_SQL["insert_file"], parameters).fetchall()[0]
            except BaseException:
                self._connection.close()
                raise

    def write(self, rows: bytes, count: int) -> None:
        """Add packed rows to the batch under way, and commit it once it is large enough."""
        with _database_errors(self._filename):
            copy = self._copy or self._start_batch()
            copy.write(rows)
            self._batch_rows += count
            self._batch_bytes += len(rows)
            if self._batch_rows >= self._limits.copy_batch_rows or self._batch_bytes >= self._limits.copy_batch_bytes:
                self._end_batch()

    def flush(self) -> None:
        """Commit the batch under way: no transaction stays open while the input pauses."""
        with _database_errors(self._filename):
            self._end_batch()

    def seal(self, *, size: int, digest: bytes, lanes: Sequence[FileLane]) -> StoredFile:
        self.flush()
        stored = StoredFile(self.file_id, self.source_id, self._filename, self.rows, size, digest, tuple(lanes))
        parameters = {
            "file_id": self.file_id,
            "lines": stored.lines,
            "bytes": size,
            "digest": digest,
            "purpose": "batch",
            "chunks": 0,
            "problems": None,
            "idempotency_key": None,
            "expires_after_s": None,
            "source_lanes": [lane.source_lane for lane in lanes],
            "routes": [lane.route for lane in lanes],
            "endpoints": [lane.endpoint for lane in lanes],
            "totals": [lane.total for lane in lanes],
        }
        with _database_errors(self._filename):
            try:
                sealed = self._connection.execute(_SQL["seal_if_ingesting"], parameters).fetchone()
            except psycopg.OperationalError as error:
                if not self._was_sealed(error):
                    raise
                return stored
        if sealed is None:
            raise self._given_up()
        return stored

    def abandon(self) -> None:
        """Give the file up and delete its rows. What cannot be done now is left to the sweep."""
        self._drop_connection()
        sweep.abandon(self._conninfo, self.file_id)

    def close(self) -> None:
        self._connection.close()

    def _start_batch(self) -> Copy:
        self._batch.enter_context(self._connection.transaction())
        cursor = self._batch.enter_context(self._connection.cursor())
        if cursor.execute(_SQL["hold_if_ingesting"], {"file_id": self.file_id}).fetchone() is None:
            raise self._given_up()
        self._copy = self._batch.enter_context(cursor.copy(_SQL["copy_templates"], writer=PromptWriter(cursor)))
        self._copy.write(_SIGNATURE)
        return self._copy

    def _end_batch(self) -> None:
        if self._copy is None:
            return
        self._copy.write(_TRAILER)
        self._copy = None
        self._batch.close()
        self.rows += self._batch_rows
        self._batch_rows = self._batch_bytes = 0

    def _was_sealed(self, lost: psycopg.OperationalError) -> bool:
        """Ask, when the answer to the seal was lost. Failing the file waits for a seal still under
        way, and finds nothing to fail if it went through."""
        self._drop_connection()
        try:
            with sweep.connected(self._conninfo) as connection:
                return sweep.fail(connection, self.file_id) == "ready"
        except psycopg.Error:
            raise PenstockError(
                f"{self._filename}: the connection was lost while the file was being sealed, and the database "
                f"cannot be asked whether it was stored: {_first_line(lost)}",
                hint="Once the database is back, look for the file before submitting it again.",
            ) from lost

    def _drop_connection(self) -> None:
        """End whatever is under way. The server rolls an unfinished batch back."""
        self._connection.close()
        self._copy = None
        with suppress(psycopg.Error):
            self._batch.__exit__(PenstockError, PenstockError("the batch is dropped"), None)

    def _given_up(self) -> PenstockError:
        return PenstockError(
            f"{self._filename}: another process gave this file up while it was being stored; nothing was kept",
            hint="This process went silent for longer than heartbeat_grace_s. Run the command again.",
        )


@contextmanager
def _database_errors(filename: str) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise PenstockError(
            f"{filename}: the database did not take it: {_first_line(error)}; nothing was stored",
            hint=_hint(error),
        ) from error


def _first_line(error: psycopg.Error) -> str:
    return error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]


def _hint(error: psycopg.Error) -> str:
    if isinstance(error, psycopg.errors.DiskFull):
        return "The database's disk is full: free some space, then run the command again."
    if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
        return "The database has no Penstock schema yet: run 'penstock db migrate'."
    if isinstance(error, psycopg.OperationalError):
        return "Check that the database is up and reachable, then run the command again."
    return "Run the command again; if it fails the same way, the database's log says more."
