from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg

from penstock.batches.read import read_status
from penstock.batches.steer import pause_batch, resume_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import ClaimLimits, Config, LivenessLimits, RetryLimits, SettleLimits
from penstock.db.pool import Connection, Pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import BatchState, Item, Lease, Outcome, OutcomeState, Verdict
from penstock.settle.write import Changes, settle
from penstock.worker.heartbeat import Heartbeat
from penstock.worker.worker import Worker
from tests.support.db import connected, one, pooled, with_connection
from tests.support.engine import claim_due, make_batch, until
from tests.support.wait import wait_until

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LIMITS = LivenessLimits(heartbeat_grace_s=30, max_reclaims=3)
QUICK = Config(
    claim=ClaimLimits(claim_poll_s=0.01),
    settle=SettleLimits(settle_interval_s=0.005),
    liveness=LivenessLimits(heartbeat_interval_s=0.1, heartbeat_grace_s=1),
)
DONE = Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=1)


async def registered(connection: Connection, now: datetime = NOW) -> UUID:
    worker = uuid4()
    await liveness.register(connection, worker, "test", now=now)
    return worker


async def take(connection: Connection, worker: UUID, want: int, now: datetime = NOW, **more: bool) -> list[Lease]:
    return await claim_due(
        connection, pool="test", wants={"model-0": want}, worker_id=worker, taper_floor=99, now=now, **more
    )


async def lose(connection: Connection, seconds: float, limits: LivenessLimits = LIMITS) -> liveness.Reclaimed:
    """Let so much time pass and reclaim, as a worker that is alive then."""
    now = NOW + timedelta(seconds=seconds)
    return await liveness.reclaim(connection, await registered(connection, now), limits, stuck_s=150, now=now)


def test_what_a_silent_worker_held_runs_again_at_once(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [10])
        dead = await registered(connection)
        await take(connection, dead, 4)
        assert (await lose(connection, 29)).leases == 0
        lost = await lose(connection, 31)
        assert (lost.leases, lost.ordinals, lost.given_up) == (1, 4, [])
        noted = "SELECT worker_id, ordinals::text, reclaims FROM penstock.reclaims"
        assert await one(connection, noted) == (dead, "{[0,4)}", 1)
        again = await take(connection, await registered(connection), 4, NOW + timedelta(seconds=31))
        assert [(lease.ranges, lease.attempt, lease.reclaims) for lease in again] == [(((0, 4),), 1, 1)]
        assert await one(connection, "SELECT count(*) FROM penstock.workers WHERE id = %s", [dead]) == (0,)

    with_connection(database, body)


def test_the_item_that_kills_its_workers_ends_up_alone_and_fails(database: str) -> None:
    """Ordinal 5 of 8 kills whoever holds it: everything else is done, and it is settled as worker_lost."""

    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [8])
        now, deaths, failed = NOW, 0, []
        while deaths < 20:
            worker = await registered(connection, now)
            leases = await take(connection, worker, 8, now)
            if not leases:
                break
            assert sum(lease.suspect for lease in leases) <= 1
            held = {ordinal: lease for lease in leases for ordinal in claims.first_ordinals(lease.ranges, 9)}
            if 5 not in held:
                changes = Changes()
                changes.outcomes = [(held[o], o, o + 1, "c", DONE) for o in held]
                await settle(connection, worker, changes, now=now)
                continue
            deaths += 1
            now += timedelta(seconds=31)
            reclaimer = await registered(connection, now)
            lost = await liveness.reclaim(connection, reclaimer, LIMITS, stuck_s=150, now=now)
            for lease in lost.given_up:
                failed += claims.first_ordinals(lease.ranges, 9)
                changes = Changes(outcomes=[(lease, 5, 6, "c", replace_failed())])
                assert (await settle(connection, reclaimer, changes, now=now)).outcomes == 1
        assert failed == [5]
        counts = (await read_status(connection, batch_id)).counts
        assert (counts.completed, counts.failed, counts.pending) == (7, 1, 0)

    with_connection(database, body)


def replace_failed() -> Outcome:
    return Outcome(OutcomeState.FAILED, None, None, None, "worker_lost", "lost")


def test_nothing_runs_twice_where_that_is_the_policy(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [5])
        await take(connection, await registered(connection), 5)
        lost = await lose(connection, 31, replace(LIMITS, reclaim_action="fail"))
        assert [lease.ranges for lease in lost.given_up] == [((0, 5),)]
        assert await one(connection, "SELECT count(*) FROM penstock.deferrals") == (0,)

    with_connection(database_18, body)


def test_a_lease_its_live_worker_does_not_vouch_for_is_taken_back(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [10])
        worker = await registered(connection)
        (vouched,) = await take(connection, worker, 2)
        (stuck,) = await take(connection, worker, 3)
        late = NOW + timedelta(seconds=149)
        await connection.execute("UPDATE penstock.workers SET heartbeat_at = %s", [late])
        assert (await lose(connection, 149)).leases == 0
        assert await liveness.report_progress(connection, worker, [vouched], now=late) == set()
        lost = await lose(connection, 151)
        assert (lost.leases, lost.ordinals) == (1, 3)
        assert await one(connection, "SELECT id FROM penstock.leases") == (vouched.id,)
        assert await liveness.report_progress(connection, worker, [vouched, stuck], now=late) == {stuck.nonce}

    with_connection(database, body)


def test_a_claim_whose_answer_was_lost_is_found_again(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [10])
        worker = await registered(connection)
        (known,) = await take(connection, worker, 2)
        (unheard,) = await take(connection, worker, 3)
        found = await claims.list_forgotten_leases(connection, worker, [known.nonce])
        assert [(lease.id, lease.ranges) for lease in found] == [(unheard.id, ((2, 5),))]

    with_connection(database_18, body)


