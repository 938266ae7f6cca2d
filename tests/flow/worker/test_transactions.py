"""How many transactions a request costs, counted by the server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psycopg

from penstock.batches.read import read_status
from penstock.config import ClaimLimits, Config, RetryLimits, SettleLimits
from penstock.db.pool import Pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Item, Outcome, OutcomeState, Verdict
from penstock.worker.worker import Worker
from tests.support.db import connected, pooled
from tests.support.engine import make_batch

# Heartbeats, polls and the test's own looks cost so many a second, whatever is worked off: few of them to a line.
MANY, FEW = 8_000, 800
COALESCED = Config(claim=ClaimLimits(claim_max=500))
ROW_BY_ROW = replace(COALESCED, settle=SettleLimits(settle_max_rows=1, settle_interval_s=0.001))


async def answer(_: Item) -> Verdict:
    await asyncio.sleep(0)
    return Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=2)


async def transactions(conninfo: str) -> int:
    """So far in this database. A backend reports at its end, so the pool that worked must be closed by now."""
    async with connected(conninfo) as connection:
        await connection.execute("SELECT pg_stat_force_next_flush()")
        query = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        row = await (await connection.execute(query)).fetchone()
        assert row is not None
        return int(row[0])


async def work_off(pool: Pool, config: Config, lines: int) -> None:
    async with pool.connection() as connection:
        batch_id = await make_batch(connection, [lines])
    worker = Worker(config, pool, "test", CoroutineDispatcher(each(answer), 64, RetryLimits()))
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(120), pool.connection() as connection:
        while not (await read_status(connection, batch_id)).state.terminal:
            await asyncio.sleep(0.2)
    worker.stop()
    await running


def per_request(conninfo: str, config: Config, lines: int) -> float:
    async def measured() -> float:
        before = await transactions(conninfo)
        async with pooled(conninfo) as pool:
            await work_off(pool, config, lines)
        await _all_gone(conninfo)
        return (await transactions(conninfo) - before) / lines

    return asyncio.run(measured())


async def _all_gone(conninfo: str) -> None:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    async with asyncio.timeout(30), connected(conninfo) as connection:
        while (await (await connection.execute(query)).fetchone()) != (0,):
            await asyncio.sleep(0.01)


def test_coalesced_writes_cost_a_twentieth_of_row_by_row(database_18: str) -> None:
    coalesced, row_by_row = per_request(database_18, COALESCED, MANY), per_request(database_18, ROW_BY_ROW, FEW)
    assert row_by_row >= 1, "the comparison is not row by row"
    assert coalesced <= 0.05 * row_by_row, f"{coalesced:.4f} transactions per request against {row_by_row:.4f}"
    with psycopg.connect(database_18) as connection:
        assert connection.execute("SELECT count(*) FROM penstock.outcomes").fetchone() == (MANY + FEW,)
