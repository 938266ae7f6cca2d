"""Samples: what workers settle is counted by batch and second, and written apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID, uuid4

from penstock.claim import claim as claims
from penstock.config import SampleLimits, SettleLimits
from penstock.db.pool import Connection, Pool
from penstock.latency import latency_bucket
from penstock.model import Again, Item, Outcome, OutcomeState, Usage
from penstock.settle.buffer import SettleBuffer
from penstock.settle.samples import Samples
from tests.support.db import one, pooled
from tests.support.engine import claim_due, make_batch

OFTEN = SampleLimits(sample_interval_s=0.05)
SUMS = (
    "SELECT sum(completed), sum(failed), sum(not_found), sum(skipped), sum(retried), sum(refused), sum(input_tokens),"
    " sum(output_tokens), penstock.sum_counts(latency) FROM penstock.samples WHERE batch_id = %s"
)


def outcome(state: OutcomeState, duration_ms: int, usage: Usage | None = None) -> Outcome:
    return Outcome(state, b"1" if state is OutcomeState.COMPLETED else None, 200, duration_ms=duration_ms, usage=usage)


def again(status: int, duration_ms: int) -> Again:
    return Again("e", "m", 60, counts=False, status_code=status, duration_ms=duration_ms)


@dataclass(frozen=True, slots=True)
class Bench:
    pool: Pool
    connection: Connection
    batch_id: UUID
    buffer: SettleBuffer
    items: list[Item]

    async def settle(self) -> None:
        self.buffer.close()
        await self.buffer.run()


@asynccontextmanager
async def bench(pool: Pool, samples: Samples, count: int) -> AsyncIterator[Bench]:
    async with pool.connection() as connection:
        batch_id = await make_batch(connection, [count])
        worker = uuid4()
        (lease,) = await claim_due(
            connection, pool="test", wants={"model-0": count}, worker_id=worker, taper_floor=count
        )
        items = await claims.read_bodies(connection, lease, lease.ranges, max_rows=count, max_bytes=1 << 20)
        limits = SettleLimits(settle_max_rows=2)
        yield Bench(pool, connection, batch_id, SettleBuffer(pool, worker, limits, samples=samples), items)


def test_what_is_settled_is_counted_by_batch(database: str) -> None:
    async def body() -> None:
        async with pooled(database) as pool:
            async with Samples(pool, OFTEN) as samples, bench(pool, samples, 7) as made:
                verdicts: list[Outcome | Again] = [
                    outcome(OutcomeState.COMPLETED, 0, Usage(10, 0, 3)),
                    outcome(OutcomeState.COMPLETED, 900, Usage(1, 1, 1)),
                    outcome(OutcomeState.FAILED, 900),
                    outcome(OutcomeState.NOT_FOUND, 5),
                    outcome(OutcomeState.SKIPPED, 0),
                    again(500, 70),
                    again(429, 3),
                ]
                for item, verdict in zip(made.items, verdicts, strict=True):
                    made.buffer.decide(item, verdict)
                await made.settle()
            async with pool.connection() as connection:
                *figures, latency = await one(connection, SUMS, [made.batch_id])
                assert figures == [2, 1, 1, 1, 2, 1, 11, 4]
                assert sum(latency) == 6, "a refusal tells nothing of how long calls take"
                assert [latency[latency_bucket(ms)] for ms in (0, 5, 70, 900)] == [2, 1, 1, 2]
                seconds = "SELECT bool_and(at = date_trunc('second', at) AND at <= now()) FROM penstock.samples"
                assert await one(connection, seconds) == (True,)

    asyncio.run(body())


def test_a_second_is_written_while_the_worker_goes_on(database: str) -> None:
    async def body() -> None:
        async with pooled(database) as pool, Samples(pool, OFTEN) as samples, bench(pool, samples, 1) as made:
            made.buffer.decide(made.items[0], outcome(OutcomeState.COMPLETED, 1))
            await made.settle()
            samples.note_limit(made.batch_id, 96, 67)
            async with asyncio.timeout(30):
                while await one(made.connection, "SELECT sum(completed) FROM penstock.samples") != (1,):
                    await asyncio.sleep(0.01)
                query = "SELECT max(limit_now), max(in_flight) FROM penstock.samples"
                while await one(made.connection, query) != (96, 67):
                    await asyncio.sleep(0.01)

    asyncio.run(body())


def test_refused_results_and_deleted_batches_leave_no_sample(database: str) -> None:
    async def body() -> None:
        async with pooled(database) as pool:
            async with Samples(pool, OFTEN) as samples:
                async with bench(pool, samples, 1) as lost:
                    await lost.connection.execute("DELETE FROM penstock.leases")
                    lost.buffer.decide(lost.items[0], outcome(OutcomeState.COMPLETED, 1))
                    await lost.settle()
                async with bench(pool, samples, 1) as deleted:
                    deleted.buffer.decide(deleted.items[0], outcome(OutcomeState.COMPLETED, 1))
                    await deleted.connection.execute("UPDATE penstock.batches SET deleted_at = now() WHERE true")
                    await deleted.settle()
                    assert deleted.buffer.tally.outcomes == 1
            async with pool.connection() as connection:
                assert await one(connection, "SELECT count(*) FROM penstock.samples") == (0,)

    asyncio.run(body())


def test_samples_beyond_the_capacity_are_dropped_and_nobody_waits(database: str) -> None:
    async def body() -> None:
        limits = SampleLimits(sample_interval_s=60, sample_capacity_rows=10)
        async with pooled(database) as pool:
            async with Samples(pool, limits) as samples:
                async with bench(pool, samples, 1) as made:
                    made.buffer.decide(made.items[0], outcome(OutcomeState.COMPLETED, 1))
                    await made.settle()
                for _ in range(20):
                    samples.note_limit(uuid4(), 1, 1)
            async with pool.connection() as connection:
                assert await one(connection, "SELECT sum(completed) FROM penstock.samples") == (1,)

    asyncio.run(body())
