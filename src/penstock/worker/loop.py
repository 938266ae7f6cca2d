"""Worker loop under one identity: claim, dispatch, settle.

    claim ──► read bodies ──► dispatcher (so many calls at a time) ──► buffer ──► settle

Claims keep a little more waiting than the dispatcher can call at once; the buffer collects verdicts. Each stage waits
for room in the next, so a slow database or upstream slows the claims, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg

from penstock.adapt.pace import Pace
from penstock.adapt.pressure import claim_factor
from penstock.backoff import Backoff, jittered
from penstock.claim import claim as claims
from penstock.config import Config
from penstock.db.pool import Pool, borrowed
from penstock.dispatch.dispatcher import Dispatcher
from penstock.model import Again, ClaimPermit, Halt, Item, Lease, Outcome, Verdict
from penstock.observe.logs import event
from penstock.observe.machine import read_figures
from penstock.pools import is_session_pool
from penstock.settle.buffer import Answers, SettleBuffer
from penstock.settle.samples import Samples
from penstock.tasks import cancel_and_wait, ignore_result
from penstock.worker.body_loader import BodyLoader
from penstock.worker.discoveries import Discoveries
from penstock.worker.figures import LoopFigures
from penstock.worker.finished_batches import FinishedBatches
from penstock.worker.identity import Identity
from penstock.worker.inventory import Inventory
from penstock.worker.job_turns import JobTurns
from penstock.worker.maintenance import BatchMaintenance, reclaim_lost, take_idle_round, take_round
from penstock.worker.permit import OnePermit
from penstock.worker.route_gates import RouteGates
from penstock.worker.turns import Turns

_log = logging.getLogger("penstock.worker")

_FIRST_POLL_S = 0.005
_LAST_BACKOFF_S = 5.0
_ROUND_S = 1.0
# While there is nothing to do, and notices arrive when there is.
_IDLE_S = 5.0


class LostIdentityError(Exception):
    """The worker could not check in within the grace: other workers may have its leases by now."""


class WorkerLoop:
    """One worker id, from its registration until it leaves or is lost."""

    def __init__(
        self,
        config: Config,
        database: Pool,
        pool: str,
        dispatcher: Dispatcher,
        halts: dict[str, Halt],
        on_answers: Callable[[Answers], None] | None = None,
        has_notices: Callable[[], bool] = lambda: False,
        only_job: UUID | None = None,
        samples: Samples | None = None,
    ) -> None:
        """`has_notices` says whether notices of new work arrive: then there is no need to poll often. With `only_job`,
        nothing but rows of that job is claimed. `samples` counts results for charts."""
        self._beat = asyncio.Event()
        self._identity = Identity(database, pool, config.liveness, on_beat=self._beat.set)
        self.id = self._identity.id
        self.trouble = ""
        self.woken = asyncio.Event()
        """Set when something can be claimed now: the claim loop does not wait for its next poll."""
        self.buffer = SettleBuffer(
            *(database, self.id, config.settle),
            on_backpressure=self._set_backpressure,
            on_written=self._note_written,
            on_more=self.woken.set,
            on_answers=on_answers,
            settle_growing=Discoveries(config.tables).settle,
            tables=config.tables,
            samples=None if is_session_pool(pool) else samples,
            work_pool=pool,
        )
        self._figures = LoopFigures(pool)
        self._config = config
        self._database = database
        self._pool = pool
        self._has_notices = has_notices
        self._for_sessions = is_session_pool(pool)
        self._dispatcher = dispatcher
        self._gates = RouteGates(database, pool, dispatcher, halts, config.retry.halt_probe_s)
        self._turns: Turns | JobTurns = (
            Turns(pool, by_time=self._for_sessions) if only_job is None else JobTurns(pool, only_job)
        )
        self._pace = Pace(config.claim, self._for_sessions)
        self._inventory = Inventory(config.claim.ready_max_bytes)
        self._bodies = BodyLoader(database, self._inventory, dispatcher, self.buffer)
        self._finished = FinishedBatches(database, self._inventory, self.buffer)
        self._stopping = asyncio.Event()
        self._ended = False
        self._uncertain_until = 0.0
        """Until then, a failed claim may still commit, and leave leases that this worker does not know."""
        self._claiming: asyncio.Task[list[Lease]] | None = None
        self._permit = OnePermit()
        self._failing: set[int] = set()
        """Nonces of leases whose items are being failed as `worker_lost`."""
        self._reclaimed: list[str] = []
        """Routes that have items reclaimed from lost workers."""
        self._batch_maintenance = BatchMaintenance(database)
        self._heartbeat = self._identity.heartbeat

    # -- life

    async def run(self) -> None:
        """Register, work until `stop`, give back what is left, unregister. Raises LostIdentityError."""
        await self._identity.register()
        settling = asyncio.create_task(self.buffer.run(), name="settle")
        loops: list[asyncio.Task[Any]] = [
            asyncio.create_task(loop(), name=name)
            for name, loop in (
                ("guard", self._guard_loop),
                ("claim", self._claim_loop),
                ("round", self._round_loop),
                ("finish", self._finished.run),
                ("stop", self._stopping.wait),
            )
        ]
        try:
            done, _ = await asyncio.wait([*loops, settling], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await self._leave(loops, settling)
        except BaseException:
            await self._abandon(loops, settling)
            raise
        finally:
            self._heartbeat.stop()

    def stop(self) -> None:
        """Claim nothing more, let calls in flight end, then leave. A second call cuts them short."""
        self._dispatcher.stop_starting()  # at once: a call that is cut short makes room for the next
        if self._stopping.is_set():
            self._bodies.give_back(self._dispatcher.abort())
        self._heartbeat.drain()
        self._stopping.set()

    async def _leave(self, loops: list[asyncio.Task[Any]], settling: asyncio.Task[None]) -> None:
        """Give back items not called, wait for calls in flight, write every result, and unregister."""
        guard, *others = loops
        await cancel_and_wait(others)
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        async with self._permit.withhold():
            pass  # Items claimed under the permit are here now. No more follow: this identity is stopping.
        self._give_back_unstarted()
        draining = asyncio.create_task(self._drain(), name="drain")
        loops.append(draining)
        done, _ = await asyncio.wait([draining, guard, settling], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        self.buffer.close()
        done, _ = await asyncio.wait([settling, guard], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        await cancel_and_wait([guard, *self._gates.tasks])
        self._figures.flush()
        _log.info("%s", self.buffer.report())
        await self._identity.leave()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._config.liveness.drain_timeout_s):
                await self._dispatcher.wait_idle()
        except TimeoutError:
            self._bodies.give_back(self._dispatcher.abort())

    async def _abandon(self, loops: list[asyncio.Task[Any]], settling: asyncio.Task[None]) -> None:
        """Cut every call short and drop every result: the leases of this identity are no longer its own."""
        self._ended = True
        dropped = len(self._dispatcher.take_back()) + len(self._dispatcher.abort()) + len(self.buffer)
        if dropped:
            fields = event("results_dropped", worker=self.id, count=dropped)
            _log.warning("dropped %d items and results of worker %s", dropped, self.id, extra=fields)
        await cancel_and_wait([*loops, settling, *self._gates.tasks])
        # The buffer was dropped with this identity: the next loop begins with an empty one.
        self._dispatcher.resume_starting()

    async def _guard_loop(self) -> None:
        """Watch the heartbeat. Past `alive_until` the dispatcher starts nothing by itself; this ends the loop."""
        while True:
            self._beat.clear()
            left_s = self._heartbeat.alive_until - monotonic()
            if self._heartbeat.declared_dead or left_s <= 0:
                raise LostIdentityError("it was declared dead" if self._heartbeat.declared_dead else "it fell silent")
            self._dispatcher.start_until(self._heartbeat.alive_until)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._beat.wait()

    # -- claim

    async def _claim_loop(self) -> None:
        poll_s = _FIRST_POLL_S
        backoff = Backoff(self._config.claim.claim_poll_s, _LAST_BACKOFF_S)
        while True:
            self._dispatcher.low_water = self._low_water()
            await self._dispatcher.wait_room()
            try:
                # Never cut short: a claim that committed unseen would lie idle until it is reclaimed.
                self._claiming = asyncio.create_task(self._claim(), name="one claim")
                self._claiming.add_done_callback(ignore_result)
                leases = await asyncio.shield(self._claiming)
                await self._bodies.load_sessions([lease for lease in leases if lease.session])
                for lease in sorted(leases, key=lambda each: not each.reclaims):
                    if not lease.session:
                        await self._bodies.load_batch(lease)
            except psycopg.Error as error:
                _log.warning("claim failed, trying again: %s", error)
                await backoff.wait()
                await self._recover()
                continue
            backoff.reset()
            if leases:
                poll_s = _FIRST_POLL_S
                continue
            poll_s = await self._idle(poll_s)

    async def _idle(self, poll_s: float) -> float:
        """Wait for the next poll, for the next deferral due, or until woken; returns the interval of the poll after."""
        due_in_s = self._turns.due_in_s
        wait_s = poll_s if due_in_s is None else min(poll_s, max(_FIRST_POLL_S, due_in_s))
        try:
            async with asyncio.timeout(jittered(wait_s, 0.75)):
                await self.woken.wait()
        except TimeoutError:
            longest_s = self._config.claim.claim_poll_s
            if self._has_notices() and self._turns.nothing_due:
                longest_s = max(longest_s, _IDLE_S)
            return min(2 * poll_s, longest_s)
        self.woken.clear()
        return _FIRST_POLL_S

    def wake(self) -> None:
        """Claim now: there is new work. Neither the next poll nor the items claimed ahead are waited for."""
        self._turns.note_news()
        self.woken.set()
        self._dispatcher.low_water = self._low_water()

    def _low_water(self) -> int:
        """Waiting items below which it is time to claim; with reclaimed or new work, so many that it is time now."""
        ahead = self._pace.ahead(self._dispatcher.concurrency)
        # A claim takes `2 * ahead` when fewer than `ahead` wait: up to three times `ahead` wait.
        if self._reclaimed:
            return 3 * ahead + self._turnover()
        return max(1, 5 * ahead if self._turns.news and not self._for_sessions else ahead)

    def _turnover(self) -> int:
        return self._pace.within(_ROUND_S, self._dispatcher.concurrency)

    async def _find_reclaimed(self) -> None:
        """Find routes with reclaimed items. These go first: each worker claims as many as it can call in one round,
        ahead of the items it already holds."""
        if self._for_sessions:
            return
        async with borrowed(self._database) as connection:
            found = await claims.list_reclaimed_routes(connection, self._pool)
        self._reclaimed = [route for route in found if self._gates.may_claim(route)]
        self._dispatcher.low_water = self._low_water()

    async def _claim(self) -> list[Lease]:
        ahead = self._pace.ahead(self._dispatcher.concurrency)
        size = ahead + self._dispatcher.room if self._for_sessions else 2 * ahead
        # After news more items wait than are needed: claim from lanes of which few are held, and from no others.
        full = self._inventory.lanes_with(self._dispatcher.concurrency) if self._dispatcher.waiting > ahead else []
        routes, self._reclaimed = self._reclaimed, []
        async with borrowed(self._database) as connection:
            if routes:
                size = self._turnover()
                wants = dict.fromkeys(routes, max(1, size // len(routes)))
            else:
                found = await self._turns.routes(connection)
                routes = [route for route in found if self._gates.may_claim(route)]
                wants = self._pace.shares(routes, size, self._dispatcher.concurrency)
            if not routes or not self._heartbeat.alive:
                return []
            share = max(1, size // len(routes))
            began = monotonic()
            leases = await self._turns.claim(
                connection,
                wants,
                worker_id=self.id,
                full=full,
                taper_floor=min(share, max(self._config.claim.claim_min, self._dispatcher.concurrency)),
                suspect_ok=not (self._inventory.holds_suspect or self.buffer.holds_suspect),
            )
        self._figures.note_claim(leases, monotonic() - began)
        for lease in leases:
            self._inventory.take(lease)
        return leases

    async def _recover(self) -> None:
        """Give back, after a failed claim or read, what could not be read, and leases whose claim was not answered."""
        for lease, ranges in self._inventory.drop_unread():
            self.buffer.give_back(lease, ranges)
        self._expect_forgotten()
        with contextlib.suppress(psycopg.Error):
            await self._give_back_forgotten()

    def _expect_forgotten(self) -> None:
        """Look for forgotten leases in the next rounds: a claim failed here, and the server may still commit it."""
        self._uncertain_until = monotonic() + self._config.database.statement_timeout_s

    async def _give_back_forgotten(self) -> None:
        async with self._permit.withhold():
            async with borrowed(self._database) as connection:
                found = await claims.list_forgotten_leases(connection, self.id, self._known)
            if self._claiming is not None:
                # A lease found may be that claim's.
                await asyncio.wait([self._claiming])
            for lease in found:
                if lease.nonce not in self._known:
                    _log.warning("lease %d was claimed, but the answer was lost: giving it back", lease.id)
                    self.buffer.give_back(lease, lease.ranges)

    @property
    def _known(self) -> set[int]:
        return self.buffer.leases.union(self._inventory.leases, self._failing)

    # -- claimed as it is stored

    def issue_permit(self) -> ClaimPermit | None:
        """The right to claim for this worker in one statement, if it can call anything now. It must be returned."""
        ready = self._identity.registered and self._heartbeat.alive and not self._stopping.is_set() and not self._ended
        room = self._dispatcher.room
        if not ready or not room or not self._permit.issue():
            return None
        return ClaimPermit(self.id, room, self._gates.closed)

    def return_permit(self, claimed: Sequence[Item] | None) -> None:
        """Call the items claimed under the permit. None: the statement failed, and may have claimed some or not."""
        if claimed is None:
            self._expect_forgotten()
        elif not self._ended:  # else other workers reclaim these items with the rest
            self._start(claimed)
        self._permit.take_back()

    def _start(self, items: Sequence[Item]) -> None:
        for item in items:
            self._inventory.take_item(item)
        if self._stopping.is_set():
            self._bodies.give_back(items)
        else:
            self._dispatcher.offer(items)

    # -- verdicts

    def receive(self, item: Item, verdict: Verdict) -> None:
        """Take the dispatcher's verdict on an item: its call is over and its slot is free."""
        if self._inventory.release(item):
            self._finished.note_released(item.lease)
        # A refusal comes back at once: it says nothing of the time that an item takes.
        if not isinstance(verdict, Again) or verdict.counts:
            self._pace.observe(verdict.duration_ms / 1000, item.route)
        self._figures.note_call(item, verdict)
        if isinstance(verdict, Outcome):
            self.trouble = ""
            self.buffer.decide(item, verdict)
        elif isinstance(verdict, Again):
            self.trouble = verdict.error_message
            self.buffer.decide(item, verdict)
            if verdict.gate_s > 0 and self._gates.hold(item.route, verdict):
                self._give_back_unstarted(item.route)
        else:
            self.buffer.give_back(item.lease, [(item.ordinal, item.ordinal + 1)])
            self.halt(item.route, verdict, item.lease.batch_id)

    def halt(self, route: str, halt: Halt, batch_id: UUID | None = None) -> None:
        """Close a route until a person acts."""
        if self._gates.halt(route, halt, batch_id):
            self._give_back_unstarted(route)

    def _note_written(self) -> None:
        self._finished.note_written()

    def _set_backpressure(self, on: bool) -> None:
        if on:
            self._dispatcher.stop_starting()
        elif not self._stopping.is_set():
            self._dispatcher.resume_starting()

    # -- giving back

    def _give_back_unstarted(self, route: str | None = None) -> None:
        """Give back the items not called yet: all, or one route's."""
        self._bodies.give_back(self._dispatcher.take_back(route))
        for lease, ranges in self._inventory.drop_unread(route):
            self.buffer.give_back(lease, ranges)

    # -- the round

    async def _round_loop(self) -> None:
        report_every_s = self._config.liveness.heartbeat_interval_s
        report_at = monotonic() + report_every_s
        while True:
            try:
                my_turn = await take_round(self._database, _ROUND_S)
                async with self._permit.withhold():
                    given_up = await reclaim_lost(self._database, self.id, self._config, everywhere=my_turn)
                    self._failing.update(lease.nonce for lease in given_up)
                for lease in given_up:
                    await self._bodies.fail_lost(lease)
                    self._failing.discard(lease.nonce)
                await self._find_reclaimed()
                if my_turn:
                    await self._batch_maintenance.round()
                if monotonic() < self._uncertain_until:
                    await self._give_back_forgotten()
                await self._bodies.give_back_closed()
                await self._gates.refresh()
                self._figures.flush()
                if monotonic() >= report_at:
                    report_at = monotonic() + report_every_s
                    await self._bodies.report_progress(self.id)
            except psycopg.Error as error:
                _log.warning("maintenance failed, trying again: %s", error)
            await self._wait_for_round()

    async def _wait_for_round(self) -> None:
        """Wait until the next round. Idle workers leave the rounds to busy ones. If all are idle, one worker of each
        process does them less often: still often enough, compared with the grace, to notice a lost worker."""
        while True:
            wait_s = jittered(_ROUND_S, 0.75, 1.25)
            began = monotonic()
            await asyncio.sleep(wait_s)
            self._pace.factor = claim_factor(read_figures(loop_lag_s=monotonic() - began - wait_s))
            holds_nothing = not self._inventory.leases and not len(self.buffer)
            idle = holds_nothing and self._turns.nothing_due and self._has_notices()
            if not idle or take_idle_round(self._database, min(_IDLE_S, self._config.liveness.heartbeat_grace_s / 8)):
                return
