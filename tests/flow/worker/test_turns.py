"""Whose turn it is: between owners, between the batches of one, by priority, near a deadline, after failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.batches.create import create_batch
from penstock.batches.owners import set_weight
from penstock.batches.steer import pause_batch, resume_batch
from penstock.batches.upkeep import refresh_places
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db.pool import Connection
from penstock.model import Again, Lease, new_id
from penstock.settle.write import Changes, settle
from penstock.worker.turns import Turns
from tests.support.cli import run_cli
from tests.support.db import with_connection

WORKER = uuid4()
ROUTE = "model"
LARGE = 10_000_000


async def make(connection: Connection, owner: str, lines: int = LARGE, **options: Any) -> UUID:
    """A batch of so many lines that nobody reads."""
    file_id = new_id()
    await connection.execute(
        "WITH file AS ("
        "  INSERT INTO penstock.files (id, owner, filename, worker_id, created_at, lines, state, sealed_at)"
        "  VALUES (%(id)s, %(owner)s, 'made.jsonl', %(id)s, now(), %(lines)s, 'ready', now()) RETURNING source_id)"
        " INSERT INTO penstock.file_lanes SELECT source_id, 0, %(route)s, '/v1/chat/completions', %(lines)s FROM file",
        {"id": file_id, "owner": owner, "lines": lines, "route": ROUTE},
    )
    return await create_batch(connection, file_id=file_id, owner=owner, pool="test", **options)


async def weigh(connection: Connection, owner: str, weight: float) -> None:
    await set_weight(connection, owner, weight)


class Line:
    """One worker that claims, and who was served."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.served: Counter[UUID] = Counter()
        self.look()

    def look(self) -> None:
        """Look at the whole line, as workers do now and then."""
        self.turns = Turns("test", by_time=False)

    async def claim(
        self, want: int, times: int = 1, *, full: Sequence[int] = (), taper_floor: int | None = None
    ) -> list[Lease]:
        leases: list[Lease] = []
        for _ in range(times):
            routes = await self.turns.routes(self.connection)
            wants, floor = dict.fromkeys(routes, want), want if taper_floor is None else taper_floor
            leases += await self.turns.claim(
                self.connection, wants, full=full, worker_id=WORKER, taper_floor=floor, suspect_ok=True
            )
        for lease in leases:
            self.served[lease.batch_id] += size(lease)
        return leases


def size(lease: Lease) -> int:
    return sum(stop - start for start, stop in lease.ranges)


async def owners_of(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, str]:
    cursor = await connection.execute("SELECT id, owner FROM penstock.batches WHERE id = ANY (%s)", [list(ids)])
    return dict(await cursor.fetchall())


def test_a_little_that_is_left_is_claimed_at_once_beside_others(database: str) -> None:
    """Alone it would be shared out in ever smaller pieces, so that workers finish together."""

    async def body(connection: Connection) -> None:
        line = Line(connection)
        small = await make(connection, "a", 100)
        [lease] = await line.claim(400, taper_floor=10)
        assert size(lease) == 25
        await make(connection, "b")
        line.look()
        await line.claim(400, taper_floor=10)
        assert line.served[small] == 100

    with_connection(database, body)


def test_lanes_of_which_there_is_enough_are_passed_over(database: str) -> None:
    async def body(connection: Connection) -> None:
        line = Line(connection)
        large = await make(connection, "a")
        [lease] = await line.claim(1_000)
        small = await make(connection, "b", 100)
        line.look()
        leases = await line.claim(1_000, full=[lease.lane_id])
        assert [(other.batch_id, size(other)) for other in leases] == [(small, 100)]
        # It is passed over this time, and has not lost its place.
        assert [other.batch_id for other in await line.claim(1_000)] == [large]

    with_connection(database, body)


def test_owners_share_by_their_weight_however_many_batches_they_have(database: str) -> None:
    async def body(connection: Connection) -> None:
        weights = {f"owner-{n}": 1 + n % 4 for n in range(12)}
        for n, (owner, weight) in enumerate(weights.items()):
            await weigh(connection, owner, weight)
            for _ in range(600 if n % 3 == 0 else 1):
                await make(connection, owner, lines=10 + n if n % 3 == 0 else LARGE)
        line = Line(connection)
        await line.claim(200, times=150)
        names = await owners_of(connection, list(line.served))
        got: Counter[str] = Counter()
        for batch_id, items in line.served.items():
            got[names[batch_id]] += items
        fair = sum(got.values()) / sum(weights.values())
        shares = {owner: got[owner] / (weight * fair) for owner, weight in weights.items()}
        assert all(0.8 < share < 1.2 for share in shares.values()), shares

    with_connection(database, body)


def test_a_weight_holds_for_what_waits_already(database_18: str, tmp_path: Path) -> None:
    command = ("db", "share", "--database-url", database_18)
    assert "every owner has the same share" in run_cli(*command, cwd=tmp_path).expect(0).stdout

    async def before(connection: Connection) -> None:
        await make(connection, "one")
        await make(connection, "three")

    async def after(connection: Connection) -> None:
        line = Line(connection)
        await line.claim(100, times=60)
        one, three = sorted(line.served.values())
        assert three / one == pytest.approx(3, rel=0.2)

    with_connection(database_18, before)
    assert "3  three" in run_cli(*command, "three", "3", cwd=tmp_path).expect(0).stdout
    with_connection(database_18, after)
    assert "0.01" in run_cli(*command, "three", "0", cwd=tmp_path).expect(2).stderr


