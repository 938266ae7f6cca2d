from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.claim import claim as claims
from penstock.claim import gates
from penstock.db.pool import Connection, Now
from penstock.errors import PenstockError
from penstock.model import BatchState, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from penstock.work import batches
from tests.support.db import connected, one, with_connection
from tests.support.engine import make_batch, make_file

WORKER = uuid4()


async def take(connection: Connection, want: int, *routes: str, now: Now = None) -> list[Lease]:
    wants = dict.fromkeys(routes or ["model-0"], want)
    return await claims.claim(connection, pool="test", wants=wants, worker_id=WORKER, taper_floor=1_000, now=now)


async def create(connection: Connection, file_id: UUID, **more: Any) -> UUID:
    return await batches.create_batch(connection, file_id=file_id, owner="local", pool="test", **more)


async def complete(connection: Connection, leases: list[Lease]) -> None:
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, 10_000):
            changes.outcomes.append((lease.id, ordinal, ordinal, "c", Outcome(OutcomeState.COMPLETED, b"1", 200)))
    assert (await settle(connection, WORKER, changes)).fenced == 0


def test_one_file_serves_many_batches_each_complete(database: str) -> None:
    async def body(connection: Connection) -> None:
        file_id = await make_file(connection, [5])
        made = [await create(connection, file_id) for _ in range(3)]
        while leases := await take(connection, 4):
            await complete(connection, leases)
        for batch_id in made:
            assert await batches.finish(connection, batch_id)
            status = await batches.read_status(connection, batch_id)
            assert (status.state, status.counts.completed) == (BatchState.COMPLETED, 5)
        assert await one(connection, "SELECT count(*), count(DISTINCT lane_id) FROM penstock.outcomes") == (15, 3)

    with_connection(database, body)


