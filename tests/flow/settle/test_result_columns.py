"""Result columns of jobs: recorded before the results, so many and no more, and never of a job that was deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import UUID

import msgspec
import pytest

from penstock.claim import claim as claims
from penstock.config import SettleLimits, TableLimits
from penstock.db import sql
from penstock.db.pool import Connection, Pool
from penstock.erase import erase
from penstock.erase.purge import purge_step
from penstock.model import Item, Outcome, OutcomeState
from penstock.settle.buffer import SettleBuffer
from tests.support.db import connected, one, pooled
from tests.support.row_jobs import claim_rows, make_job, make_worker

_SQL = sql.load("penstock.settle", "settle.sql")
_NAMES = "SELECT array_agg(name ORDER BY id) FROM penstock.job_columns"

Body = Callable[[Pool, Connection, UUID, list[Item]], Awaitable[None]]


def with_rows(conninfo: str, rows: int, body: Body) -> None:
    """A job of so many rows, all of them leased."""

    async def opened() -> None:
        async with pooled(conninfo) as pool, pool.connection() as connection:
            await make_job(connection, rows)
            worker = await make_worker(connection)
            (lease,) = await claim_rows(connection, worker, rows)
            items = await claims.read_bodies(connection, lease, lease.ranges, max_rows=rows, max_bytes=1 << 20)
            await body(pool, connection, worker, items)

    asyncio.run(opened())


def done(result: Mapping[str, Any]) -> Outcome:
    return Outcome(OutcomeState.COMPLETED, msgspec.json.encode(result))


async def settle(pool: Pool, worker: UUID, results: Mapping[int, Mapping[str, Any]], items: list[Item]) -> SettleBuffer:
    buffer = SettleBuffer(pool, worker, SettleLimits(), tables=TableLimits(max_result_columns=3))
    for number, result in results.items():
        buffer.decide(items[number], done(result))
    buffer.close()
    await buffer.run()
    return buffer


async def outcomes(connection: Connection) -> list[tuple[int, str, str | None]]:
    cursor = await connection.execute("SELECT ordinal, state::text, error_code FROM penstock.outcomes ORDER BY ordinal")
    return await cursor.fetchall()


def test_a_row_with_a_column_too_many_fails(database: str) -> None:
    async def body(pool: Pool, connection: Connection, worker: UUID, items: list[Item]) -> None:
        await settle(pool, worker, {0: {"b": 1, "a": 1}, 1: {"c": 1, "d": 1}, 2: {"c": 1}}, items)
        assert await one(connection, _NAMES) == (["b", "a", "c"],)
        # Another worker, which knows nothing of those that are there.
        await settle(pool, worker, {3: {"e": 1}, 4: {"a": 2}, 5: {}}, items)
        assert await one(connection, _NAMES) == (["b", "a", "c"],)
        failed, fine = ("failed", "too_many_columns"), ("completed", None)
        told = [fine, failed, fine, failed, fine, fine]
        assert await outcomes(connection) == [(ordinal, *state) for ordinal, state in enumerate(told)]
        (message,) = await one(connection, "SELECT error_message FROM penstock.outcomes WHERE ordinal = 1")
        assert message == "The result cannot be taken: the job's results have more than 3 columns (max_result_columns)."

    with_rows(database, 6, body)


def test_a_name_that_is_too_long_fails_its_row_alone(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection, worker: UUID, items: list[Item]) -> None:
        await settle(pool, worker, {0: {"x" * 257: 1}, 1: {"x" * 256: 1}}, items)
        assert await outcomes(connection) == [(0, "failed", "too_many_columns"), (1, "completed", None)]

    with_rows(database_18, 2, body)


@pytest.mark.parametrize("purged", [False, True])
def test_a_late_worker_records_nothing_of_a_job_that_was_deleted(database: str, purged: bool) -> None:
    async def body(pool: Pool, connection: Connection, worker: UUID, items: list[Item]) -> None:
        assert await erase.delete_batch(connection, items[0].lease.batch_id, "ann")
        while purged and await purge_step(connection, 1_000):
            pass
        late = await settle(pool, worker, {0: {"a": 1}}, items)
        assert (late.tally.outcomes, late.tally.fenced) == (0, 1)
        assert await one(connection, _NAMES) == (None,)
        while await purge_step(connection, 1_000):
            pass
        assert await one(connection, "SELECT count(*) FROM penstock.jobs") == (0,)

    with_rows(database, 1, body)


def test_a_deletion_waits_for_columns_that_are_being_recorded(database_18: str) -> None:
    async def body(_: Pool, connection: Connection, __: UUID, items: list[Item]) -> None:
        job = {"batch_id": items[0].lease.batch_id}
        async with connected(database_18) as other:
            async with other.transaction():
                await other.execute(_SQL["hold_columns"], job)
                deleting = asyncio.create_task(erase.delete_batch(connection, job["batch_id"], "ann"))
                await _until_blocked(database_18)
                await other.execute(_SQL["add_columns"], {**job, "names": ["a"]})
            assert await deleting
            while await purge_step(other, 1_000):
                pass
            assert await one(other, "SELECT count(*) FROM penstock.job_columns") == (0,)

    with_rows(database_18, 1, body)


async def _until_blocked(conninfo: str) -> None:
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with asyncio.timeout(30), connected(conninfo) as observer:
        while not (await one(observer, query))[0]:
            await asyncio.sleep(0)
