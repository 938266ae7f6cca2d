from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pytest

from penstock.claim import claim as claims
from penstock.config import SettleLimits
from penstock.db.pool import Connection, Pool
from penstock.model import Again, Item, Outcome, OutcomeState
from penstock.settle.buffer import SettleBuffer
from tests.support.db import connected, one, pooled
from tests.support.engine import claim_due, make_batch

LIMITS = SettleLimits(settle_max_rows=10, settle_interval_s=0.005)


def answer(text: str = "ok", **more: Any) -> Outcome:
    return Outcome(OutcomeState.COMPLETED, f'"{text}"'.encode(), 200, **more)


@asynccontextmanager
async def leased(pool: Pool, count: int) -> AsyncIterator[tuple[Connection, UUID, list[Item]]]:
    async with pool.connection() as connection:
        await make_batch(connection, [count])
        worker = uuid4()
        (lease,) = await claim_due(
            connection, pool="test", wants={"model-0": count}, worker_id=worker, taper_floor=count
        )
        items = await claims.read_bodies(connection, lease, lease.ranges, max_rows=count, max_bytes=1 << 20)
        yield connection, worker, items


def run(conninfo: str, body: Any) -> None:
    async def opened() -> None:
        async with pooled(conninfo) as pool:
            await body(pool)

    asyncio.run(opened())


async def drained(buffer: SettleBuffer) -> None:
    buffer.close()
    await buffer.run()


def test_many_results_are_few_statements(database: str) -> None:
    async def body(pool: Pool) -> None:
        async with leased(pool, 95) as (connection, worker, items):
            buffer = SettleBuffer(pool, worker, LIMITS)
            for item in items:
                buffer.decide(item, answer(item.custom_id))
            await drained(buffer)
            assert (buffer.tally.outcomes, buffer.figures.flushes) == (95, 10)
            assert await one(connection, "SELECT count(*) FROM penstock.outcomes") == (95,)
            assert await one(connection, "SELECT count(*) FROM penstock.leases") == (0,)

    run(database, body)


def test_the_same_item_twice_keeps_the_later_result(database_18: str) -> None:
    async def body(pool: Pool) -> None:
        async with leased(pool, 1) as (connection, worker, items):
            buffer = SettleBuffer(pool, worker, LIMITS)
            buffer.decide(items[0], answer("first"))
            buffer.decide(items[0], answer("second"))
            await drained(buffer)
            assert await one(connection, "SELECT response FROM penstock.outcomes") == (b'"second"',)

    run(database_18, body)


@pytest.mark.parametrize(
    "poison",
    [
        msgspec.structs.replace(answer(), error_message="a\0b"),
        msgspec.structs.replace(answer(), request_id="\ud800"),
        Again("bad\0code", "m", 1.0, True),
    ],
    ids=["NUL", "lone surrogate", "retry with NUL"],
)
def test_one_row_that_cannot_be_stored_fails_alone(database: str, poison: Outcome | Again) -> None:
    async def body(pool: Pool) -> None:
        async with leased(pool, 100) as (connection, worker, items):
            buffer = SettleBuffer(pool, worker, replace(LIMITS, settle_max_rows=100))
            for number, item in enumerate(items):
                buffer.decide(item, poison if number == 41 else answer())
            await drained(buffer)
            states = "SELECT count(*) FILTER (WHERE state = 'completed'), count(*) FROM penstock.outcomes"
            assert await one(connection, states) == (99, 100)
            failed = await one(connection, "SELECT ordinal, error_code FROM penstock.outcomes WHERE state = 'failed'")
            assert failed == (41, "unstorable_result")
            assert await one(connection, "SELECT sum(completed), sum(failed) FROM penstock.progress") == (99, 1)

    run(database, body)


def test_a_flush_that_fails_is_kept_and_repeated(database: str) -> None:
    """The server ends the connection under the flush; the rows come through on the next one."""

    async def body(pool: Pool) -> None:
        async with leased(pool, 30) as (connection, worker, items):
            buffer = SettleBuffer(pool, worker, LIMITS)
            for item in items:
                buffer.decide(item, answer())
            await connection.execute("BEGIN")
            await connection.execute("LOCK TABLE penstock.leases IN ACCESS EXCLUSIVE MODE")
            flushing = asyncio.create_task(drained(buffer))
            async with connected(database) as other:
                blocked = (
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                    " WHERE wait_event_type = 'Lock' AND query LIKE 'WITH held%' AND datname = current_database()"
                )
                while await one(other, blocked) == (0,):
                    await asyncio.sleep(0)
            while not buffer.trouble:
                await asyncio.sleep(0)
            await connection.execute("COMMIT")
            await flushing
            assert buffer.tally.outcomes == 30
            assert buffer.trouble == ""
            assert await one(connection, "SELECT sum(completed) FROM penstock.progress") == (30,)

    run(database, body)


def test_a_database_that_stays_away_ends_the_wait(database_18: str) -> None:
    async def body(pool: Pool) -> None:
        async with leased(pool, 1) as (connection, worker, items):
            await connection.execute("ALTER TABLE penstock.leases RENAME TO elsewhere")
            buffer = SettleBuffer(pool, worker, replace(LIMITS, settle_retry_s=0.01))
            buffer.decide(items[0], answer())
            with pytest.raises(psycopg.errors.UndefinedTable):
                await drained(buffer)

    run(database_18, body)


def test_a_full_buffer_stops_the_producers_until_half_empty(database_18: str) -> None:
    async def body(pool: Pool) -> None:
        async with leased(pool, 60) as (_, worker, items):
            moments: list[tuple[bool, int]] = []
            limits = replace(LIMITS, settle_capacity_rows=40)
            buffer = SettleBuffer(
                pool, worker, limits, on_backpressure=lambda pressed: moments.append((pressed, len(buffer)))
            )
            for item in items[:39]:
                buffer.decide(item, answer())
            assert moments == []
            for item in items[39:]:
                buffer.decide(item, answer())
            await drained(buffer)
            assert moments == [(True, 40), (False, 20)]

    run(database_18, body)


def test_results_of_a_lost_lease_are_refused(database: str) -> None:
    async def body(pool: Pool) -> None:
        async with leased(pool, 5) as (connection, worker, items):
            await connection.execute("DELETE FROM penstock.leases")
            buffer = SettleBuffer(pool, worker, LIMITS)
            for item in items:
                buffer.decide(item, answer())
            await drained(buffer)
            assert (buffer.tally.outcomes, buffer.tally.fenced) == (0, 5)
            for table in ("outcomes", "progress", "attempts", "deferrals"):
                assert await one(connection, f"SELECT count(*) FROM penstock.{table}") == (0,)

    run(database, body)
