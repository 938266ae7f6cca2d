"""Answers on their way, piece by piece, from the worker that reads them to the server where their caller waits.

Pieces only make an answer come sooner. What counts is the outcome, which holds the whole of it: whoever has read some
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

# Many tokens make one row; a reader does not notice so short a wait, and the first piece does not wait at all.
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
"""The number of the first piece, which is not of the body: it is the content type."""


# Below every lease's id: nothing was read yet.
_NO_LEASE = 0


class StreamPosition(NamedTuple):
    """How far somebody has read."""

    request_id: UUID
    lease_id: int = _NO_LEASE
    piece: int = HEAD - 1


class Piece(NamedTuple):
    lease_id: int
    lease_nonce: int
    number: int
    content: bytes


async def read_pieces_after(connection: Connection, places: Sequence[StreamPosition]) -> list[list[Piece]]:
    """What has come since, for each of the places."""
    cursor = await connection.execute(
        _SQL["read_pieces_after"],
        {
            "requests": [place.request_id for place in places],
            "leases": Int8Array([place.lease_id for place in places]),
            "pieces": Int4Array([place.piece for place in places]),
            "limit": _READ_AT_ONCE,
        },
        binary=True,
    )
    found: list[list[Piece]] = [[] for _ in places]
    for number, lease_id, nonce, piece, content in await cursor.fetchall():
        found[number - 1].append(Piece(lease_id, nonce, piece, bytes(content)))
    return found


@dataclass(frozen=True, slots=True)
class _Row:
    request_id: UUID
    lease: Lease
    piece: int
    content: bytes


@dataclass(slots=True, eq=False)
class Stream:
    """One answer that is being read. `put` and `end` are all that its reader knows."""

    writer: StreamWriter
    request_id: UUID
    lease: Lease
    next_piece: int = HEAD

    def put(self, piece: bytes) -> None:
        self.writer.put(self, piece)

    def end(self) -> None:
        """The outcome holds the whole answer: what is not written yet need not be."""
        self.writer.end(self)


@dataclass(slots=True, eq=False)
class _Pieces:
    """What came of one stream since the last flush."""

    stream: Stream
    contents: list[bytes]
    size: int
    """Bytes of the contents."""
    rows: list[_Row] = field(default_factory=list)
    """What to write of them, once that is decided: a flush that is tried again writes the same."""

    def as_rows(self) -> list[_Row]:
        """The head by itself, the rest as one."""
        if not self.rows:
            stream, contents = self.stream, self.contents
            parts = [contents[0], b"".join(contents[1:])] if stream.next_piece == HEAD else [b"".join(contents)]
            for part in parts:
                if part or stream.next_piece == HEAD:
                    self.rows.append(_Row(stream.request_id, stream.lease, stream.next_piece, part))
                    stream.next_piece += 1
        return self.rows


class StreamWriter:
    """All streams of one process: few statements, each for all that have something to say."""

    def __init__(self, database: Pool) -> None:
        self._database = database
        self._writer = Coalescer(_StreamPieces(), database, _LIMITS, name="pieces of answers")
        self._put_at = -math.inf
        self._over: deque[tuple[float, UUID]] = deque()

    def begin(self, item: Item, content_type: str) -> Stream:
        """An answer has begun to come. Only items of sessions have readers."""
        if item.session_request_id is None:
            raise ValueError("this item has no reader")
        stream = Stream(self, item.session_request_id, item.lease)
        stream.put(content_type.encode())
        return stream

    def put(self, stream: Stream, piece: bytes) -> None:
        now = monotonic()
        self._writer.put(_Pieces(stream, [piece], len(piece)))
        if now - self._put_at >= _LIMITS.interval_s:
            self._writer.flush_soon()  # after a silence nothing is gained by waiting for more
        self._put_at = now

    def end(self, stream: Stream) -> None:
        self._writer.discard(stream)
        self._over.append((monotonic() + _FORGET_AFTER_S, stream.request_id))

    async def run(self) -> None:
        """Write until cancelled. Faults of the database delay pieces and lose none that still matter."""
        await asyncio.gather(self._writer.run(), self._tidy())

    async def _tidy(self) -> None:
        """Forget the pieces of answers that have ended, and those that a lost worker left."""
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
                _log.warning("pieces of ended answers stay for now: %s", error)


class _StreamPieces:
    """The kind of write that hands pieces of answers on."""

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
        """The outcome has the whole answer: its reader gets the rest from there."""
        _log.warning("a piece of an answer could not be handed on: %s", error)

    async def give_up(self, entries: Sequence[_Pieces], error: Exception) -> None:  # noqa: ARG002 -- it never comes to this
        raise error
