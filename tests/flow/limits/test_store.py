"""Limits in the database: never more slots given out than there are, and no limit moved by two at once."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from penstock.adapt import concurrency, rate
from penstock.adapt.concurrency import Bounds, Totals
from penstock.db.pool import Connection
from penstock.limits import store
from penstock.limits.store import LimitState, Report, Reported
from tests.support.db import connected, one, with_connection

GRACE_S = 30.0
NOW = datetime(2026, 1, 1, tzinfo=UTC)


async def take(connection: Connection, process: UUID, target: int, *, cap: int = 40, now: datetime = NOW) -> int:
    return await store.take_share_if_free(
        connection, process, "main", cap=cap, target=target, wanted=target, grace_s=GRACE_S, now=now
    )


def test_what_is_given_out_never_exceeds_the_limit(database: str) -> None:
    async def process(seed: int, watched: list[int]) -> None:
        rng, me = random.Random(seed), uuid4()
        async with connected(database) as connection:
            for _ in range(60):
                target = rng.randrange(30)
                assert await take(connection, me, target) <= target
                (granted,) = await one(connection, "SELECT sum(granted)::int FROM penstock.provider_shares")
                watched.append(granted)

    async def body(connection: Connection) -> None:
        await store.make_slots(connection, ["main"])
        watched: list[int] = []
        await asyncio.gather(*(process(seed, watched) for seed in range(6)))
        assert max(watched) <= 40
        assert max(watched) >= 36
        assert await one(
            connection,
            "SELECT (SELECT granted FROM penstock.provider_slots)"
            " = (SELECT sum(granted) FROM penstock.provider_shares)",
        ) == (True,)

    with_connection(database, body)


def test_the_slots_of_a_silent_process_are_free_after_its_grace(database: str) -> None:
    async def body(connection: Connection) -> None:
        await store.make_slots(connection, ["main"])
        dead, alive = uuid4(), uuid4()
        assert await take(connection, dead, 30) == 30
        assert await take(connection, alive, 40) == 10
        late = NOW + timedelta(seconds=GRACE_S + 1)
        assert await take(connection, alive, 40, now=late) == 40
        assert await take(connection, dead, 30, now=late) == 0
        await store.leave(connection, alive, ["main"])
        assert await take(connection, dead, 30, now=late) == 30

    with_connection(database, body)


def test_of_two_who_move_a_limit_one_does(database_18: str) -> None:
    state = LimitState(concurrency.begin(16, 0.0, Totals(), Bounds()), rate.begin(0.0, 0))

    async def move(connection: Connection, version: int, reason: str | None) -> bool:
        return await store.move_if_unchanged(
            connection, ("main", "m"), version, state, floor=1, ceiling=99, per_s=None, reason=reason, now=NOW
        )

    async def body(connection: Connection) -> None:
        assert await move(connection, 0, None)
        assert not await move(connection, 0, "late")
        assert await move(connection, 1, "429 ×12")
        assert await move(connection, 2, None)
        (view,) = await store.read_limits(connection, GRACE_S, now=NOW)
        assert (view.provider, view.model, view.calls, view.reason, view.moved_at) == ("main", "m", 16, "429 ×12", NOW)
        limits, _ = await store.list_limits(connection, ["main"], now=NOW)
        assert limits["main", "m"].state == state

    with_connection(database_18, body)


def test_reports_of_processes_that_are_alive_are_read(database: str) -> None:
    report = Report(Totals(calls=7, work=7.0), admitted=9, refused=2, stated_per_s=1.5)

    async def body(connection: Connection) -> None:
        first, second = uuid4(), uuid4()
        mine = {("main", "m"): Reported(first, 5, 3, report)}
        assert await store.report_and_list(connection, first, mine, ["main"], GRACE_S, now=NOW) == {}
        seen = await store.report_and_list(connection, second, {}, ["main"], GRACE_S, now=NOW)
        assert seen == {("main", "m"): [Reported(first, 5, 3, report)]}
        late = NOW + timedelta(seconds=GRACE_S + 1)
        assert await store.report_and_list(connection, second, {}, ["main"], GRACE_S, now=late) == {}

    with_connection(database, body)
