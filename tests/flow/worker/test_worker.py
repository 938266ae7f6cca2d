from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from penstock.adapt.pace import Pace
from penstock.batches.read import read_status
from penstock.batches.steer import pause_batch, resume_batch
from penstock.claim import gates
from penstock.config import ClaimLimits, Config, RetryLimits, SettleLimits
from penstock.db.notify import NoticeListener
from penstock.db.pool import Connection, Pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Again, BatchState, Halt, Item, Outcome, OutcomeState, Verdict
from penstock.tasks import cancel_and_wait
from penstock.worker.route_gates import RouteGates
from penstock.worker.worker import Worker
from tests.support.db import one, pooled
from tests.support.engine import make_batch, until

CONFIG = Config(claim=ClaimLimits(claim_poll_s=0.01), settle=SettleLimits(settle_interval_s=0.005))
DONE = Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=1)

Call = Callable[[Item], Awaitable[Verdict]]


def worker_of(pool: Pool, call: Call, config: Config = CONFIG, concurrency: int = 8) -> Worker:
    dispatcher = CoroutineDispatcher(each(call), concurrency, RetryLimits())
    return Worker(config, pool, "test", dispatcher)


def in_pool(conninfo: str, body: Callable[[Pool, Connection], Awaitable[None]]) -> None:
    async def run() -> None:
        async with pooled(conninfo) as pool, pool.connection() as connection:
            await body(pool, connection)

    asyncio.run(run())


def test_a_halt_is_recorded_once(database_18: str) -> None:
    """A round that comes while it is being recorded leaves that alone: else it would halt what a person has opened."""

    async def body(pool: Pool, connection: Connection) -> None:
        dispatcher = CoroutineDispatcher(each(lambda _: asyncio.sleep(0, DONE)), 1, RetryLimits())
        route_gates = RouteGates(pool, "test", dispatcher, {})
        async with asyncio.timeout(60):
            async with connection.transaction():
                await connection.execute("LOCK TABLE penstock.gates IN SHARE MODE")
                route_gates.halt("m", Halt("invalid_api_key", "the key is refused", 401))
                await route_gates.refresh()
            await asyncio.wait(route_gates.tasks)
            assert len(await gates.list_closed(connection, "test")) == 1
            await gates.reopen(connection, "test")
            await route_gates.refresh()
        assert route_gates.may_claim("m")
        assert await gates.list_closed(connection, "test") == []

    in_pool(database_18, body)


def test_a_batch_is_worked_off_to_its_end(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [300, 200])
        seen: list[str] = []

        async def call(item: Item) -> Verdict:
            seen.append(item.idempotency_key)
            if item.ordinal % 10 == 0 and item.attempt == 1:
                return Again("server_error", "try again", 0.01, True, 500)
            return DONE

        worker = worker_of(pool, call)
        running = asyncio.create_task(worker.run())
        status = await until(pool, batch_id, lambda status: status.state.terminal)
        worker.stop()
        await running
        assert status.state is BatchState.COMPLETED
        assert (status.counts.completed, status.counts.retried) == (500, 50)
        assert (len(seen), len(set(seen))) == (550, 500)
        assert await one(connection, "SELECT count(*), max(attempt) FROM penstock.attempts") == (50, 1)
        assert await one(connection, "SELECT count(*) FROM penstock.workers") == (0,)

    in_pool(database, body)


