"""Answers on their way, piece by piece, from the worker that reads them to the server where their caller waits.

Pieces only make an answer come sooner. What counts is the outcome, which holds the whole of it: whoever has read some
pieces takes the rest from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic, time
from typing import NamedTuple
from uuid import UUID

import psycopg
from psycopg_pool import PoolTimeout

from penstock.db import sql
from penstock.db.arrays import ByteaArray, Int4Array, Int8Array
from penstock.db.bell import lanes_payload
from penstock.db.pool import Connection, Pool, borrowed
from penstock.model import Item, Lease

_log = logging.getLogger("penstock.streams")

_SQL = sql.load("penstock.work", "streams.sql")

# Many tokens make one row; a reader does not notice so short a wait, and the first piece does not wait at all.
_INTERVAL_S = 0.03
_BACKOFF_S = 0.5
_FORGET_AFTER_S = 60.0
_SWEEP_EVERY_S = 60.0
_SWEEP_OLDER_S = 3_600.0
_SWEEP_AT_ONCE = 1_000
_READ_AT_ONCE = 64

HEAD = 0
"""The number of the first piece, which is not of the body: it is the content type."""


class Place(NamedTuple):
    """How far somebody has read."""

    request_id: UUID
    lease_id: int = 0
    piece: int = -1


class Piece(NamedTuple):
    lease_id: int
    lease_nonce: int
    number: int
    content: bytes


async def read_after(connection: Connection, places: Sequence[Place]) -> list[list[Piece]]:
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
    number: int = HEAD
    unwritten: list[bytes] = field(default_factory=list)

    def put(self, piece: bytes) -> None:
        self.unwritten.append(piece)
        self.writer.wake(self)

    def end(self) -> None:
        self.unwritten.clear()
        self.writer.ended(self)

    def take(self) -> list[_Row]:
        """What there is to write: the head by itself, the rest as one."""
        pieces, self.unwritten = self.unwritten, []
        parts = [pieces[0], b"".join(pieces[1:])] if self.number == HEAD else [b"".join(pieces)]
        rows = []
        for part in parts:
            if part or self.number == HEAD:
                rows.append(_Row(self.request_id, self.lease, self.number, part))
                self.number += 1
        return rows


class StreamWriter:
    """All streams of one process: few statements, each for all that have something to say."""

    def __init__(self, database: Pool) -> None:
        self._database = database
        self._waiting: dict[Stream, None] = {}
        self._some = asyncio.Event()
        self._over: deque[tuple[float, UUID]] = deque()
        self._sweep_at = monotonic() + _SWEEP_EVERY_S

    def begin(self, item: Item, content_type: str) -> Stream:
        """An answer has begun to come. Only items of sessions have readers."""
        if item.session_request_id is None:
            raise ValueError("this item has no reader")
        stream = Stream(self, item.session_request_id, item.lease)
        stream.put(content_type.encode())
        return stream

    def wake(self, stream: Stream) -> None:
        self._waiting[stream] = None
        self._some.set()

    def ended(self, stream: Stream) -> None:
        self._waiting.pop(stream, None)
        self._over.append((monotonic() + _FORGET_AFTER_S, stream.request_id))

    async def run(self) -> None:
        """Write until cancelled. Faults of the database delay pieces and lose none that still matter."""
        rows: list[_Row] = []
        while True:
            try:
                await self._tidy()
                if not rows:
                    if not await self._something():
                        continue
                    rows = [row for stream in self._waiting for row in stream.take()]
                    self._waiting.clear()
                began = monotonic()
                await self._write(rows)
                rows = []
                await asyncio.sleep(max(0.0, began + _INTERVAL_S - monotonic()))
            except (psycopg.Error, PoolTimeout) as error:
                _log.warning("pieces of answers could not be handed on, trying again: %s", error)
                await asyncio.sleep(_BACKOFF_S)

    async def _something(self) -> bool:
        """Wait for something to write, or until it is time to tidy."""
        try:
            async with asyncio.timeout(_SWEEP_EVERY_S):
                await self._some.wait()
        except TimeoutError:
            return False
        self._some.clear()
        return bool(self._waiting)

    async def _write(self, rows: Iterable[_Row]) -> None:
        rows = list(rows)
        if not rows:
            return
        async with borrowed(self._database) as connection:
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

    async def _tidy(self) -> None:
        now = monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _SWEEP_EVERY_S
        over: list[UUID] = []
        while self._over and self._over[0][0] <= now:
            over.append(self._over.popleft()[1])
        # Ids begin with the time they were made.
        before = UUID(int=int((time() - _SWEEP_OLDER_S) * 1000) << 80)
        async with borrowed(self._database) as connection:
            if over:
                await connection.execute(_SQL["forget_pieces"], {"requests": over})
            await connection.execute(_SQL["sweep_pieces_if_unleased"], {"before": before, "limit": _SWEEP_AT_ONCE})
