"""Workers that have nothing to do: what they cost the database, and how soon they begin all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.config import Config, RetryLimits
from penstock.db.notify import WORK, NoticeListener, notify
from penstock.db.pool import Connection, Pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Item, Outcome, OutcomeState, Verdict
from penstock.tasks import cancel_and_wait
from penstock.worker.worker import Worker
from tests.support.db import one, pooled
from tests.support.engine import make_batch, until

WORKERS = 20
CONFIG = Config()

_TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
_HEARTBEATS = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'penstock heartbeat'"
)


async def _done(_: Item) -> Verdict:
    return Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=1)


@asynccontextmanager
async def _idle_workers(conninfo: str) -> AsyncIterator[tuple[Pool, Connection]]:
    """As many as one process of a server has with so many providers."""
    async with pooled(conninfo) as pool, pool.connection() as connection:
        bell = NoticeListener(conninfo)
        workers = [
            Worker(CONFIG, pool, f"pool-{number}", CoroutineDispatcher(each(_done), 8, RetryLimits()), bell)
            for number in range(WORKERS)
        ]
        listening = asyncio.create_task(bell.run())
        working = [asyncio.create_task(worker.run()) for worker in workers]
        await _until(connection, f"SELECT count(*) = {WORKERS} FROM penstock.workers")
        yield pool, connection
        for worker in workers:
            worker.stop()
        await asyncio.gather(*working)
        await cancel_and_wait([listening])


async def _until(connection: Connection, query: str) -> None:
    async with asyncio.timeout(60):
        while await one(connection, query) != (True,):
            await asyncio.sleep(0.05)


def test_they_hardly_ask(database_18: str) -> None:
    """Without a bell each asks several times a second, and each has a heartbeat of its own."""

    async def rate(connection: Connection) -> float:
        (before,) = await one(connection, _TRANSACTIONS)
        await asyncio.sleep(4)
        (after,) = await one(connection, _TRANSACTIONS)
        return float(after - before) / 4

    async def body() -> None:
        async with _idle_workers(database_18) as (_, connection):
            async with asyncio.timeout(60):
                while await rate(connection) > WORKERS:
                    pass  # each looks less and less often
            assert await one(connection, _HEARTBEATS) == (1,)

    asyncio.run(body())


def test_they_begin_when_they_are_told(database_18: str) -> None:
    async def body() -> None:
        async with _idle_workers(database_18) as (pool, connection):
            batch_id = await make_batch(connection, [10], pool="pool-7")
            await notify(connection, WORK, "pool-7")
            status = await until(pool, batch_id, lambda status: status.state.terminal)
            assert status.counts.completed == 10

    asyncio.run(body())
