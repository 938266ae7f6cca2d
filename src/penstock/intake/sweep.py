"""Gives files up that nobody will seal, and deletes what they leave behind.

A file that is given up is `failed`: it takes no more rows, so what is left of it only gets less. Its row stays until
the last of its templates and chunks is gone, and is what purges agree by: each step deletes the next stretch of keys
under the row's lock, and a purge that finds the row locked leaves the file to the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from uuid import UUID

import psycopg
from psycopg import Connection

from penstock.blobs.blobs import Place, erase_images, run_steps_blocking
from penstock.db import sql
from penstock.db.pool import KEEPALIVE

PURGE_ROWS = 1_000
_CHUNKS_PER_STEP = 8
_BEYOND = 2**31 - 1
"""Above every ordinal."""
_LOCK_TIMEOUT_MS = 10_000
_TIDY_S = 1.0
"""How long an intake that gives up spends on deleting; the rest is left to the sweep."""
_SQL = sql.load("penstock.intake", "intake.sql")

_unsettled: set[UUID] = set()
"""Files this process could not give up because the database was away: a sweep that asks only for the dead would never
come to them."""


def connect(conninfo: str) -> Connection:
    # A server that vanishes without a word must not hold a thread for ever.
    return psycopg.connect(conninfo, autocommit=True, prepare_threshold=None, connect_timeout=10, **KEEPALIVE)


@contextmanager
def connected(conninfo: str) -> Iterator[Connection]:
    """A connection for as long as the block lasts.

    At its end psycopg's own block commits, of which there is nothing left to do here. Where the answer to a statement
    was lost, that fails and leaves the connection open, although the block may have found out what became of it.
    """
    with closing(connect(conninfo)) as connection:
        yield connection


def abandon(conninfo: str, file_id: UUID) -> None:
    """Give a file of this process up and delete its rows. What cannot be done now is left to the sweep."""
    _unsettled.add(file_id)
    with suppress(psycopg.Error), connected(conninfo) as connection:
        # A seal may have gone through unheard: only what is failed is deleted.
        state = fail(connection, file_id)
        _unsettled.discard(file_id)
        if state == "failed":
            purge_file(connection, file_id, until=time.monotonic() + _TIDY_S)


def fail(connection: Connection, file_id: UUID) -> str | None:
    """Give the file up unless that is decided already; returns its state."""
    with connection.transaction():
        connection.execute(_SQL["bound_lock_wait"], {"timeout_ms": _LOCK_TIMEOUT_MS})
        connection.execute(_SQL["fail_if_ingesting"], {"file_id": file_id})
        row = connection.execute(_SQL["read_state"], {"file_id": file_id}).fetchone()
        return row[0] if row else None


def sweep_leftovers(conninfo: str, *, grace_s: float, throttle_s: float = 0.0) -> int:
    """One round of what every server does now and then; returns the rows deleted. Blocks."""
    with connected(conninfo) as connection:
        for file_id in list(_unsettled):
            fail(connection, file_id)
            _unsettled.discard(file_id)
        sweep_abandoned(connection, grace_s=grace_s)
        return purge_failed(connection, throttle_s=throttle_s)


def sweep_abandoned(
    connection: Connection,
    *,
    grace_s: float,
    dead_workers: Sequence[UUID] = (),
    now: datetime | None = None,
) -> list[UUID]:
    """Give up the files of workers that are gone, and say which. Their rows are for `purge_failed`.

    A worker must be registered before it opens a file: one that nobody knows counts as gone.
    """
    parameters = {"grace_s": grace_s, "dead_workers": list(dead_workers), "now": now}
    return [row[0] for row in connection.execute(_SQL["fail_if_abandoned"], parameters)]


def purge_failed(connection: Connection, *, rows: int = PURGE_ROWS, throttle_s: float = 0.0) -> int:
    """Delete what files that were given up have left behind; returns the rows deleted.

    The connection must be in autocommit: each delete of at most `rows` is its own transaction.
    """
    failed = connection.execute(_SQL["list_failed"]).fetchall()
    return sum(purge_file(connection, file_id, rows=rows, throttle_s=throttle_s) for (file_id,) in failed)


def purge_file(
    connection: Connection,
    file_id: UUID,
    *,
    rows: int = PURGE_ROWS,
    throttle_s: float = 0.0,
    until: float | None = None,
) -> int:
    """Delete the rows of a file that was given up, then its trace, unless another purge is at it."""
    deleted = 0
    purge: _Purge | None = None
    while True:
        with connection.transaction():
            held = connection.execute(_SQL["hold_if_failed"], {"file_id": file_id}, prepare=False).fetchone()
            if held is None:
                return deleted
            purge = purge or _Purge(connection, held[0], rows)
            count = purge.step()
            # Once a file is failed its rows only get fewer, so "none left" stays true.
            if not count and connection.execute(_SQL["has_rows"], {"source_id": held[0]}).fetchone() == (False,):
                connection.execute(_SQL["forget_if_failed"], {"file_id": file_id})
        deleted += count
        if not count or (until is not None and time.monotonic() > until):
            return deleted
        if throttle_s:
            time.sleep(throttle_s)


def discard_templates(connection: Connection, source_id: int) -> None:
    """Delete the templates of a file that is still being stored, by the one who stores it."""
    purge = _Purge(connection, source_id, PURGE_ROWS)
    while purge.templates():
        pass


class _Purge:
    """Walks one source from its first key to its last. Nothing is prepared: the connection may lead to a pooler."""

    def __init__(self, connection: Connection, source_id: int, rows: int) -> None:
        self._connection = connection
        self._source_id = source_id
        self._rows = rows
        self._lane, self._ordinal, self._chunk, self._image = -1, -1, 0, 0

    def step(self) -> int:
        """Delete the next rows; 0 when there are none."""
        return self.templates() or self._chunks() or self._images()

    def templates(self) -> int:
        place = {"source_id": self._source_id, "source_lane": self._lane, "ordinal": self._ordinal}
        place |= {"rows": self._rows}
        last = self._connection.execute(_SQL["purge_templates_after"], place, prepare=False).fetchone()
        if last is None:
            return 0
        self._lane, self._ordinal, count = last
        return int(count)

    def _chunks(self) -> int:
        place = {"source_id": self._source_id, "chunk": self._chunk, "rows": min(self._rows, _CHUNKS_PER_STEP)}
        (chunk, count) = self._connection.execute(_SQL["purge_chunks_from"], place, prepare=False).fetchone() or (
            None,
            0,
        )
        self._chunk = chunk or self._chunk
        return int(count)

    def _images(self) -> int:
        place = Place(self._source_id, 0)  # images are one lane
        rows = min(self._rows, _CHUNKS_PER_STEP)
        steps = erase_images(place, self._image, _BEYOND, rows)
        self._image, uses = run_steps_blocking(self._connection, steps)
        return uses