def test_a_newcomer_is_served_by_the_next_claim(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make(connection, "large")
        line = Line(connection)
        await line.claim(500, times=20)
        small = await make(connection, "small", lines=100)
        line.look()
        await line.claim(500)
        assert line.served[small] == 100

    with_connection(database, body)


def test_an_owner_who_was_away_gets_nothing_for_it(database: str) -> None:
    async def body(connection: Connection) -> None:
        busy, away = await make(connection, "busy"), await make(connection, "away")
        line = Line(connection)
        await line.claim(100)
        assert await pause_batch(connection, away)
        await line.claim(100, times=30)
        assert await resume_batch(connection, away)
        before = line.served.copy()
        line.look()
        await line.claim(100, times=20)
        since = line.served - before
        assert since[busy] == pytest.approx(since[away], rel=0.2)

    with_connection(database, body)


def test_one_owners_retries_do_not_hold_up_the_other(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make(connection, "failing")
        line = Line(connection)
        for _ in range(40):
            await fail_all(connection, await line.claim(100))
        other = await make(connection, "other", lines=50)
        line.look()
        before = await line.claim(100, times=2)
        assert line.served[other] == 50
        assert any(lease.attempt > 1 for lease in before)

    with_connection(database, body)


def test_an_owners_retries_go_before_what_it_has_not_begun(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make(connection, "failing")
        line = Line(connection)
        for _ in range(40):
            await fail_all(connection, await line.claim(100))
        cursor = await connection.execute("SELECT next FROM penstock.lanes")
        assert (await cursor.fetchone() or (LARGE,))[0] <= 500

    with_connection(database, body)


async def fail_all(connection: Connection, leases: Sequence[Lease]) -> None:
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, 10_000):
            changes.agains.append((lease, ordinal, Again("http_500", "broken", 0.0, True, 500)))
    await settle(connection, WORKER, changes)


def test_retries_that_fall_together_are_one_row(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make(connection, "failing")
        (lease,) = await Line(connection).claim(200)
        changes = Changes()
        for ordinal in range(200):
            changes.agains.append((lease, ordinal, Again("http_500", "broken", 4.0 + ordinal / 100, True, 500)))
        await settle(connection, WORKER, changes)
        cursor = await connection.execute(
            "SELECT count(*), sum(size), bool_and(due_at - now() > interval '3 s') FROM penstock.deferrals"
        )
        rows, retried, put_off = await cursor.fetchone() or (0, 0, False)
        assert (retried, put_off) == (200, True)
        assert rows <= 4

    with_connection(database, body)


def test_priority_comes_first_and_starves_nobody(database: str) -> None:
    async def body(connection: Connection) -> None:
        low = await make(connection, "low", priority=-5)
        line = Line(connection)
        await fail_all(connection, await line.claim(500))
        high = await make(connection, "high", priority=9)
        line.look()
        await line.claim(100, times=40)
        assert line.served[high] > 3_000
        assert line.served[low] - 500 >= 300

    with_connection(database, body)


def test_a_deadline_that_nears_raises_the_share(database: str) -> None:
    async def body(connection: Connection) -> None:
        now = datetime.now(UTC)
        near = await make(connection, "near", deadline=now + timedelta(hours=3))
        far = await make(connection, "far", deadline=now + timedelta(hours=24))
        line = Line(connection)
        await line.claim(100, times=10)
        assert line.served[near] == pytest.approx(line.served[far], rel=0.2)
        await connection.execute(
            "UPDATE penstock.lanes SET deadline = %(d)s WHERE batch_id = %(id)s",
            {"d": now + timedelta(minutes=5), "id": near},
        )
        await connection.execute(
            "UPDATE penstock.batches SET deadline = %(d)s WHERE id = %(id)s",
            {"d": now + timedelta(minutes=5), "id": near},
        )
        await refresh_places(connection, limit=100)
        before = line.served.copy()
        await line.claim(100, times=40)
        since = line.served - before
        assert since[near] > 5 * since[far] > 0

    with_connection(database, body)


def test_what_the_lost_held_goes_first(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make(connection, "one")
        await make(connection, "two")
        line = Line(connection)
        await line.claim(100, times=5)
        lost = await liveness.reclaim(connection, uuid4(), LivenessLimits(), stuck_s=600)
        assert lost.ordinals == 500
        line.look()
        leases = await line.claim(500)
        assert {lease.reclaims for lease in leases} == {1}

    with_connection(database, body)


def test_a_lane_of_older_code_finds_its_place(database: str) -> None:
    async def body(connection: Connection) -> None:
        known = await make(connection, "one")
        line = Line(connection)
        await line.claim(100, times=50)
        old = await make(connection, "two")
        await connection.execute("UPDATE penstock.lanes SET tag = NULL WHERE batch_id = %s", [old])
        await refresh_places(connection, limit=100)
        before = line.served.copy()
        line.look()
        await line.claim(100, times=40)
        since = line.served - before
        assert since[old] == pytest.approx(since[known], rel=0.25)

    with_connection(database, body)
