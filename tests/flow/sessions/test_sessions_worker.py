"""Workers over sessions: whatever becomes of the calls, one at a time and in order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from uuid import UUID

from penstock.config import ClaimLimits, Config, RetryLimits, SettleLimits
from penstock.db.pool import Connection, Pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Again, Item, Outcome, OutcomeState, Verdict
from penstock.sessions.answers import RequestRow, read_answered
from penstock.sessions.sessions import cancel_request
from penstock.worker.worker import Worker
from tests.support.db import one, pooled
from tests.support.sessions import DEAD, DONE, OWNER, POOL, send

QUICK = Config(claim=ClaimLimits(claim_poll_s=0.01), settle=SettleLimits(settle_interval_s=0.005))
# Whoever had to wait for company would wait longer than the test does.
LAZY = Config(claim=ClaimLimits(claim_poll_s=0.01), settle=SettleLimits(settle_interval_s=600))

Call = Callable[[Item], Awaitable[Verdict]]


def worker_of(pool: Pool, call: Call, config: Config = QUICK) -> Worker:
    return Worker(config, pool, POOL, CoroutineDispatcher(each(call), 8, RetryLimits()))


async def until_answered(pool: Pool, ids: list[UUID]) -> list[RequestRow]:
    async with asyncio.timeout(60):
        while True:
            async with pool.connection() as connection:
                rows = await read_answered(connection, ids)
            if len(rows) == len(ids):
                return sorted(rows, key=lambda row: ids.index(row.id))
            await asyncio.sleep(0.01)


def in_pool(conninfo: str, body: Callable[[Pool, Connection], Awaitable[None]]) -> None:
    async def run() -> None:
        async with pooled(conninfo) as pool, pool.connection() as connection:
            await body(pool, connection)

    asyncio.run(run())


def test_two_workers_keep_every_session_in_order(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        dice = random.Random(5)
        keys = [f"key-{number}" for number in range(12)] * 6
        sent = await send(connection, *keys)
        flying: set[int] = set()
        ended: Counter[int] = Counter()
        seen: Counter[str] = Counter()

        async def call(item: Item) -> Verdict:
            lane = item.lease.lane_id
            assert lane not in flying, "one at a time"
            assert item.ordinal == ended[lane], "in order"
            flying.add(lane)
            await asyncio.sleep(0)
            flying.remove(lane)
            fate = dice.choice(["done", "done", "dead", "again"])
            seen[fate] += 1
            if fate == "again":
                return Again("busy", "m", 0.01, True, 500)
            ended[lane] += 1
            return DONE if fate == "done" else DEAD

        workers = [worker_of(pool, call) for _ in range(2)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        rows = await until_answered(pool, [answer.request_id for answer in sent])
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
        statuses = Counter(row.status for row in rows)
        assert (statuses["completed"], statuses["failed"]) == (seen["done"], seen["dead"])
        assert min(seen.values()) > 0
        for table in ("leases", "deferrals", "progress", "workers"):
            assert await one(connection, f"SELECT count(*) FROM penstock.{table}") == (0,), table

    in_pool(database, body)


def test_what_somebody_waits_for_is_written_at_once(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        sent = await send(connection, "a", "a", "a", waited=True)

        async def call(_: Item) -> Verdict:
            return DONE

        worker = worker_of(pool, call, LAZY)
        running = asyncio.create_task(worker.run())
        await until_answered(pool, [answer.request_id for answer in sent])
        worker.stop()
        await running

    in_pool(database, body)


def test_a_cancelled_request_is_not_called(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        first, second, third = await send(connection, "a", "a", "a")
        assert await cancel_request(connection, OWNER, "a", second.request_id)
        called: list[int] = []

        async def call(item: Item) -> Verdict:
            called.append(item.line)
            return DONE

        worker = worker_of(pool, call)
        running = asyncio.create_task(worker.run())
        await until_answered(pool, [first.request_id, second.request_id, third.request_id])
        worker.stop()
        await running
        assert called == [1, 3]
        outcomes = await connection.execute("SELECT state::text, error_code FROM penstock.outcomes ORDER BY ordinal")
        assert await outcomes.fetchall() == [("completed", None), ("skipped", "cancelled"), ("completed", None)]

    in_pool(database, body)


def test_large_bodies_are_read_a_few_at_a_time(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        config = Config(
            claim=ClaimLimits(claim_poll_s=0.01, ready_max_bytes=1 << 16),
            settle=SettleLimits(settle_interval_s=0.005),
        )
        large = b'"' + b"x" * 40_000 + b'"'
        sent = await send(connection, *(f"key-{number}" for number in range(20)), body=large)

        async def call(item: Item) -> Verdict:
            return Outcome(OutcomeState.COMPLETED, str(len(item.raw)).encode(), 200)

        worker = worker_of(pool, call, config)
        running = asyncio.create_task(worker.run())
        rows = await until_answered(pool, [answer.request_id for answer in sent])
        worker.stop()
        await running
        assert {row.response for row in rows} == {b"40002"}

    in_pool(database_18, body)
