"""The loop under one identity: claim, dispatch, settle.

    claim ──► read bodies ──► dispatcher (so many calls at a time) ──► buffer ──► settle

The claimer keeps the dispatcher supplied, a little ahead of what it can call; the buffer collects verdicts. Each
waits for the next stage's room, so a slow database or upstream slows the claims, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

import psycopg

from penstock.adapt.pace import Pace
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.claim.heart import Heart
from penstock.config import Config
from penstock.db.pool import Pool, borrowed
from penstock.dispatch.pool import Dispatcher
from penstock.hand import Door, Hand, Handing
from penstock.housekeeping import BatchKeeper, reclaim_lost, take_idle_round, take_turn
from penstock.model import Again, Halt, Item, Lease, Outcome, Verdict
from penstock.parting import Parting
from penstock.providers import is_session_pool
from penstock.routes import Routes
from penstock.settle.buffer import Answers, SettleBuffer
from penstock.supply import Supply
from penstock.tasks import cancelled, heard
from penstock.turns import Turns

_log = logging.getLogger("penstock.worker")

_FIRST_POLL_S = 0.005
_LAST_BACKOFF_S = 5.0
_ROUND_S = 1.0
# Where there is nothing to do, and notices tell of what there will be.
_IDLE_S = 5.0


class LostIdentityError(Exception):
    """This worker could not check in within the grace: the others may have its work by now."""


class Shift:
    """One worker id, from its registration until it leaves or is lost."""

    def __init__(
        self,
        config: Config,
        database: Pool,
        pool: str,
        dispatcher: Dispatcher,
        halts: dict[str, Halt],
        on_answers: Callable[[Answers], None] | None = None,
        is_told: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_told` says whether notices of new work arrive: then there is no need to ask often."""
        self.id: UUID = uuid4()
        self.trouble = ""
        self.woken = asyncio.Event()
        """Something can be claimed now, so do not wait for the next poll."""
        self.buffer = SettleBuffer(
            *(database, self.id, config.settle),
            on_pressure=self._press,
            on_written=self._written,
            on_more=self.woken.set,
            on_answers=on_answers,
        )
        self._config = config
        self._database = database
        self._pool = pool
        self._is_told = is_told
        self._for_sessions = is_session_pool(pool)
        self._dispatcher = dispatcher
        self._routes = Routes(database, pool, dispatcher, halts)
        self._turns = Turns(pool, by_time=self._for_sessions)
        self._pace = Pace(config.claim, self._for_sessions)
        self._hand = Hand(config.claim.ready_max_bytes)
        self._supply = Supply(database, self._hand, dispatcher, self.buffer)
        self._parting = Parting(database, self._hand, self.buffer)
        self._stopping = asyncio.Event()
        self._registered = False
        self._ended = False
        self._doubts_until = 0.0
        """Until then, something may turn out to have been claimed without our knowing."""
        self._beat = asyncio.Event()
        self._claiming: asyncio.Task[list[Lease]] | None = None
        self._door = Door()
        self._condemned: set[int] = set()
        """The nonces of leases of what is to be failed, until it is."""
        self._hurried: list[str] = []
        """Routes of which something was taken back from the lost."""
        self._batch_keeper = BatchKeeper(database)
        self._loop = asyncio.get_running_loop()
        self._heart = Heart(str(database.conninfo), self.id, config.liveness, on_beat=self._hear)

    # -- life

    async def run(self) -> None:
        """Register, work until `stop`, give back what is left, unregister. Raises LostIdentityError."""
        await self._register()
        self._heart.start()
        settling = asyncio.create_task(self.buffer.run(), name="settle")
        loops: list[asyncio.Task[Any]] = [
            asyncio.create_task(loop(), name=name)
            for name, loop in (
                ("guard", self._guard_loop),
                ("claim", self._claim_loop),
                ("round", self._round_loop),
                ("parting", self._parting.run),
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
            self._heart.stop()

    def _hear(self) -> None:
        self._loop.call_soon_threadsafe(self._beat.set)

    async def _register(self) -> None:
        async with borrowed(self._database) as connection:
            self._heart.count_from_now()
            await liveness.register(connection, self.id, self._pool)
        self._registered = True

    def stop(self) -> None:
        """Claim nothing more, let calls in flight end, then leave. A second call cuts them short."""
        self._dispatcher.stop_starting()  # at once: a call that is cut short makes room for the next
        if self._stopping.is_set():
            self._supply.give_back(self._dispatcher.abort())
        self._heart.drain()
        self._stopping.set()

    async def _leave(self, loops: list[asyncio.Task[Any]], settling: asyncio.Task[None]) -> None:
        """Give back what was not called, wait for what was, write everything down, and go."""
        guard, *others = loops
        await cancelled(others)
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        async with self._door.closed():
            pass  # Until whatever is being handed in is here. Nothing follows it: this shift is stopping.
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
        await cancelled([guard, *self._routes.tasks])
        _log.info("%s", self.buffer.report())
        with contextlib.suppress(psycopg.Error):
            async with borrowed(self._database) as connection:
                await liveness.unregister(connection, self.id)

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._config.liveness.drain_timeout_s):
                await self._dispatcher.wait_idle()
        except TimeoutError:
            self._supply.give_back(self._dispatcher.abort())

    async def _abandon(self, loops: list[asyncio.Task[Any]], settling: asyncio.Task[None]) -> None:
        """Cut every call short and drop every result: what this identity held is no longer its own."""
        self._ended = True
        dropped = len(self._dispatcher.take_back()) + len(self._dispatcher.abort()) + len(self.buffer)
        if dropped:
            _log.warning("dropped %d items and results of worker %s", dropped, self.id)
        await cancelled([*loops, settling, *self._routes.tasks])
        # Whatever filled the buffer has been dropped with it: the next shift begins with an empty one.
        self._dispatcher.resume_starting()

    async def _guard_loop(self) -> None:
        """Watch the heart. Past `alive_until` the dispatcher starts nothing by itself; this ends the rest."""
        while True:
            self._beat.clear()
            left_s = self._heart.alive_until - monotonic()
            if self._heart.declared_dead or left_s <= 0:
                raise LostIdentityError("it was declared dead" if self._heart.declared_dead else "it fell silent")
            self._dispatcher.start_until(self._heart.alive_until)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._beat.wait()

    # -- claim

    async def _claim_loop(self) -> None:
        poll_s = _FIRST_POLL_S
        backoff_s = self._config.claim.claim_poll_s
        while True:
            self._dispatcher.low_water = self._low_water()
            await self._dispatcher.wait_room()
            try:
                # Never cut short: a claim that committed unseen would lie idle until somebody reclaims it.
                self._claiming = asyncio.create_task(self._claim(), name="one claim")
                self._claiming.add_done_callback(heard)
                leases = await asyncio.shield(self._claiming)
                await self._supply.heads([lease for lease in leases if lease.session])
                for lease in sorted(leases, key=lambda each: not each.reclaims):
                    if not lease.session:
                        await self._supply.lines(lease)
            except psycopg.Error as error:
                _log.warning("claim failed, trying again: %s", error)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1))  # noqa: S311 -- jitter
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
                await self._recover()
                continue
            backoff_s = self._config.claim.claim_poll_s
            if leases:
                poll_s = _FIRST_POLL_S
                continue
            poll_s = await self._idle(poll_s)

    async def _idle(self, poll_s: float) -> float:
        """Wait for the next poll, for what is due, or until woken; how long to wait the time after."""
        due_in_s = self._turns.due_in_s
        wait_s = poll_s if due_in_s is None else min(poll_s, max(_FIRST_POLL_S, due_in_s))
        try:
            async with asyncio.timeout(wait_s * random.uniform(0.75, 1)):  # noqa: S311 -- jitter
                await self.woken.wait()
        except TimeoutError:
            longest_s = self._config.claim.claim_poll_s
            if self._is_told() and self._turns.nothing_due:
                longest_s = max(longest_s, _IDLE_S)
            return min(2 * poll_s, longest_s)
        self.woken.clear()
        return _FIRST_POLL_S

    def wake(self) -> None:
        """There is something new to claim: do not wait for the next poll, nor for what was claimed ahead."""
        self._turns.hear()
        self.woken.set()
        self._dispatcher.low_water = self._low_water()

    def _low_water(self) -> int:
        """How few items wait when it is time to claim. In a hurry, what was claimed ahead does not count."""
        ahead = self._pace.ahead(self._dispatcher.concurrency)
        # Twice this is claimed when fewer than this wait: up to three times this wait.
        if self._hurried:
            return 3 * ahead + self._turnover()
        return max(1, 5 * ahead if self._turns.news and not self._for_sessions else ahead)

    def _turnover(self) -> int:
        return self._pace.within(_ROUND_S, self._dispatcher.concurrency)

    async def _hurry_if_reclaimed(self) -> None:
        """What was taken back from the lost is called before what is held here: by each what it can in a round."""
        if self._for_sessions:
            return
        async with borrowed(self._database) as connection:
            found = await claims.reclaimed_routes(connection, self._pool)
        self._hurried = [route for route in found if self._routes.may_claim(route)]
        self._dispatcher.low_water = self._low_water()

    async def _claim(self) -> list[Lease]:
        ahead = self._pace.ahead(self._dispatcher.concurrency)
        size = ahead + self._dispatcher.room if self._for_sessions else 2 * ahead
        # After news there is more in hand than need be: what is new is claimed, and nothing besides.
        full = self._hand.lanes_with(self._dispatcher.concurrency) if self._dispatcher.waiting > ahead else []
        routes, self._hurried = self._hurried, []
        async with borrowed(self._database) as connection:
            if routes:
                size = self._turnover()
            else:
                found = await self._turns.routes(connection)
                routes = [route for route in found if self._routes.may_claim(route)]
            if not routes or not self._heart.alive:
                return []
            share = max(1, size // len(routes))
            leases = await self._turns.claim(
                connection,
                dict.fromkeys(routes, share),
                worker_id=self.id,
                full=full,
                taper_floor=min(share, max(self._config.claim.claim_min, self._dispatcher.concurrency)),
                suspect_ok=not (self._hand.holds_suspect or self.buffer.holds_suspect),
            )
        for lease in leases:
            self._hand.take(lease)
        return leases

    async def _recover(self) -> None:
        """After a failed claim or read: give back what could not be read, and what was claimed without our knowing."""
        for lease, ranges in self._hand.drop_unread():
            self.buffer.give_back(lease, ranges)
        self._doubt()
        with contextlib.suppress(psycopg.Error):
            await self._find_forgotten()

    def _doubt(self) -> None:
        """A statement that claims has failed. The server may not know yet that nobody hears it, and commit later."""
        self._doubts_until = monotonic() + self._config.database.statement_timeout_s

    async def _find_forgotten(self) -> None:
        async with self._door.closed():
            async with borrowed(self._database) as connection:
                found = await claims.forgotten(connection, self.id, self._known)
            if self._claiming is not None:
                # It may have been that claim's.
                await asyncio.wait([self._claiming])
            for lease in found:
                if lease.nonce not in self._known:
                    _log.warning("lease %d was claimed, but the answer was lost: giving it back", lease.id)
                    self.buffer.give_back(lease, lease.ranges)

    @property
    def _known(self) -> set[int]:
        return self.buffer.leases.union(self._hand.leases, self._condemned)

    # -- claimed elsewhere

    def hand_in(self) -> Handing | None:
        """Before a statement that claims for this worker what it stores, if it can take anything. Whatever was claimed
        must be taken, and then the handing ended."""
        ready = self._registered and self._heart.alive and not self._stopping.is_set() and not self._ended
        room = self._dispatcher.room
        if not ready or not room or not self._door.enter():
            return None
        return Handing(self.id, room, self._routes.closed, self._take_in, self._end_handing)

    def _end_handing(self, known: bool) -> None:
        if not known:
            self._doubt()
        self._door.leave()

    def _take_in(self, items: Sequence[Item]) -> None:
        if self._ended:
            # Whoever takes back what this identity held finds these too.
            return
        for item in items:
            self._hand.take_item(item)
        if self._stopping.is_set():
            self._supply.give_back(items)
        else:
            self._dispatcher.offer(items)

    # -- verdicts

    def receive(self, item: Item, verdict: Verdict) -> None:
        """The dispatcher's sink: the call is over and its slot is free."""
        if self._hand.release(item):
            self._parting.leave(item.lease)
        self._pace.observe(verdict.duration_ms / 1000)
        if isinstance(verdict, Outcome):
            self.trouble = ""
            self.buffer.decide(item, verdict)
        elif isinstance(verdict, Again):
            self.trouble = verdict.error_message
            self.buffer.decide(item, verdict)
            if verdict.gate_s > 0 and self._routes.hold(item.route, verdict):
                self._give_back_unstarted(item.route)
        else:
            self.buffer.give_back(item.lease, [(item.ordinal, item.ordinal + 1)])
            if self._routes.halt(item.route, verdict):
                self._give_back_unstarted(item.route)

    def _written(self) -> None:
        self._parting.written()

    def _press(self, pressed: bool) -> None:
        if pressed:
            self._dispatcher.stop_starting()
        elif not self._stopping.is_set():
            self._dispatcher.resume_starting()

    # -- giving back

    def _give_back_unstarted(self, route: str | None = None) -> None:
        """Return what was not called yet: everything, or one route's."""
        self._supply.give_back(self._dispatcher.take_back(route))
        for lease, ranges in self._hand.drop_unread(route):
            self.buffer.give_back(lease, ranges)

    # -- the round

    async def _round_loop(self) -> None:
        report_every_s = self._config.liveness.heartbeat_interval_s
        report_at = monotonic() + report_every_s
        while True:
            try:
                my_turn = await take_turn(self._database, _ROUND_S)
                async with self._door.closed():
                    given_up = await reclaim_lost(self._database, self.id, self._config, everywhere=my_turn)
                    self._condemned.update(lease.nonce for lease in given_up)
                for lease in given_up:
                    await self._supply.fail(lease)
                    self._condemned.discard(lease.nonce)
                await self._hurry_if_reclaimed()
                if my_turn:
                    await self._batch_keeper.round()
                if monotonic() < self._doubts_until:
                    await self._find_forgotten()
                await self._supply.give_back_closed()
                await self._routes.refresh()
                if monotonic() >= report_at:
                    report_at = monotonic() + report_every_s
                    await self._supply.vouch(self.id)
            except psycopg.Error as error:
                _log.warning("housekeeping failed, trying again: %s", error)
            await self._rest()

    async def _rest(self) -> None:
        """Until the next round. Who has nothing to do leaves rounds to those who have. If nobody has, one worker of
        each process makes them, less often: still soon, by the measure of the grace, after somebody is lost."""
        while True:
            await asyncio.sleep(_ROUND_S * random.uniform(0.75, 1.25))  # noqa: S311 -- jitter
            idle = not self._hand.leases and not len(self.buffer) and self._turns.nothing_due and self._is_told()
            if not idle or take_idle_round(self._database, min(_IDLE_S, self._config.liveness.heartbeat_grace_s / 8)):
                return
