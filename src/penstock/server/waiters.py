"""Waiters: the callers of one process who wait for answers.

Answers are recorded by workers, here or in other processes. Workers of this process say so; for the others one
connection listens for notices, and one statement reads all answers that may have come. Nothing depends on notices: the
answer of each waiter is also looked for periodically, more and more rarely while notices arrive, steadily where there
are none (behind a transaction pooler).
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
from uuid import UUID

import psycopg
from psycopg_pool import PoolTimeout

from penstock.db.notify import ANSWERS, NoticeListener, lanes_payload, notify
from penstock.db.pool import Pool, borrowed
from penstock.sessions.accept import Stored
from penstock.sessions.answers import RequestRow, find_known, read_answered
from penstock.sessions.streams import Piece, StreamPosition, read_pieces_after
from penstock.settle.buffer import Answers
from penstock.tasks import cancel_and_wait

_log = logging.getLogger("penstock.sessions")

_FIRST_LOOK_S = 0.05
_LAST_LOOK_S = 1.0
_BLIND_LOOK_S = 0.1
_FAULT_LOOK_S = 0.5
# Times of looks are rounded up to multiples of this, so that many waiters share a statement.
_LOOK_STEP_S = 0.025
_MAX_AT_ONCE = 5_000
# A caller who reads too slowly gets no more pieces until it has caught up.
_MAX_UNREAD_BYTES = 256 * 1024
_MAX_REMEMBERED = 10_000
_LEAVE_S = 5.0
_NOTIFY_S = 0.002


class Waiter:
    """One caller who waits for the answer to one request."""

    __slots__ = (
        "changed",
        "follows",
        "gone",
        "lane_id",
        "look_s",
        "pieces",
        "position",
        "request_id",
        "row",
        "stored",
        "unread",
    )

    def __init__(self, request_id: UUID, lane_id: int | None, *, follows: bool, stored: Stored | None) -> None:
        self.request_id = request_id
        self.lane_id = lane_id
        self.follows = follows
        """Whether the caller wants the pieces of a streamed answer as they come."""
        self.stored = stored
        """The request as it was stored, if this process stored it."""
        self.row: RequestRow | None = None
        """The answer, once there is one."""
        self.gone = False
        """The session was deleted, and nothing is left of the request."""
        self.changed = asyncio.Event()
        self.look_s = _FIRST_LOOK_S
        self.position = StreamPosition(request_id)
        self.pieces: deque[Piece] = deque()
        self.unread = 0

    def take_piece(self) -> Piece:
        piece = self.pieces.popleft()
        self.unread -= len(piece.content)
        return piece

    def set_answer(self, row: RequestRow) -> None:
        self.row = row
        self.changed.set()

    def add_pieces(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self.position = StreamPosition(self.request_id, piece.lease_id, piece.number)
            self.pieces.append(piece)
            self.unread += len(piece.content)
            self.changed.set()


class Waiters:
    """All waiting callers of this process."""

    def __init__(self, database: Pool, conninfo: str) -> None:
        self._database = database
        self.notices = NoticeListener(conninfo)
        """The one listener of this process, for other subscribers too. It runs from `begin` on."""
        self._waiters: set[Waiter] = set()
        self._by_lane: dict[int, set[Waiter]] = {}
        self._due: list[tuple[float, int, Waiter]] = []
        self._count = itertools.count()
        self._notified: set[Waiter] = set()
        self._wake = asyncio.Event()
        self._remembered: dict[int, float] = {}
        self._unannounced: set[int] = set()
        self._notify_timer: asyncio.TimerHandle | None = None
        self._notifying: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.stopping = asyncio.Event()

    def begin(self) -> None:
        """Begin to listen and to look."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._run(), name="waiters"),
                asyncio.create_task(self.notices.run(), name="notices"),
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
        """Wait for the answer of a stored request. `since`, on the monotonic clock, is a time before it was stored."""
        self.begin()
        waiter = Waiter(request_id, lane_id, follows=follows, stored=None if follows else stored)
        self._waiters.add(waiter)
        if lane_id is not None:
            self._by_lane.setdefault(lane_id, set()).add(waiter)
            if self._remembered.get(lane_id, -math.inf) > since:
                # That notice, before this waiter was added, may have been about its answer.
                self._look_soon((waiter,))
        self._look_later(waiter)
        if self._due[0][2] is waiter:
            self._wake.set()
        try:
            yield waiter
        finally:
            self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        self._waiters.discard(waiter)
        self._notified.discard(waiter)
        if waiter.lane_id is not None and (others := self._by_lane.get(waiter.lane_id)):
            others.discard(waiter)
            if not others:
                del self._by_lane[waiter.lane_id]

    def stop(self) -> None:
        """End all waits soon: the server is stopping, and calls in flight may still end."""
        if not self.stopping.is_set():
            asyncio.get_running_loop().call_later(_LEAVE_S if self._waiters else 0, self._leave)

    def _leave(self) -> None:
        self.stopping.set()
        for waiter in self._waiters:
            waiter.changed.set()

    async def close(self) -> None:
        self._leave()
        if self._notify_timer is not None:
            self._notify_timer.cancel()
        await cancel_and_wait([*self._tasks, *([self._notifying] if self._notifying else [])])

    # -- notices

    def _receive(self, payload: str) -> None:
        if payload in ("", "*"):
            self._look_soon(self._waiters)
            return
        self.tell(int(text) for text in payload.split(",") if text.isdecimal())

    def take(self, answers: Answers) -> None:
        """Take answers that a worker of this process has recorded: their waiters need not look in the database."""
        for each in answers.known:
            item, outcome = each.item, each.verdict
            for waiter in tuple(self._by_lane.get(item.lease.lane_id, ())):
                if waiter.stored is not None and waiter.request_id == item.session_request_id:
                    row = waiter.stored.as_answered(item, outcome, answers.at)
                    if row is not None:
                        waiter.set_answer(row)
                        self._forget(waiter)
        self.tell(answers.lanes)
        self._unannounced.update(answers.lanes)
        if self._notify_timer is None:
            self._notify_timer = asyncio.get_running_loop().call_later(_NOTIFY_S, self._begin_notifying)

    def _begin_notifying(self) -> None:
        self._notify_timer = None
        if self._notifying is None or self._notifying.done():
            self._notifying = asyncio.create_task(self._notify_others(), name="notify")

    async def _notify_others(self) -> None:
        """Notify waiters of other processes, once those here are served. If it fails, they look periodically."""
        while self._unannounced:
            lanes, self._unannounced = self._unannounced, set()
            with contextlib.suppress(psycopg.Error, PoolTimeout, OSError):
                async with borrowed(self._database) as connection:
                    await notify(connection, ANSWERS, lanes_payload(lanes))

    def tell(self, lanes: Iterable[int]) -> None:
        """Look soon for the answers of these sessions: they have news."""
        now = monotonic()
        if len(self._remembered) > _MAX_REMEMBERED:
            self._remembered.clear()
        for lane_id in lanes:
            self._remembered[lane_id] = now
            self._look_soon(self._by_lane.get(lane_id, ()))

    def _look_soon(self, waiters: Iterable[Waiter]) -> None:
        self._notified.update(waiters)
        if self._notified:
            self._wake.set()

    def _look_later(self, waiter: Waiter, look_s: float | None = None) -> None:
        due = monotonic() + (look_s or waiter.look_s)
        heapq.heappush(self._due, (math.ceil(due / _LOOK_STEP_S) * _LOOK_STEP_S, next(self._count), waiter))

    # -- looking

    async def _run(self) -> None:
        with self.notices.subscribe(ANSWERS, self._receive):
            while True:
                looked_for = self._next()
                if not looked_for:
                    await self._pause()
                    continue
                try:
                    await self._look(looked_for)
                except (psycopg.Error, PoolTimeout, OSError) as error:
                    _log.warning("answers could not be asked for, trying again: %s", error)
                    self._notified.update(waiter for waiter in looked_for if waiter in self._waiters)
                    await asyncio.sleep(_FAULT_LOOK_S)

    def _next(self) -> list[Waiter]:
        """Waiters to look for now: notified, or due by their period; each once."""
        now = monotonic()
        found = set(itertools.islice(self._notified, _MAX_AT_ONCE))
        self._notified -= found
        while self._due and self._due[0][0] <= now and len(found) < _MAX_AT_ONCE:
            waiter = heapq.heappop(self._due)[2]
            if waiter in self._waiters and waiter.row is None:
                found.add(waiter)
                listening = self.notices.listening.is_set()
                waiter.look_s = min(2 * waiter.look_s, _LAST_LOOK_S) if listening else _BLIND_LOOK_S
                self._look_later(waiter)
        return [waiter for waiter in found if waiter.row is None]

    async def _pause(self) -> None:
        """Wait until the next look is due, or a notice of an answer arrives."""
        self._wake.clear()
        if self._notified:
            return
        timeout_s = max(0.001, self._due[0][0] - monotonic()) if self._due else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def _look(self, waiters: list[Waiter]) -> None:
        followers = [waiter for waiter in waiters if waiter.follows and waiter.unread < _MAX_UNREAD_BYTES]
        async with borrowed(self._database) as connection:
            if followers:
                found = await read_pieces_after(connection, [waiter.position for waiter in followers])
                for waiter, pieces in zip(followers, found, strict=True):
                    waiter.add_pieces(pieces)
            rows = await read_answered(connection, list({waiter.request_id for waiter in waiters}))
            by_id = {row.id: row for row in rows}
            # A request that was purged with its session before it was looked for is found nowhere, and has no notice.
            blind = not self.notices.listening.is_set()
            long = {waiter.request_id for waiter in waiters if blind or waiter.look_s >= _LAST_LOOK_S}
            left = long - by_id.keys()
            known = await find_known(connection, list(left)) if left else left
        for waiter in waiters:
            if row := by_id.get(waiter.request_id):
                waiter.set_answer(row)
            elif waiter.request_id in left and waiter.request_id not in known:
                waiter.gone = True
                waiter.changed.set()
            else:
                continue
            self._forget(waiter)  # even if its caller never takes the answer
