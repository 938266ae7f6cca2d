"""Claims of one job alone: retries first, then the cursor, under the same guards as every claim."""

from __future__ import annotations

from uuid import UUID

import pytest

from penstock.batches import reprocess
from penstock.batches.finish import finish_batch
from penstock.batches.reprocess import Step, Wish
from penstock.batches.steer import cancel_batch, pause_batch
from penstock.claim import claim as claims
from penstock.claim import gates
from penstock.claim.claim_job import JobWork, claim_job, read_work
from penstock.db.pool import Connection
from penstock.model import Lease
from tests.support.db import one, with_connection
from tests.support.engine import make_batch
from tests.support.wishes import WORKER, answer, defer


async def take(connection: Connection, batch_id: UUID, want: int = 100, *, suspect_ok: bool = True) -> list[Lease]:
    return await claim_job(connection, batch_id, pool="test", want=want, worker_id=WORKER, suspect_ok=suspect_ok)


async def work_of(connection: Connection, batch_id: UUID) -> JobWork:
    work = await read_work(connection, batch_id)
    assert work is not None
    return work


def ordinals(leases: list[Lease]) -> list[list[int]]:
    return sorted(claims.first_ordinals(lease.ranges, 1_000) for lease in leases)


@pytest.mark.parametrize("width", [None, 6])
def test_retries_first_and_never_more_than_fit(database: str, width: int | None) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [50])
        batch_id = await make_batch(connection, [10], width=width)
        leases = await take(connection, batch_id, 4)
        assert ordinals(leases) == [[0, 1, 2, 3]]
        await defer(connection, leases, delay_s=0)
        assert await one(connection, "SELECT count(*) FROM penstock.deferrals") == (1,)
        some = await take(connection, batch_id, 3)
        assert (ordinals(some), some[0].attempt) == ([[0, 1, 2]], 2)
        rest = await take(connection, batch_id)
        assert ordinals(rest) == [[3], [4, 5] if width else [4, 5, 6, 7, 8, 9]]
        assert not await take(connection, batch_id)
        await answer(connection, [*some, *rest])
        assert ordinals(await take(connection, batch_id)) == ([[6, 7, 8, 9]] if width else [])

    with_connection(database, body)


def test_what_closes_a_lane_or_its_route_closes_it_here(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [10])
        assert await claim_job(connection, batch_id, pool="other", want=1, worker_id=WORKER) == []
        await gates.close(connection, "test", "model-0", 60, "busy", "wait")
        assert not await take(connection, batch_id)
        assert 50 < ((await work_of(connection, batch_id)).wait_s or 0) <= 60
        await gates.reopen(connection, "test", wait_max_s=0)
        held = await take(connection, batch_id, 2)
        assert len(held) == 1
        await defer(connection, held, delay_s=60)
        assert (await work_of(connection, batch_id)).wait_s == 0
        assert await pause_batch(connection, batch_id)
        assert not await take(connection, batch_id)
        assert (await work_of(connection, batch_id)).over
        assert await cancel_batch(connection, batch_id)
        assert not await take(connection, batch_id)

    with_connection(database_18, body)


def test_an_operation_is_work_also_of_a_job_that_has_ended(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [2])
        await answer(connection, await take(connection, batch_id))
        assert await finish_batch(connection, batch_id)
        assert (await work_of(connection, batch_id)).over
        await reprocess.start(connection, batch_id, Wish(["completed"], 50))
        work = await work_of(connection, batch_id)
        assert (work.over, work.has_rows, work.wait_s) == (False, False, None)
        doing = await reprocess.take(connection, WORKER, 30)
        assert doing is not None
        assert await reprocess.do_step(connection, doing, WORKER) is Step.ENDED
        work = await work_of(connection, batch_id)
        assert (work.operating, work.has_rows) == (False, True)

    with_connection(database_18, body)


def test_one_suspect_at_a_time_on_a_lease_of_its_own(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [6])
        leases = [*await take(connection, batch_id, 1), *await take(connection, batch_id, 1)]
        changes = "UPDATE penstock.deferrals SET reclaims = 2"
        await defer(connection, leases[:1], delay_s=0)
        await defer(connection, leases[1:], delay_s=0)
        await connection.execute(changes.encode())
        none = await take(connection, batch_id, 2, suspect_ok=False)
        assert ordinals(none) == [[2, 3]]
        found = await take(connection, batch_id)
        assert ordinals(found) == [[0], [4, 5]]
        assert [lease.reclaims for lease in found if lease.suspect] == [2]

    with_connection(database_18, body)