class TestHeart:
    def test_checks_in_on_the_database_s_clock(self, database: str) -> None:
        worker = self._register(database, NOW - timedelta(days=9))
        heart = Heartbeat(database, worker, QUICK.liveness)
        before = heart.alive_until
        heart.start()
        wait_until(lambda: heart.alive_until > before, 30)
        heart.stop()
        with psycopg.connect(database) as connection:
            row = connection.execute("SELECT now() - heartbeat_at < '1 minute' FROM penstock.workers").fetchone()
        assert row == (True,)

    def test_hears_that_it_was_declared_dead(self, database_18: str) -> None:
        heart = Heartbeat(database_18, uuid4(), QUICK.liveness)
        heart.start()
        wait_until(lambda: heart.declared_dead, 30)
        assert not heart.alive

    def test_a_database_that_does_not_answer_lets_the_time_run_out(self, database_18: str) -> None:
        worker = self._register(database_18, NOW)
        with psycopg.connect(database_18) as connection:
            connection.execute("LOCK TABLE penstock.workers IN ACCESS EXCLUSIVE MODE")
            heart = Heartbeat(database_18, worker, QUICK.liveness)
            heart.start()
            wait_until(lambda: not heart.alive, 30)
            assert not heart.declared_dead
        wait_until(lambda: heart.alive, 30)
        heart.stop()

    def _register(self, conninfo: str, now: datetime) -> UUID:
        return with_connection(conninfo, lambda connection: registered(connection, now))


class TestWorker:
    """A worker that loses its identity goes on under a new one, and nothing is recorded twice."""

    def run(self, conninfo: str, body: Callable[[Pool, Connection], Awaitable[None]]) -> None:
        async def opened() -> None:
            async with pooled(conninfo) as pool, connected(conninfo) as connection:
                await body(pool, connection)

        asyncio.run(opened())

    def test_declared_dead_in_the_middle_of_its_calls(self, database: str) -> None:
        async def body(pool: Pool, connection: Connection) -> None:
            batch_id = await make_batch(connection, [60])
            release = asyncio.Event()
            started: list[str] = []
            aborted = 0

            async def call(item: Item) -> Verdict:
                nonlocal aborted
                started.append(item.custom_id)
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    aborted += 1
                    raise
                return DONE

            # With time enough not to lose its identity but once.
            config = replace(QUICK, liveness=replace(QUICK.liveness, heartbeat_grace_s=60))
            worker = Worker(config, pool, "test", CoroutineDispatcher(each(call), 8, RetryLimits()))
            first = worker._loop.id
            running = asyncio.create_task(worker.run())
            await until(pool, batch_id, lambda _: len(started) == 8)
            # Somebody else finds this worker silent: its leases go, and so does its row.
            async with connection.transaction():
                await connection.execute("DELETE FROM penstock.workers WHERE id = %s", [first])
                assert (await liveness.reclaim(connection, uuid4(), LIMITS, stuck_s=1e6)).leases >= 1
            await until(pool, batch_id, lambda _: worker._loop.id != first)
            release.set()
            status = await until(pool, batch_id, lambda status: status.state is BatchState.COMPLETED)
            worker.stop()
            await running
            assert aborted == 8
            assert worker.lost_identities == 1
            assert status.counts.completed == 60
            assert await one(connection, "SELECT count(*), count(DISTINCT ordinal) FROM penstock.outcomes") == (60, 60)

        self.run(database, body)

    def test_silent_past_its_grace_it_fences_itself(self, database_18: str) -> None:
        """The workers table is locked: no check-in gets through. Calls are cut before anybody may take the work."""

        async def body(pool: Pool, connection: Connection) -> None:
            batch_id = await make_batch(connection, [20])
            calls = asyncio.Event()
            cut = asyncio.Event()

            async def call(_: Item) -> Verdict:
                calls.set()
                try:
                    if not cut.is_set():
                        await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cut.set()
                    raise
                return DONE

            worker = Worker(QUICK, pool, "test", CoroutineDispatcher(each(call), 4, RetryLimits()))
            running = asyncio.create_task(worker.run())
            await calls.wait()
            async with connection.transaction():
                await connection.execute("LOCK TABLE penstock.workers IN ACCESS EXCLUSIVE MODE")
                await cut.wait()
                assert await one(connection, "SELECT count(*) > 0 FROM penstock.leases") == (True,)
            await until(pool, batch_id, lambda status: status.state is BatchState.COMPLETED)
            worker.stop()
            await running
            assert worker.lost_identities >= 1
            assert await one(connection, "SELECT count(*) FROM penstock.outcomes") == (20,)

        self.run(database_18, body)

    def test_what_must_not_run_twice_fails_also_while_its_batch_is_paused(self, database_18: str) -> None:
        async def body(pool: Pool, connection: Connection) -> None:
            batch_id = await make_batch(connection, [4])
            await claim_due(connection, pool="test", wants={"model-0": 4}, worker_id=uuid4(), taper_floor=4)
            assert await pause_batch(connection, batch_id)
            called: list[int] = []

            async def call(item: Item) -> Verdict:
                called.append(item.ordinal)
                return DONE

            config = replace(QUICK, liveness=replace(QUICK.liveness, reclaim_action="fail"))
            worker = Worker(config, pool, "test", CoroutineDispatcher(each(call), 4, RetryLimits()))
            running = asyncio.create_task(worker.run())
            await until(pool, batch_id, lambda status: status.counts.failed == 4)
            await resume_batch(connection, batch_id)
            await until(pool, batch_id, lambda status: status.state is BatchState.COMPLETED)
            worker.stop()
            await running
            assert called == []

        self.run(database_18, body)
