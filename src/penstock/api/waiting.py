"""Callers who wait for answers, all of one process together.

Answers are made by workers, here or elsewhere. Those of this process say so; for the others one connection listens, and
one statement asks for all that may have come. Nothing depends on being told: whoever waits is also looked for by the
clock, more and more rarely while notices arrive, steadily where there are none (behind a transaction pooler).
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import UUID

import psycopg
from psycopg_pool import PoolTimeout
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from penstock.api.errors import ApiError
from penstock.api.follow import until_left
from penstock.db.bell import ANSWERS, Bell, lanes_payload, ring
from penstock.db.pool import Pool, borrowed
from penstock.settle.buffer import Answers
from penstock.tasks import cancelled
from penstock.work import sessions, streams
from penstock.work.sessions import RequestRow, Stored
from penstock.work.streams import Piece, Place

_log = logging.getLogger("penstock.sessions")

_FIRST_LOOK_S = 0.05
_LAST_LOOK_S = 1.0
_BLIND_LOOK_S = 0.1
_FAULT_LOOK_S = 0.5
# Looks are made on these beats, so that those who wait are asked for together.
_BEAT_S = 0.025
_MAX_AT_ONCE = 5_000
# A reader who lags gets no more until it has caught up.
_MAX_UNREAD_BYTES = 256 * 1024
_MAX_REMEMBERED = 10_000
_LEAVE_S = 5.0
_RING_S = 0.002


class Waiter:
    """One caller."""

    __slots__ = (
        "changed",
        "follows",
        "gone",
        "lane_id",
        "look_s",
        "pieces",
        "place",
        "request_id",
        "row",
        "stored",
        "unread",
    )

    def __init__(self, request_id: UUID, lane_id: int | None, *, follows: bool, stored: Stored | None) -> None:
        self.request_id = request_id
        self.lane_id = lane_id
        self.follows = follows
        """Whether it wants the pieces of a streamed answer as they come."""
        self.stored = stored
        """The request, where all of it is known here."""
        self.row: RequestRow | None = None
        """The answer, once there is one."""
        self.gone = False
        """Its session was deleted, and nothing is left of it."""
        self.changed = asyncio.Event()
        self.look_s = _FIRST_LOOK_S
        self.place = Place(request_id)
        self.pieces: deque[Piece] = deque()
        self.unread = 0

    def take_piece(self) -> Piece:
        piece = self.pieces.popleft()
        self.unread -= len(piece.content)
        return piece

    def tell(self, row: RequestRow) -> None:
        self.row = row
        self.changed.set()

    def hand(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.place = Place(self.request_id, piece.lease_id, piece.number)
            self.pieces.append(piece)
            self.unread += len(piece.content)
            self.changed.set()


class Waiters:
    """All callers of this process who wait."""

    def __init__(self, database: Pool, conninfo: str) -> None:
        self._database = database
        self.bell = Bell(conninfo)
        """The process's one, for others too. It rings once these have begun."""
        self._waiters: set[Waiter] = set()
        self._by_lane: dict[int, set[Waiter]] = {}
        self._due: list[tuple[float, int, Waiter]] = []
        self._count = itertools.count()
        self._rung: set[Waiter] = set()
        self._wake = asyncio.Event()
        self._remembered: dict[int, float] = {}
        self._untold: set[int] = set()
        self._ringing: asyncio.TimerHandle | None = None
        self._telling: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.stopping = asyncio.Event()

    def begin(self) -> None:
        """Listen and look, from now on."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._run(), name="waiters"),
                asyncio.create_task(self.bell.run(), name="waiters' bell"),
            ]

    @contextlib.contextmanager
    def waiting(
        self,
        request_id: UUID,
        lane_id: int | None,
        *,
        since: float = math.inf,
        follows: bool = False,
        stored: Stored | None = None,
    ) -> Iterator[Waiter]:
        """Wait for the answer of a request that is stored. `since` is when it was not yet, on the monotonic clock."""
        self.begin()
        waiter = Waiter(request_id, lane_id, follows=follows, stored=None if follows else stored)
        self._waiters.add(waiter)
        if lane_id is not None:
            self._by_lane.setdefault(lane_id, set()).add(waiter)
            if self._remembered.get(lane_id, -math.inf) > since:
                # That may have been about this one, before we came to listen.
                self._ring((waiter,))
        self._look_later(waiter)
        if self._due[0][2] is waiter:
            self._wake.set()
        try:
            yield waiter
        finally:
            self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        self._waiters.discard(waiter)
        self._rung.discard(waiter)
        if waiter.lane_id is not None and (others := self._by_lane.get(waiter.lane_id)):
            others.discard(waiter)
            if not others:
                del self._by_lane[waiter.lane_id]

    def stop(self) -> None:
        """The server is going down: calls in flight may still end, then nobody waits any longer."""
        if not self.stopping.is_set():
            asyncio.get_running_loop().call_later(_LEAVE_S if self._waiters else 0, self._leave)

    def _leave(self) -> None:
        self.stopping.set()
        for waiter in self._waiters:
            waiter.changed.set()

    async def close(self) -> None:
        self._leave()
        if self._ringing is not None:
            self._ringing.cancel()
        await cancelled([*self._tasks, *([self._telling] if self._telling else [])])

    # -- being told

    def _hear(self, payload: str) -> None:
        if payload in ("", "*"):
            self._ring(self._waiters)
            return
        self.tell(int(text) for text in payload.split(",") if text.isdecimal())

    def take(self, answers: Answers) -> None:
        """What was recorded by a worker of this process: whoever waits for it need not look."""
        for each in answers.known:
            item, outcome = each.item, each.verdict
            for waiter in tuple(self._by_lane.get(item.lease.lane_id, ())):
                if waiter.stored is not None and waiter.request_id == item.session_request_id:
                    row = waiter.stored.answered(item, outcome, answers.at)
                    if row is not None:
                        waiter.tell(row)
                        self._forget(waiter)
        self.tell(answers.lanes)
        self._untold.update(answers.lanes)
        if self._ringing is None:
            self._ringing = asyncio.get_running_loop().call_later(_RING_S, self._begin_telling)

    def _begin_telling(self) -> None:
        self._ringing = None
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_others(), name="ring")

    async def _tell_others(self) -> None:
        """Ring for those who wait elsewhere, once those here are on their way. If it fails, they look by the clock."""
        while self._untold:
            lanes, self._untold = self._untold, set()
            with contextlib.suppress(psycopg.Error, PoolTimeout, OSError):
                async with borrowed(self._database) as connection:
                    await ring(connection, ANSWERS, lanes_payload(lanes))

    def tell(self, lanes: Iterable[int]) -> None:
        """These sessions have news."""
        now = monotonic()
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.clear()
        for lane_id in lanes:
            self._remembered[lane_id] = now
            self._ring(self._by_lane.get(lane_id, ()))

    def _ring(self, waiters: Iterable[Waiter]) -> None:
        self._rung.update(waiters)
        if self._rung:
            self._wake.set()

    def _look_later(self, waiter: Waiter, look_s: float | None = None) -> None:
        due = monotonic() + (look_s or waiter.look_s)
        heapq.heappush(self._due, (math.ceil(due / _BEAT_S) * _BEAT_S, next(self._count), waiter))

    # -- looking

    async def _run(self) -> None:
        with self.bell.hears(ANSWERS, self._hear):
            while True:
                looked_for = self._next()
                if not looked_for:
                    await self._pause()
                    continue
                try:
                    await self._look(looked_for)
                except (psycopg.Error, PoolTimeout, OSError) as error:
                    _log.warning("answers could not be asked for, trying again: %s", error)
                    self._rung.update(waiter for waiter in looked_for if waiter in self._waiters)
                    await asyncio.sleep(_FAULT_LOOK_S)

    def _next(self) -> list[Waiter]:
        """Those whose time has come or who were told of, each once."""
        now = monotonic()
        found = set(itertools.islice(self._rung, _MAX_AT_ONCE))
        self._rung -= found
        while self._due and self._due[0][0] <= now and len(found) < _MAX_AT_ONCE:
            waiter = heapq.heappop(self._due)[2]
            if waiter in self._waiters and waiter.row is None:
                found.add(waiter)
                listening = self.bell.listening.is_set()
                waiter.look_s = min(2 * waiter.look_s, _LAST_LOOK_S) if listening else _BLIND_LOOK_S
                self._look_later(waiter)
        return [waiter for waiter in found if waiter.row is None]

    async def _pause(self) -> None:
        """Until the next look is due, or there is word of an answer."""
        self._wake.clear()
        if self._rung:
            return
        timeout_s = max(0.001, self._due[0][0] - monotonic()) if self._due else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def _look(self, waiters: list[Waiter]) -> None:
        followers = [waiter for waiter in waiters if waiter.follows and waiter.unread < _MAX_UNREAD_BYTES]
        async with borrowed(self._database) as connection:
            if followers:
                found = await streams.read_after(connection, [waiter.place for waiter in followers])
                for waiter, pieces in zip(followers, found, strict=True):
                    waiter.hand(pieces)
            rows = await sessions.answered(connection, list({waiter.request_id for waiter in waiters}))
            by_id = {row.id: row for row in rows}
            # Nobody is told any more of what went with its session before it was looked for.
            blind = not self.bell.listening.is_set()
            long = {waiter.request_id for waiter in waiters if blind or waiter.look_s >= _LAST_LOOK_S}
            left = long - by_id.keys()
            known = await sessions.find_known(connection, list(left)) if left else left
        for waiter in waiters:
            if row := by_id.get(waiter.request_id):
                waiter.tell(row)
            elif waiter.request_id in left and waiter.request_id not in known:
                waiter.gone = True
                waiter.changed.set()
            else:
                continue
            self._forget(waiter)  # even if its caller never comes back for it


class Attention:
    """What a handler keeps an eye on for as long as it waits: its waiter, its caller, the server."""

    def __init__(self, waiters: Waiters, waiter: Waiter, receive: Receive) -> None:
        self._waiters = waiters
        self._waiter = waiter
        self._receive = receive

    def __enter__(self) -> Self:
        self._left = asyncio.create_task(until_left(self._receive))
        self._left.add_done_callback(lambda _: self._waiter.changed.set())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.cancel()

    async def change(self, until: float) -> bool:
        """Wait for news until this time of the monotonic clock: False if there was none, or the server is stopping.

        Raises ClientDisconnect if the caller has gone.
        """
        waiter = self._waiter
        if not self._waiters.stopping.is_set() and not self._left.done():
            timer = asyncio.get_running_loop().call_later(max(0.0, until - monotonic()), waiter.changed.set)
            try:
                await waiter.changed.wait()
            finally:
                timer.cancel()
        if waiter.row is not None or waiter.pieces:
            waiter.changed.clear()
            return True
        if waiter.gone:
            raise ApiError(404, "The request is gone: its session was deleted.", code="session_deleted")
        if self._left.done():
            raise ClientDisconnect
        return False

    async def answer(self, until: float) -> RequestRow | None:
        """The answer, if it comes in time."""
        while self._waiter.row is None:
            if not await self.change(until):
                return None
        return self._waiter.row