def test_a_batch_ends_with_the_last_that_is_written_of_it(database_18: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No round of housekeeping ends it, and the worker goes on with another one."""

    async def never(*_: object) -> bool:
        return False

    monkeypatch.setattr("penstock.worker.loop.take_round", never)

    async def body(pool: Pool, connection: Connection) -> None:
        large = await make_batch(connection, [100_000])

        async def call(_: Item) -> Verdict:
            await asyncio.sleep(0)
            return DONE

        worker = worker_of(pool, call)
        running = asyncio.create_task(worker.run())
        await until(pool, large, lambda status: status.counts.completed > 0)
        small = await make_batch(connection, [20])
        status = await until(pool, small, lambda status: status.state.terminal)
        assert status.state is BatchState.COMPLETED
        assert (await read_status(connection, large)).state is BatchState.IN_PROGRESS
        worker.stop()
        await running

    in_pool(database_18, body)


def test_news_reach_a_worker_that_claims_one_at_a_time(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        config = replace(CONFIG, claim=ClaimLimits(claim_poll_s=0.01, claim_min=1, claim_max=1))

        async def call(_: Item) -> Verdict:
            return DONE

        bell = NoticeListener(str(pool.conninfo))
        listening = asyncio.create_task(bell.run())
        dispatcher = CoroutineDispatcher(each(call), 1, RetryLimits())
        worker = Worker(config, pool, "test", dispatcher, bell)
        running = asyncio.create_task(worker.run())
        for _ in range(3):
            batch_id = await make_batch(connection, [5])
            await connection.execute("NOTIFY penstock_work, 'test'")
            await until(pool, batch_id, lambda status: status.state.terminal)
        worker.stop()
        await running
        await cancel_and_wait([listening])

    in_pool(database_18, body)


def test_stopping_gives_back_what_was_not_called_and_charges_nothing(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [500])
        all_started = asyncio.Event()
        release = asyncio.Event()
        calls = 0

        async def call(_: Item) -> Verdict:
            nonlocal calls
            calls += 1
            if calls == 8:
                all_started.set()
            await release.wait()
            return DONE

        worker = worker_of(pool, call)
        running = asyncio.create_task(worker.run())
        await all_started.wait()
        worker.stop()
        release.set()
        await running
        status = await until(pool, batch_id, lambda _: True)
        assert (status.counts.completed, status.counts.in_flight, status.counts.pending) == (8, 0, 492)
        assert await one(connection, "SELECT max(attempt), count(*) FILTER (WHERE reason <> 'given_back')"
                         " FROM penstock.deferrals") == (1, 0)  # fmt: skip
        assert await one(connection, "SELECT count(*) FROM penstock.attempts") == (0,)

    in_pool(database, body)


def test_stopping_twice_cuts_calls_short_and_gives_them_back(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [50])
        begun: list[int] = []

        async def call(item: Item) -> Verdict:
            begun.append(item.ordinal)
            await asyncio.Event().wait()
            return DONE

        worker = worker_of(pool, call)
        running = asyncio.create_task(worker.run())
        await until(pool, batch_id, lambda status: len(begun) == 8 and status.counts.in_flight > 8)
        await until(pool, batch_id, lambda _: worker._dispatcher.waiting > 0)
        worker.stop()
        worker.stop()
        async with asyncio.timeout(60):
            await running
        assert len(begun) == 8, "what they made room for was not begun"
        status = await until(pool, batch_id, lambda _: True)
        assert (status.counts.completed, status.counts.in_flight, status.counts.pending) == (0, 0, 50)
        assert await one(connection, "SELECT count(*) FROM penstock.attempts") == (0,)

    in_pool(database_18, body)


def test_a_pause_returns_what_waits_and_lets_calls_finish(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [200])
        calls = 0
        gate = asyncio.Semaphore(20)

        async def call(_: Item) -> Verdict:
            nonlocal calls
            calls += 1
            await gate.acquire()
            return DONE

        worker = worker_of(pool, call)
        running = asyncio.create_task(worker.run())
        await until(pool, batch_id, lambda status: status.counts.completed == 20 and calls == 28)
        assert await pause_batch(connection, batch_id)
        # Eight calls are held up by the semaphore; everything else goes back.
        await until(pool, batch_id, lambda status: status.counts.in_flight == 8)
        assert calls == 28
        for _ in range(8):
            gate.release()
        status = await until(pool, batch_id, lambda status: status.counts.in_flight == 0)
        assert (status.state, status.counts.completed, calls) == (BatchState.PAUSED, 28, 28)
        for _ in range(200):
            gate.release()
        assert await resume_batch(connection, batch_id)
        await until(pool, batch_id, lambda status: status.state is BatchState.COMPLETED)
        assert calls == 200
        worker.stop()
        await running

    in_pool(database_18, body)


def test_a_halted_route_is_left_alone_and_the_others_go_on(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [100, 100])

        async def call(item: Item) -> Verdict:
            if item.route == "model-0":
                return Halt("invalid_api_key", "wrong key", 401)
            return DONE

        worker = worker_of(pool, call)
        running = asyncio.create_task(worker.run())
        status = await until(
            pool, batch_id, lambda status: status.counts.completed == 100 and status.counts.in_flight == 0
        )
        assert status.counts.pending == 100
        assert [gate.route for gate in await gates.list_closed(connection, "test")] == ["model-0"]
        assert await one(connection, "SELECT count(*) FROM penstock.attempts") == (0,)
        worker.stop()
        await running

    in_pool(database, body)


def test_bodies_in_memory_stay_within_their_bound(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        big = b'"' + b"x" * 100_000 + b'"'
        batch_id = await make_batch(connection, [60], body=big)
        peak = 0

        async def call(_: Item) -> Verdict:
            await asyncio.sleep(0)
            return DONE

        config = replace(CONFIG, claim=replace(CONFIG.claim, ready_max_bytes=500_000))
        worker = worker_of(pool, call, config, concurrency=2)
        offer = worker._dispatcher.offer  # the hand-over is where bodies enter memory

        def watched(items: list[Item], *, first: bool = False) -> None:
            nonlocal peak
            offer(items, first=first)
            peak = max(peak, worker._loop._inventory.bytes)

        worker._dispatcher.offer = watched  # type: ignore[method-assign, assignment]
        running = asyncio.create_task(worker.run())
        await until(pool, batch_id, lambda status: status.state is BatchState.COMPLETED)
        worker.stop()
        await running
        assert worker._loop._inventory.bytes == 0
        assert 100_000 <= peak <= 500_000 + len(big)

    in_pool(database_18, body)


def test_claims_follow_the_time_an_item_takes() -> None:
    pace = Pace(ClaimLimits(claim_min=4, claim_max=1_000, claim_slice_s=5, claim_safety=0.7))
    assert pace.claim_size(16) == 16
    for _ in range(100):
        pace.observe(1.0)
    assert pace.claim_size(16) == 56
    for _ in range(200):
        pace.observe(0.001)
    assert pace.claim_size(16) == 1_000
    for _ in range(100):
        pace.observe(600)
    assert pace.claim_size(1) == 4


@pytest.mark.parametrize("by", ["a person", "a probe"])
def test_a_halted_route_goes_on_once_it_is_opened(database_18: str, by: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [20])
        mended = asyncio.Event()

        async def call(_: Item) -> Verdict:
            return DONE if mended.is_set() else Halt("invalid_api_key", "the key is refused", 401)

        probe_s = 0.1 if by == "a probe" else 0.0
        worker = worker_of(pool, call, replace(CONFIG, retry=RetryLimits(halt_probe_s=probe_s)))
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(60):
            while not await gates.list_closed(connection, "test"):
                await asyncio.sleep(0.01)
        mended.set()
        if by == "a person":
            await gates.reopen(connection, "test")
        status = await until(pool, batch_id, lambda status: status.state.terminal)
        worker.stop()
        await running
        assert (status.counts.completed, status.counts.retried) == (20, 0)
        assert worker.halts == {}

    in_pool(database_18, body)
