"""The loop: claim, dispatch, settle. One process, one event loop, any number of such processes.

    claim ──► read bodies ──► dispatcher (so many calls at a time) ──► buffer ──► settle

The claimer keeps the dispatcher supplied, a little ahead of what it can call; the buffer collects verdicts. Each
waits for the next stage's room, so a slow database or upstream slows the claims, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from uuid import UUID, uuid4

import psycopg

from penstock.claim import claim as claims
from penstock.claim import gates, liveness
from penstock.config import ClaimLimits, Config
from penstock.db.pool import Connection, Pool
from penstock.dispatch.pool import Dispatcher
from penstock.errors import PenstockError
from penstock.model import Again, Halt, Item, Lease, Outcome, Verdict
from penstock.settle.buffer import SettleBuffer
from penstock.settle.write import Settled
from penstock.work import batches

_log = logging.getLogger("penstock.worker")

_READ_ROWS = 500
_FIRST_POLL_S = 0.005
_ROUND_S = 1.0
_ITEM_TIME_WEIGHT = 0.1
# A route that must wait longer than this gives its items back, so that they are not hostages of this process.
_HOSTAGE_S = 10.0
# Retry-After arrives with every refused call; the database needs to hear of it a few times a second at most.
_GATE_STEP_S = 0.25


@dataclass(slots=True)
class Pace:
    """How long one item takes, and so how many to claim at once."""

    limits: ClaimLimits
    item_s: float | None = None

    def observe(self, seconds: float) -> None:
        before = self.item_s
        self.item_s = seconds if before is None else before + _ITEM_TIME_WEIGHT * (seconds - before)

    def claim_size(self, concurrency: int) -> int:
        limits = self.limits
        if self.item_s is None:
            return min(max(limits.claim_min, concurrency), limits.claim_max)
        size = limits.claim_slice_s / max(self.item_s, 1e-6) * concurrency * limits.claim_safety
        return int(min(max(size, limits.claim_min, concurrency), limits.claim_max))


class Worker:
    """Works off one pool's lanes until stopped."""

    def __init__(self, config: Config, database: Pool, pool: str, dispatcher: Dispatcher) -> None:
        self.id: UUID = uuid4()
        self.halts: dict[str, Halt] = {}
        """Routes closed until a person acts, and why."""
        self._config = config
        self._database = database
        self._pool = pool
        self._dispatcher = dispatcher
        self._pace = Pace(config.claim)
        self._stopping = asyncio.Event()
        self._trouble = ""
        self._claiming: asyncio.Task[list[Lease]] | None = None
        self._unread: dict[int, tuple[Lease, list[claims.Range]]] = {}
        self._ready_bytes = 0
        self._room = asyncio.Event()
        self._gated_until: dict[str, float] = {}
        self._gate_tasks: set[asyncio.Task[None]] = set()
        self._touched: set[UUID] = set()
        self._lanes: set[int] = set()
        self.buffer = SettleBuffer(
            database, self.id, config.settle, on_pressure=self._press, on_settled=self._note_settled
        )

    # -- life

    async def run(self) -> None:
        """Register, work until `stop`, give back what is left, unregister."""
        async with self._database.connection() as connection:
            await liveness.register(connection, self.id, self._pool)
        await self._dispatcher.start(self._receive)
        settling = asyncio.create_task(self.buffer.run(), name="settle")
        loops = [
            asyncio.create_task(self._claim_loop(), name="claim"),
            asyncio.create_task(self._heartbeat_loop(), name="heartbeat"),
            asyncio.create_task(self._round_loop(), name="round"),
        ]
        stopped = asyncio.create_task(self._stopping.wait(), name="stop")
        try:
            done, _ = await asyncio.wait([*loops, settling, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            self._stopping.set()
            stopped.cancel()
            await self._end(loops, settling)

    def stop(self) -> None:
        """Claim nothing more, let calls in flight end, then leave. A second call cuts them short."""
        if self._stopping.is_set():
            for item in self._dispatcher.abort():
                self._give_back(item)
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def trouble(self) -> str:
        """What this worker struggles with right now, in a few words; empty if nothing."""
        return self.buffer.trouble or self._trouble

    async def _end(self, loops: Sequence[asyncio.Task[None]], settling: asyncio.Task[None]) -> None:
        claimer, heart, round_task = loops
        await _cancelled([claimer, round_task])
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        if not settling.done():
            self._give_back_unstarted()
            try:
                async with asyncio.timeout(self._config.liveness.drain_timeout_s):
                    await self._dispatcher.wait_idle()
            except TimeoutError:
                for item in self._dispatcher.abort():
                    self._give_back(item)
            self.buffer.close()
        with contextlib.suppress(psycopg.Error):
            await settling
        await self._dispatcher.stop()
        await _cancelled([heart, *self._gate_tasks])
        with contextlib.suppress(psycopg.Error):
            async with self._database.connection() as connection:
                await liveness.unregister(connection, self.id)

    async def _heartbeat_loop(self) -> None:
        interval_s = self._config.liveness.heartbeat_interval_s
        while True:
            await asyncio.sleep(interval_s * random.uniform(0.9, 1))  # noqa: S311 -- jitter
            try:
                async with self._database.connection() as connection:
                    known = await liveness.heartbeat(connection, self.id, draining=self.stopping)
            except psycopg.Error as error:
                _log.warning("heartbeat failed: %s", error)
                continue
            if not known:
                raise PenstockError(
                    "this worker was declared dead: it could not check in for longer than the grace",
                    hint="Its unfinished items run elsewhere; nothing is lost. Start it again.",
                )

    # -- claim

    async def _claim_loop(self) -> None:
        poll_s = _FIRST_POLL_S
        while True:
            self._dispatcher.low_water = max(1, self._pace.claim_size(self._dispatcher.concurrency) // 2)
            await self._dispatcher.wait_room()
            try:
                # Never cut short: a claim that committed unseen would lie idle until somebody reclaims it.
                self._claiming = asyncio.create_task(self._claim(), name="one claim")
                leases = await asyncio.shield(self._claiming)
                for lease in leases:
                    await self._supply(lease)
                if not leases:
                    await self._finish_touched()
            except psycopg.Error as error:
                _log.warning("claim failed, trying again: %s", error)
                # Nobody would come back for bodies that could not be read, and this worker lives on.
                self._give_back_unread(lease for lease, _ in list(self._unread.values()))
                leases = []
                poll_s = self._config.claim.claim_poll_s
            if leases:
                poll_s = _FIRST_POLL_S
                continue
            await asyncio.sleep(poll_s * random.uniform(0.75, 1))  # noqa: S311 -- jitter
            poll_s = min(2 * poll_s, self._config.claim.claim_poll_s)

    async def _claim(self) -> list[Lease]:
        size = self._pace.claim_size(self._dispatcher.concurrency)
        async with self._database.connection() as connection:
            routes = [
                route
                for route in await claims.routes_with_work(connection, self._pool)
                if route not in self.halts and self._gated_until.get(route, 0) <= monotonic()
            ]
            if not routes:
                return []
            share = max(1, size // len(routes))
            leases = await claims.claim(
                connection,
                pool=self._pool,
                wants=dict.fromkeys(routes, share),
                worker_id=self.id,
                taper_floor=min(share, max(self._config.claim.claim_min, self._dispatcher.concurrency)),
            )
        for lease in leases:
            self._unread[lease.id] = (lease, list(lease.ranges))
            self._touched.add(lease.batch_id)
            self._lanes.add(lease.lane_id)
        return leases

    async def _supply(self, lease: Lease) -> None:
        """Read the lease's bodies, a page at a time, as fast as the dispatcher takes them."""
        while lease.id in self._unread:
            await self._wait_for_bytes()
            _, ranges = self._unread[lease.id]
            async with self._database.connection() as connection:
                items = await claims.read_bodies(
                    connection,
                    lease,
                    ranges,
                    max_rows=_READ_ROWS,
                    max_bytes=max(1, self._config.claim.ready_max_bytes - self._ready_bytes),
                )
            if lease.id not in self._unread:
                # Its route was halted or held during the read, and everything unread has gone back.
                return
            if not items:
                # The lane was closed since the claim: what was not read goes back.
                self.buffer.give_back(lease, self._unread.pop(lease.id)[1])
                return
            left = claims.beyond(ranges, items[-1].ordinal)
            if left:
                self._unread[lease.id] = (lease, left)
            else:
                del self._unread[lease.id]
            self._ready_bytes += sum(len(item.raw) for item in items)
            self._dispatcher.offer(items)

    async def _wait_for_bytes(self) -> None:
        while self._ready_bytes >= self._config.claim.ready_max_bytes:
            self._room.clear()
            await self._room.wait()

    # -- verdicts

    def _receive(self, item: Item, verdict: Verdict) -> None:
        """The dispatcher's sink: the call is over and its slot is free."""
        self._release(item)
        self._pace.observe(verdict.duration_ms / 1000)
        if isinstance(verdict, Outcome):
            self._trouble = ""
            self.buffer.put(item, verdict)
        elif isinstance(verdict, Again):
            self._trouble = verdict.error_message
            self.buffer.put(item, verdict)
            if verdict.gate_s > 0:
                self._hold_route(item.route, verdict)
        else:
            self.buffer.give_back(item.lease, [(item.ordinal, item.ordinal + 1)])
            self._halt_route(item.route, verdict)

    def _release(self, item: Item) -> None:
        self._ready_bytes -= len(item.raw)
        self._room.set()

    def _press(self, pressed: bool) -> None:
        if pressed:
            self._dispatcher.stop_starting()
        else:
            self._dispatcher.resume_starting()

    def _hold_route(self, route: str, again: Again) -> None:
        self._dispatcher.hold(route, again.gate_s)
        until = monotonic() + again.gate_s
        if until <= self._gated_until.get(route, 0) + _GATE_STEP_S:
            return
        self._gated_until[route] = until
        self._in_background(
            lambda connection: gates.hold(
                connection, self._pool, route, again.gate_s, again.error_code, again.error_message
            )
        )
        if again.gate_s > _HOSTAGE_S:
            self._give_back_route(route)

    def _halt_route(self, route: str, halt: Halt) -> None:
        if route in self.halts:
            return
        self.halts[route] = halt
        _log.error("route %s is halted: %s", route, halt.error_message)
        self._in_background(
            lambda connection: gates.halt(connection, self._pool, route, halt.error_code, halt.error_message)
        )
        self._give_back_route(route)

    def _in_background(self, write: Callable[[Connection], Awaitable[None]]) -> None:
        async def note() -> None:
            with contextlib.suppress(psycopg.Error):
                async with self._database.connection() as connection:
                    await write(connection)

        task = asyncio.create_task(note(), name="gate")
        self._gate_tasks.add(task)
        task.add_done_callback(self._gate_tasks.discard)

    # -- giving back

    def _give_back(self, item: Item) -> None:
        self._release(item)
        self.buffer.give_back(item.lease, [(item.ordinal, item.ordinal + 1)])

    def _give_back_route(self, route: str) -> None:
        for item in self._dispatcher.take_back(route):
            self._give_back(item)
        self._give_back_unread(lease for lease, _ in list(self._unread.values()) if lease.route == route)

    def _give_back_unstarted(self) -> None:
        for item in self._dispatcher.take_back():
            self._give_back(item)
        self._give_back_unread(lease for lease, _ in list(self._unread.values()))

    def _give_back_unread(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self.buffer.give_back(lease, self._unread.pop(lease.id)[1])

    # -- the round

    def _note_settled(self, settled: Settled) -> None:
        if settled.fenced:
            _log.warning("%d results came too late and were refused", settled.fenced)

    async def _round_loop(self) -> None:
        """What any worker does for all, once a second: reclaim from the dead, end batches, fold counters."""
        while True:
            try:
                async with self._database.connection() as connection:
                    gone = await liveness.gone_from_here(connection)
                    lost = await liveness.reclaim(
                        connection, grace_s=self._config.liveness.heartbeat_grace_s, gone=gone
                    )
                    if lost.leases:
                        _log.warning("took back %d items of workers that are gone", lost.ordinals)
                    for batch_id in await batches.unfinished(connection, self._pool):
                        await batches.tidy(connection, batch_id)
                        await batches.finish(connection, batch_id)
                await self._give_back_closed()
            except psycopg.Error as error:
                _log.warning("housekeeping failed, trying again: %s", error)
            await asyncio.sleep(_ROUND_S * random.uniform(0.75, 1.25))  # noqa: S311 -- jitter

    async def _give_back_closed(self) -> None:
        """Return waiting items whose lane was paused or cancelled after their bodies were read."""
        if not self._lanes:
            return
        async with self._database.connection() as connection:
            closed = await claims.closed_lanes(connection, self._lanes)
        if not closed:
            return
        self._lanes -= closed
        waiting = self._dispatcher.take_back()
        for item in waiting:
            if item.lease.lane_id in closed:
                self._give_back(item)
        self._dispatcher.offer([item for item in waiting if item.lease.lane_id not in closed])

    async def _finish_touched(self) -> None:
        """Nothing to claim: batches this worker had a hand in may be over."""
        if not self._touched or self._dispatcher.in_flight or len(self.buffer):
            return
        self._lanes.clear()
        async with self._database.connection() as connection:
            for batch_id in list(self._touched):
                if await batches.finish(connection, batch_id):
                    self._touched.discard(batch_id)


async def _cancelled(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, psycopg.Error, PenstockError):
            await task
