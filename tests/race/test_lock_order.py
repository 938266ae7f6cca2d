"""Everything that locks more than one row, in tight loops beside everything else: nobody may deadlock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.read import read_status
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db.pool import Connection
from penstock.model import Again, BatchState, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.db import connected
from tests.support.engine import claim_due, make_batch, tidy
from tests.support.interleave import Interleaver, interleaver
from tests.support.thorough import some

_T = TypeVar("_T")

LANES = 6
LIMITS = LivenessLimits(max_reclaims=100)
DONE = Outcome(OutcomeState.COMPLETED, b"1", 200)
ROUTES = [f"model-{number}" for number in range(LANES)]


@dataclass
class Bustle:
    """What the loops share. The leases of one worker are settled by several of them, in any order."""

    worker: UUID
    batches: Sequence[UUID]
    leases: dict[int, Lease] = field(default_factory=dict)
    completed: int = 0
    retried: int = 0
    reclaimed: int = 0


def some_leases(bustle: Bustle, dice: random.Random) -> list[Lease]:
    """A few of those that are out, in an order of its own."""
    out = list(bustle.leases.values())
    return dice.sample(out, min(len(out), dice.randint(1, 12)))


async def claim(connection: Connection, bustle: Bustle, dice: random.Random) -> None:
    wants = dict.fromkeys(ROUTES, dice.randint(1, 6))
    for lease in await claim_due(connection, pool="test", wants=wants, worker_id=bustle.worker, taper_floor=99):
        bustle.leases[lease.nonce] = lease


async def settle_some(connection: Connection, bustle: Bustle, dice: random.Random) -> None:
    """Part of each lease: what is left of it stays out, in a row version at another place of the table."""
    changes = Changes()
    for lease in some_leases(bustle, dice):
        ordinals = claims.first_ordinals(lease.ranges, 99)
        for ordinal in dice.sample(ordinals, dice.randint(1, len(ordinals))):
            if dice.random() < 0.2:
                changes.agains.append((lease, ordinal, Again("code", "message", 0.0, True)))
            else:
                changes.outcomes.append((lease, ordinal, ordinal + 1, "c", DONE))
    settled = await settle(connection, bustle.worker, changes)
    bustle.completed += settled.outcomes
    bustle.retried += settled.retries


async def vouch(connection: Connection, bustle: Bustle, dice: random.Random) -> None:
    mine = some_leases(bustle, dice)
    for lost in await liveness.report_progress(connection, bustle.worker, mine):
        bustle.leases.pop(lost, None)


async def steer(connection: Connection, bustle: Bustle, dice: random.Random) -> None:
    batch = dice.choice(bustle.batches)
    await dice.choice([pause_batch, resume_batch, resume_batch])(connection, batch)


async def keep_house(connection: Connection, bustle: Bustle, dice: random.Random) -> None:
    batch = dice.choice(bustle.batches)
    await tidy(connection, batch)
    await finish_batch(connection, batch)


async def reclaim(connection: Connection, bustle: Bustle, dice: random.Random) -> None:
    gone = [bustle.worker] if dice.random() < 0.1 else []
    lost = await liveness.reclaim(connection, uuid4(), LIMITS, stuck_s=1e6, gone=gone)
    bustle.reclaimed += lost.leases
    # Forgotten with its leases, a worker would take a new identity; this one goes on under its own.
    await connection.execute(
        "INSERT INTO penstock.workers SELECT %(id)s, 'test', '', '', 0, 0, now(), 'infinity'"
        " WHERE NOT EXISTS (SELECT FROM penstock.workers WHERE id = %(id)s)",
        {"id": bustle.worker},
    )


Move = Callable[[Connection, Bustle, random.Random], Awaitable[None]]
Steering = Callable[[Connection, UUID], Awaitable[bool]]
LOOPS: list[list[Move]] = [
    [claim, settle_some, settle_some],
    [settle_some, vouch],
    [settle_some, vouch],
    [steer, keep_house],
    [steer, steer, claim],
    [reclaim, keep_house],
]


async def loop(conninfo: str, moves: Sequence[Move], bustle: Bustle, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    async with connected(conninfo) as connection:
        await connection.execute("SET deadlock_timeout = '100ms'; SET synchronous_commit = off")
        for number in range(rounds):
            for move in moves:
                try:
                    await move(connection, bustle, dice)
                except psycopg.errors.DeadlockDetected as error:
                    raise AssertionError(f"deadlock in {move.__name__}, round {number}: {error}") from error


async def prepare(connection: Connection, width: int | None) -> Bustle:
    worker = uuid4()
    await liveness.register(connection, worker, "test")
    return Bustle(worker, [await make_batch(connection, [60] * LANES, width=width) for _ in range(3)])


async def counters_are_exact(connection: Connection, bustle: Bustle) -> None:
    statuses = [await read_status(connection, batch) for batch in bustle.batches]
    assert sum(status.counts.completed for status in statuses) == bustle.completed
    assert sum(status.counts.retried for status in statuses) == bustle.retried
    cursor = await connection.execute(
        "SELECT (SELECT count(*) FROM penstock.outcomes), count(*) FROM penstock.attempts"
    )
    assert await cursor.fetchone() == (bustle.completed, bustle.retried)


@pytest.mark.slow
@pytest.mark.parametrize("width", some([None, 4], 1))
def test_settling_steering_and_housekeeping_do_not_deadlock(database: str, width: int | None) -> None:
    async def run() -> None:
        async with connected(database) as connection:
            bustle = await prepare(connection, width)
            async with asyncio.TaskGroup() as group:
                for seed, moves in enumerate(LOOPS):
                    group.create_task(loop(database, moves, bustle, 80, seed))
            await counters_are_exact(connection, bustle)
            assert bustle.completed
            assert bustle.retried
            assert bustle.reclaimed

    asyncio.run(run())


@pytest.mark.slow
def test_many_batches_cancelled_while_they_are_worked_on(database_18: str) -> None:
    async def cancel_all(bustle: Bustle) -> None:
        async with connected(database_18) as connection:
            for batch in bustle.batches:
                assert await cancel_batch(connection, batch)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(connected(database_18))
            for seed in range(5):
                bustle = await prepare(connection, 4)
                async with asyncio.TaskGroup() as group:
                    for number, moves in enumerate(LOOPS[:4]):
                        group.create_task(loop(database_18, moves, bustle, 8, 10 * seed + number))
                    group.create_task(cancel_all(bustle))
                await liveness.reclaim(connection, uuid4(), LIMITS, stuck_s=1e6, gone=[bustle.worker])
                for batch in bustle.batches:
                    await finish_batch(connection, batch)
                    status = await read_status(connection, batch)
                    assert status.state is BatchState.CANCELLED
                    assert status.counts.settled + status.counts.cancelled == status.counts.total
                await connection.execute("DELETE FROM penstock.workers")

    asyncio.run(run())


async def through_indexes(connection: Connection, statement: Awaitable[_T]) -> _T:
    await connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
    return await statement


@pytest.mark.parametrize("moved", ["first", "last"])
@pytest.mark.parametrize("steering", [pause_batch, cancel_batch])
def test_settling_and_steering_take_lanes_in_the_same_order(database: str, steering: Steering, moved: str) -> None:
    """Both wait for one lane, in either order; whoever gets it must not find the other one holding the next.

    The rows lie in the table in the order in which they were last written, which is not that of their ids, and a
    table of many lanes is read through its indexes.
    """

    async def body(turns: Interleaver, waiters: tuple[int, int]) -> None:
        db, worker = turns.observer, uuid4()
        batch = await make_batch(db, [2, 2, 2], width=1)
        leases = await claim_due(db, pool="test", wants=dict.fromkeys(ROUTES, 9), worker_id=worker)
        pick = "min" if moved == "first" else "max"
        await db.execute(
            f"UPDATE penstock.lanes SET priority = 1 WHERE id = (SELECT {pick}(id) FROM penstock.lanes)".encode()
        )
        every = Changes(outcomes=[(lease, 0, 1, "c", DONE) for lease in leases])
        play = await turns.play(
            (0, *waiters, 0, *waiters),
            [
                lambda connection: connection.execute("SELECT FROM penstock.lanes WHERE priority = 1 FOR UPDATE"),
                lambda connection: through_indexes(connection, settle(connection, worker, every)),
                lambda connection: through_indexes(connection, steering(connection, batch)),
            ],
        )
        assert (play.was_blocked(1), play.was_blocked(2)) == (True, True)
        assert play.answers[1].outcomes == 3
        assert play.answers[2] is True

    async def run() -> None:
        for waiters in ((1, 2), (2, 1)):
            async with interleaver(database, 3) as turns:
                await body(turns, waiters)
                await turns.observer.execute("DELETE FROM penstock.lanes")

    asyncio.run(run())


async def in_order_of_the_table(connection: Connection, statement: Awaitable[_T]) -> _T:
    await connection.execute("SET LOCAL enable_indexscan = off; SET LOCAL enable_bitmapscan = off")
    return await statement


@pytest.mark.parametrize("waiters", [(1, 2), (2, 1)])
def test_steering_and_housekeeping_do_not_wait_for_each_other_s_deferrals(
    database: str, waiters: tuple[int, int]
) -> None:
    """One goes by the table, in which the first deferral lies last, the other by the index."""

    async def run() -> None:
        async with interleaver(database, 3) as turns:
            db, worker = turns.observer, uuid4()
            batch = await make_batch(db, [2])
            for ordinal in range(2):
                (lease,) = await claim_due(db, pool="test", wants={"model-0": 1}, worker_id=worker)
                await settle(db, worker, Changes(agains=[(lease, ordinal, Again("code", "message", 0.0, True))]))
            await db.execute(
                "UPDATE penstock.deferrals SET due_at = now() WHERE id = (SELECT min(id) FROM penstock.deferrals)"
            )
            # As a statement finds it that began before the batch was resumed: its deferrals are to be held.
            await db.execute("UPDATE penstock.lanes SET open = false")
            play = await turns.play(
                (0, *waiters, 0, *waiters),
                [
                    lambda connection: connection.execute(
                        "SELECT FROM penstock.deferrals ORDER BY id DESC LIMIT 1 FOR UPDATE"
                    ),
                    lambda connection: in_order_of_the_table(connection, pause_batch(connection, batch)),
                    lambda connection: through_indexes(connection, tidy(connection, batch)),
                ],
            )
            assert play.answers[1] is True
            assert not play.was_blocked(2), "housekeeping waits for nobody"

    asyncio.run(run())
