"""Pieces of streamed answers, from the worker that reads them to the server where their caller waits.

Pieces only make an answer come sooner. The outcome counts, which holds the whole answer: a caller that has read some
pieces takes the rest from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic, time
from typing import NamedTuple
from uuid import UUID

import psycopg

from penstock.config import MIB
from penstock.db import sql
from penstock.db.arrays import ByteaArray, Int4Array, Int8Array
from penstock.db.coalesce import CoalesceLimits, Coalescer
from penstock.db.notify import lanes_payload
from penstock.db.pool import Connection, Pool, borrowed
from penstock.model import Item, Lease

_log = logging.getLogger("penstock.streams")

_SQL = sql.load("penstock.sessions", "streams.sql")

# Many tokens make one row; a caller does not notice so short a wait, and the first piece does not wait at all.
_LIMITS = CoalesceLimits(
    max_rows=1_000,
    max_bytes=16 * MIB,
    interval_s=0.03,
    capacity_rows=100_000,
    capacity_bytes=256 * MIB,
    retry_s=math.inf,
)
_FORGET_AFTER_S = 60.0
_SWEEP_EVERY_S = 60.0
_SWEEP_OLDER_S = 3_600.0
_SWEEP_AT_ONCE = 1_000
_READ_AT_ONCE = 64

HEAD = 0
"""Number of the first piece, which is the content type and not of the body."""


# Below every lease's id: no piece was read yet.
_NO_LEASE = 0


class StreamPosition(NamedTuple):
    """Position up to which a caller has read a request's pieces."""

    request_id: UUID
    lease_id: int = _NO_LEASE
    piece: int = HEAD - 1


class Piece(NamedTuple):
    lease_id: int
    lease_nonce: int
    number: int
    content: bytes


async def read_pieces_after(connection: Connection, positions: Sequence[StreamPosition]) -> list[list[Piece]]:
    """Read the pieces that have come since, for each of the positions."""
    cursor = await connection.execute(
        _SQL["read_pieces_after"],
        {
            "requests": [position.request_id for position in positions],
            "leases": Int8Array([position.lease_id for position in positions]),
            "pieces": Int4Array([position.piece for position in positions]),
            "limit": _READ_AT_ONCE,
        },
        binary=True,
    )
    found: list[list[Piece]] = [[] for _ in positions]
    for number, lease_id, nonce, piece, content in await cursor.fetchall():
        found[number - 1].append(Piece(lease_id, nonce, piece, bytes(content)))
    return found


@dataclass(frozen=True, slots=True)
class _PieceRow:
    request_id: UUID
    lease: Lease
    piece: int
    content: bytes


@dataclass(slots=True, eq=False)
class Stream:
    """One answer that is being received from an upstream. Its processor calls `put` and `end`."""

    writer: StreamWriter
    request_id: UUID
    lease: Lease
    next_piece: int = HEAD

    def put(self, piece: bytes) -> None:
        self.writer.put(self, piece)

    def end(self) -> None:
        """End the stream: the outcome holds the whole answer, so unwritten pieces are dropped."""
        self.writer.end(self)


@dataclass(slots=True, eq=False)
class _Pieces:
    """Pieces of one stream that came since the last flush."""

    stream: Stream
    contents: list[bytes]
    size: int
    """Bytes of the contents."""
    rows: list[_PieceRow] = field(default_factory=list)
    """Rows to write, once made: a flush that is tried again writes the same."""

    def as_rows(self) -> list[_PieceRow]:
        """Rows to write: the head by itself, the rest as one."""
        if not self.rows:
            stream, contents = self.stream, self.contents
            parts = [contents[0], b"".join(contents[1:])] if stream.next_piece == HEAD else [b"".join(contents)]
            for part in parts:
                if part or stream.next_piece == HEAD:
                    self.rows.append(_PieceRow(stream.request_id, stream.lease, stream.next_piece, part))
                    stream.next_piece += 1
        return self.rows


class StreamWriter:
    """Writes the pieces of all streams of one process, in few statements."""

    def __init__(self, database: Pool) -> None:
        self._database = database
        self._writer = Coalescer(_PieceWrite(), database, _LIMITS, name="pieces of answers")
        self._put_at = -math.inf
        self._over: deque[tuple[float, UUID]] = deque()

    def begin(self, item: Item, content_type: str) -> Stream:
        """Begin the stream of an answer that has begun to come. Only items of sessions have streams."""
        if item.session_request_id is None:
            raise ValueError("only an item of a session has a stream")
        stream = Stream(self, item.session_request_id, item.lease)
        stream.put(content_type.encode())
        return stream

    def put(self, stream: Stream, piece: bytes) -> None:
        now = monotonic()
        self._writer.put(_Pieces(stream, [piece], len(piece)))
        if now - self._put_at >= _LIMITS.interval_s:
            self._writer.flush_soon()  # after a pause there is nothing to gain by waiting for more
        self._put_at = now

    def end(self, stream: Stream) -> None:
        self._writer.discard(stream)
        self._over.append((monotonic() + _FORGET_AFTER_S, stream.request_id))

    async def run(self) -> None:
        """Write until cancelled. Faults of the database delay pieces and lose none that is still needed."""
        await asyncio.gather(self._writer.run(), self._delete_old())

    async def _delete_old(self) -> None:
        """Delete pieces of answers that have ended, and those that lost workers left."""
        while True:
            await asyncio.sleep(_SWEEP_EVERY_S)
            now = monotonic()
            over: list[UUID] = []
            while self._over and self._over[0][0] <= now:
                over.append(self._over.popleft()[1])
            # Ids begin with the time they were made.
            before = UUID(int=int((time() - _SWEEP_OLDER_S) * 1000) << 80)
            try:
                async with borrowed(self._database) as connection:
                    if over:
                        await connection.execute(_SQL["forget_pieces"], {"requests": over})
                    sweep = {"before": before, "limit": _SWEEP_AT_ONCE}
                    await connection.execute(_SQL["sweep_pieces_if_unleased"], sweep)
            except psycopg.Error as error:
                _log.warning("pieces of ended answers could not be deleted, trying again later: %s", error)


class _PieceWrite:
    """Stores pieces of answers: the `WriteKind` of the stream writer."""

    def key(self, entry: _Pieces) -> Stream:
        return entry.stream

    def merge(self, earlier: _Pieces, later: _Pieces) -> _Pieces:
        earlier.contents += later.contents
        earlier.size += later.size
        return earlier

    def weight(self, entry: _Pieces) -> int:
        return entry.size

    async def execute(self, connection: Connection, entries: Sequence[_Pieces], *, repeated: bool) -> None:  # noqa: ARG002 -- twice is once
        rows = [row for entry in entries for row in entry.as_rows()]
        if not rows:
            return
        await connection.execute(
            _SQL["append_pieces_if_leased"],
            {
                "requests": [row.request_id for row in rows],
                "leases": Int8Array([row.lease.id for row in rows]),
                "nonces": Int8Array([row.lease.nonce for row in rows]),
                "pieces": Int4Array([row.piece for row in rows]),
                "bytes": ByteaArray([row.content for row in rows]),
                "lanes": lanes_payload(row.lease.lane_id for row in rows),
            },
        )

    def replace_rejected(self, entry: _Pieces, error: Exception) -> None:  # noqa: ARG002 -- which one does not matter
        """Drop the piece: the caller gets the rest from the outcome, which has the whole answer."""
        _log.warning("a piece of an answer could not be stored: %s", error)

    async def give_up(self, entries: Sequence[_Pieces], error: Exception) -> None:  # noqa: ARG002 -- it never comes to this
        raise error