def test_a_batch_needs_a_sealed_file_of_its_owner(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        file_id = await make_file(connection, [1])
        with pytest.raises(PenstockError, match="no file"):
            await batches.create_batch(connection, file_id=file_id, owner="other", pool="test")
        await connection.execute("UPDATE penstock.files SET state = 'failed', sealed_at = NULL")
        with pytest.raises(PenstockError, match="no file"):
            await batches.create_batch(connection, file_id=file_id, owner="local", pool="test")
        with pytest.raises(PenstockError, match="no batch"):
            await batches.read_status(connection, uuid4())

    with_connection(database_18, body)


def test_lanes_are_claimed_by_priority_then_deadline_then_age(database: str) -> None:
    async def body(connection: Connection) -> None:
        file_id = await make_file(connection, [1])
        soon, late = (datetime.now(UTC) + timedelta(hours=hours) for hours in (1, 9))
        plain = await create(connection, file_id)
        later = await create(connection, file_id, deadline=late)
        first = await create(connection, file_id, deadline=soon)
        urgent = await create(connection, file_id, priority=5)
        order = [(await take(connection, 1))[0].batch_id for _ in range(4)]
        assert order == [urgent, first, later, plain]

    with_connection(database, body)


def test_nothing_is_claimed_from_a_paused_or_cancelled_batch(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [10])
        held = await take(connection, 4)
        back = Changes()
        back.give_back(held[0], [(0, 2)])
        await settle(connection, WORKER, back)
        assert await batches.pause(connection, batch_id)
        assert await take(connection, 10) == []
        assert await batches.resume(connection, batch_id)
        again = await take(connection, 3)
        assert sorted(ordinal for lease in again for ordinal in claims.first_ordinals(lease.ranges, 9)) == [0, 1, 4]
        assert await batches.cancel(connection, batch_id)
        assert not await batches.resume(connection, batch_id)
        assert await take(connection, 10) == []

        assert not await batches.finish(connection, batch_id), "work is still in flight"
        await complete(connection, again)
        rest = Changes()
        rest.give_back(held[0], [(2, 4)])
        await settle(connection, WORKER, rest)
        assert await batches.finish(connection, batch_id)
        status = await batches.read_status(connection, batch_id)
        assert status.state is BatchState.CANCELLED
        assert (status.counts.completed, status.counts.cancelled, status.counts.pending) == (3, 7, 0)
        assert await one(connection, "SELECT count(*) FROM penstock.deferrals") == (0,)

    with_connection(database, body)


def test_a_deferral_written_during_a_pause_is_not_claimed(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [3])
        held = await take(connection, 3)
        assert await batches.pause(connection, batch_id)
        back = Changes()
        back.give_back(held[0], [(0, 3)])
        await settle(connection, WORKER, back)
        assert await take(connection, 3) == []
        await batches.tidy(connection, batch_id)
        assert await one(connection, "SELECT held FROM penstock.deferrals") == (True,)
        assert await batches.resume(connection, batch_id)
        assert len(await take(connection, 3)) == 1

    with_connection(database_18, body)


def test_a_batch_past_its_deadline_expires_and_keeps_its_results(database: str) -> None:
    async def body(connection: Connection) -> None:
        now = datetime(2030, 1, 1, tzinfo=UTC)
        file_id = await make_file(connection, [4])
        batch_id = await create(connection, file_id, deadline=now + timedelta(hours=1), now=now)
        leases = await take(connection, 1, now=now)
        after = now + timedelta(hours=2)
        assert await take(connection, 9, now=after) == []
        assert not await batches.finish(connection, batch_id, now=after)
        await complete(connection, leases)
        assert await batches.finish(connection, batch_id, now=after)
        status = await batches.read_status(connection, batch_id)
        assert (status.state, status.counts.completed, status.counts.expired) == (BatchState.EXPIRED, 1, 3)

    with_connection(database, body)


def test_a_closed_gate_stops_one_route_for_every_worker(database: str) -> None:
    async def body(connection: Connection) -> None:
        now = datetime.now(UTC)
        await make_batch(connection, [2, 2])
        await gates.hold(connection, "test", "model-0", 60, "rate_limit_exceeded", "slow down", now=now)
        both = ("model-0", "model-1")
        leases = await take(connection, 5, *both, now=now)
        assert [lease.route for lease in leases] == ["model-1"]
        await gates.hold(connection, "test", "model-0", 1, "rate_limit_exceeded", "slow down", now=now)
        soon = now + timedelta(seconds=30)
        assert await take(connection, 5, *both, now=soon) == []
        after = now + timedelta(seconds=61)
        await gates.halt(connection, "test", "model-0", "invalid_api_key", "wrong key", now=after)
        assert [gate.code for gate in await gates.closed(connection, "test", now=after)] == ["invalid_api_key"]
        assert await take(connection, 5, *both, now=after) == []
        await gates.reopen(connection, "test")
        leases = await take(connection, 5, *both, now=after)
        assert [lease.route for lease in leases] == ["model-0"]

    with_connection(database, body)


def test_claims_and_cancels_that_race_leave_exact_figures(database: str) -> None:
    """Four claimers and settlers, and a cancel in the middle: what was claimed is settled, nothing after."""

    async def body() -> None:
        async with connected(database) as connection:
            batch_id = await make_batch(connection, [400])

            async def work() -> int:
                done = 0
                async with connected(database) as own:
                    for _ in range(50):
                        leases = await take(own, 7)
                        await complete(own, leases)
                        done += sum(lease.size for lease in leases)
                return done

            async def stop() -> None:
                while (await batches.read_status(connection, batch_id)).counts.completed < 100:
                    await asyncio.sleep(0)
                assert await batches.cancel(connection, batch_id)

            stopping = asyncio.create_task(stop())
            done = await asyncio.gather(*(work() for _ in range(4)))
            await stopping
            assert await batches.finish(connection, batch_id)
            counts = (await batches.read_status(connection, batch_id)).counts
            assert counts.completed == sum(done)
            assert counts.completed + counts.cancelled == 400
            assert counts.cancelled > 0

    asyncio.run(body())
