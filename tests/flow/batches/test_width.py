"""Batches of limited width: so many inputs in flight at once, those that wait for another try among them."""

from __future__ import annotations

from uuid import UUID, uuid4

from penstock.claim import claim as claims
from penstock.db.pool import Connection
from penstock.model import Lease
from tests.support.db import one, with_connection
from tests.support.engine import claim_due, count_leased, make_batch
from tests.support.wishes import WORKER, answer, defer


async def take(connection: Connection, want: int, *, floor: int = 1_000, worker: UUID = WORKER) -> list[Lease]:
    return await claim_due(connection, pool="test", wants={"model-0": want}, worker_id=worker, taper_floor=floor)


def test_what_waits_for_another_try_keeps_its_place(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [20], width=5)
        first = await take(connection, 100)
        assert count_leased(first) == 5
        await defer(connection, first, delay_s=0)
        again = await take(connection, 100)
        assert [(lease.attempt, count_leased([lease])) for lease in again] == [(2, 5)]
        assert not await take(connection, 100)
        await answer(connection, again)
        assert claims.first_ordinals((await take(connection, 100))[0].ranges, 10) == [5, 6, 7, 8, 9]

    with_connection(database, body)


def test_workers_share_what_may_be_in_flight(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        await make_batch(connection, [1_000], width=40)
        counts = [count_leased(await take(connection, 100, floor=8, worker=uuid4())) for _ in range(6)]
        assert counts == [10, 8, 8, 8, 6, 0]

    with_connection(database_18, body)


def test_a_batch_that_was_full_comes_back_behind_the_others_work(database_18: str) -> None:
    """Its own place is old by then. In line with it, whoever comes new would be served before all the others."""

    async def body(connection: Connection) -> None:
        await make_batch(connection, [1_000], width=1)
        held = await take(connection, 1)
        await make_batch(connection, [100_000])
        for _ in range(40):
            await take(connection, 2_000)
        place = "SELECT tag - step FROM penstock.lanes WHERE width IS {} NULL"
        (now,) = await one(connection, place.format(""))
        (before,) = await one(connection, place.format("NOT"))
        await answer(connection, held)
        (after,) = await one(connection, place.format("NOT"))
        assert before < now <= after

    with_connection(database_18, body)
