"""Pending rows in pages: every row that stays where it is, exactly once, in the order of its last change."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.run_again import retry_batch
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.db.pool import Connection
from penstock.erase.erase import delete_batch
from penstock.export.grid import PENDING, PROCESSING, find_grid
from penstock.export.pending import PendingQuery, PendingRow, list_pending, read_pending, read_summaries
from penstock.model import Again, Outcome, OutcomeState
from tests.support.db import with_connection
from tests.support.engine import make_batch
from tests.support.row_jobs import claim_rows, make_job, make_worker, settle_rows
from tests.support.thorough import some

DONE = Outcome(OutcomeState.COMPLETED, b'{"price": 1}')
FAILED = Outcome(OutcomeState.FAILED, error_code="bad", error_message="no")
LATER = Again("busy", "later", 600.0, counts=True)
START = datetime(2024, 5, 1, tzinfo=UTC)

Place = tuple[UUID, int]


async def walk(connection: Connection, query: PendingQuery, size: int) -> list[PendingRow]:
    """All pages, from the first to the last."""
    rows: list[PendingRow] = []
    page = await list_pending(connection, query, None, size)
    rows += page.rows
    while page.next is not None:
        page = await list_pending(connection, query, page.next, size)
        assert len(page.rows) <= size
        rows += page.rows
    positions = [row.position for row in rows]
    assert positions == sorted(set(positions)), "in order, none twice"
    return rows


def places(rows: list[PendingRow]) -> list[Place]:
    return [(row.span.batch_id, row.ordinal) for row in rows]


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_all_three_kinds_are_merged_by_time(database: str, size: int) -> None:
    async def body(connection: Connection) -> None:
        first, _ = await make_job(connection, 10, created_at=at(0))
        second, _ = await make_job(connection, 4, owner="bob", job_type="images", created_at=at(5))
        worker = await make_worker(connection)
        await pause_batch(connection, second)
        leases = await claim_rows(connection, worker, 6, now=at(1))
        # 0 and 2 wait for another try, 1 is done, 3 to 5 are in flight, 6 to 9 were never claimed.
        taken = [lease for lease in leases if lease.batch_id == first]
        await settle_rows(connection, worker, taken, lambda o: (LATER, DONE, LATER, None, None, None)[o], now=at(2))
        await claim_rows(connection, worker, 3, now=at(3))

        everything = await walk(connection, PendingQuery(), size)
        order = [(first, o) for o in (6, 7, 8, 9, 0, 2, 3, 4, 5)] + [(second, o) for o in range(4)]
        assert places(everything) == order
        assert [row.status for row in everything] == [PENDING] * 6 + [PROCESSING] * 3 + [PENDING] * 4
        assert [row.span.attempts for row in everything] == [0] * 4 + [1] * 2 + [1] * 3 + [0] * 4
        assert {row.span.worker_id for row in everything} == {None, worker}
        seen = [row.span.at for row in everything]
        assert seen == [at(0)] * 4 + [at(2)] * 2 + [at(3)] * 3 + [at(5)] * 4

        for query, rows in (
            (PendingQuery(owner="ann"), order[:9]),
            (PendingQuery(owner="bob"), order[9:]),
            (PendingQuery(owner="carol"), []),
            (PendingQuery(batch_id=first), order[:9]),
            (PendingQuery(job_type="images"), order[9:]),
            (PendingQuery(statuses=[PROCESSING]), order[6:9]),
            (PendingQuery(statuses=[PENDING]), order[:6] + order[9:]),
            (PendingQuery(since=at(2), until=at(5)), order[4:9]),
            (PendingQuery(until=at(2), owner="ann"), order[:4]),
        ):
            assert places(await walk(connection, query, size)) == rows, query

    with_connection(database, body)


def test_rows_come_with_what_is_known_of_them(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id, _ = await make_job(connection, 6, created_at=at(0))
        worker = await make_worker(connection)
        await settle_rows(connection, worker, await claim_rows(connection, worker, 4), lambda _: FAILED)
        await retry_batch(connection, batch_id, "ann", lines=[2])
        page = await list_pending(connection, PendingQuery(batch_id=batch_id), None, 10)
        summaries = await read_summaries(connection, page.rows)
        assert [(told.line, told.text) for told in summaries if told] == [
            (5, "Chair 5"),
            (6, "Chair 6"),
            (2, "Chair 2"),
        ]
        grid = await find_grid(connection, batch_id)
        assert grid is not None
        rows, next_ = await read_pending(connection, grid, page)
        assert next_ is None
        assert [(row.line, row.status, row.attempts) for row in rows] == [
            (5, PENDING, 0),
            (6, PENDING, 0),
            (2, PENDING, 1),
        ]
        assert [row.updated_at for row in rows] == [row.span.at for row in page.rows]
        # The one that is run again keeps its last outcome until it has a new one.
        assert [row.error for row in rows] == [None, None, "no"]

    with_connection(database, body)


@pytest.mark.parametrize("max_bytes", [1, 100, 250, 10_000])
def test_a_page_of_large_rows_ends_early_and_the_next_goes_on_there(database: str, max_bytes: int) -> None:
    """Also where rows are not in the order of their numbers, and results count, too."""

    async def body(connection: Connection) -> None:
        batch_id, lane = await make_job(connection, 12, created_at=at(0))
        worker = await make_worker(connection)
        await settle_rows(connection, worker, await claim_rows(connection, worker, 6, now=at(1)), lambda _: FAILED)
        for number, line in enumerate((5, 1, 3)):
            await retry_batch(connection, batch_id, "ann", lines=[line], now=at(2 + number))
        result = {"result": b"x" * 150, "lane": lane}
        await connection.execute(
            "UPDATE penstock.outcomes SET response = %(result)s WHERE lane_id = %(lane)s AND line = 1", result
        )
        grid = await find_grid(connection, batch_id)
        assert grid is not None
        query = PendingQuery(batch_id=batch_id)
        lines: list[int] = []
        sizes: list[int] = []
        page = await list_pending(connection, query, None, 8)
        while True:
            rows, next_ = await read_pending(connection, grid, page, max_bytes)
            lines += [row.line for row in rows]
            sizes += [sum(len(row.body) + len(row.result or b"") for row in rows)] if len(rows) > 1 else []
            if next_ is None:
                break
            page = await list_pending(connection, query, next_, 8)
        assert lines == [7, 8, 9, 10, 11, 12, 5, 1, 3]
        assert max(sizes, default=0) <= max_bytes

    with_connection(database, body)


def test_equal_times_are_told_apart(database: str) -> None:
    async def body(connection: Connection) -> None:
        made = [(await make_job(connection, 3, created_at=START))[0] for _ in range(5)]
        worker = await make_worker(connection)
        for _ in range(3):
            leases = await claim_rows(connection, worker, 2, now=START)
            await settle_rows(connection, worker, leases, lambda o: LATER if o % 2 else None, now=START)
        await claim_rows(connection, worker, 2, now=START)
        rows = await walk(connection, PendingQuery(), 1)
        assert Counter(places(rows)) == Counter((batch_id, o) for batch_id in made for o in range(3))

    with_connection(database, body)


def test_jobs_that_stand_still_or_are_over(database: str) -> None:
    """Paused jobs are pending. Cancelled and deleted ones are not, but for what is still in flight."""

    async def body(connection: Connection) -> None:
        assert await walk(connection, PendingQuery(), 5) == []
        batch_id, _ = await make_job(connection, 6, created_at=at(0))
        worker = await make_worker(connection)
        leases = await claim_rows(connection, worker, 2)
        await settle_rows(connection, worker, leases, lambda _: LATER)
        await claim_rows(connection, worker, 1)
        of_all, of_job = PendingQuery(), PendingQuery(batch_id=batch_id)
        for move in (pause_batch, resume_batch, pause_batch):
            assert await move(connection, batch_id)
            for query in (of_all, of_job):
                assert len(await walk(connection, query, 2)) == 6
        assert await cancel_batch(connection, batch_id)
        (in_flight,) = await walk(connection, of_all, 2)
        assert (in_flight.status, in_flight.ordinal) == (PROCESSING, 2)
        assert len(await walk(connection, of_job, 2)) == 6, "as the job's own rows show it"
        assert await delete_batch(connection, batch_id, None)
        assert await walk(connection, of_all, 2) == []

    with_connection(database, body)


def test_a_cancelled_job_that_goes_on_is_pending_again(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id, _ = await make_job(connection, 6)
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        assert await walk(connection, PendingQuery(), 4) == []
        await retry_batch(connection, batch_id, "ann")
        assert len(await walk(connection, PendingQuery(), 4)) == 6

    with_connection(database, body)


def test_other_batches_and_sessions_are_passed_over(database: str) -> None:
    async def body(connection: Connection) -> None:
        other = await make_batch(connection, [2])
        await connection.execute(
            "INSERT INTO penstock.leases (lane_id, batch_id, pool, route, limited, session, worker_id, ordinals,"
            "  attempt, claimed_at, progressed_at)"
            " SELECT l.id, l.batch_id, l.pool, l.route, false, n = 7, gen_random_uuid(), '{[0,1)}', 1, %s, now()"
            "   FROM penstock.lanes l, generate_series(1, 1500) AS n WHERE l.batch_id = %s",
            [START, other],
        )
        batch_id, _ = await make_job(connection, 3, created_at=at(1))
        first = await list_pending(connection, PendingQuery(), None, 2)
        assert first.rows == []
        assert first.next is not None, "it looked at so many, and ends early"
        assert places(await walk(connection, PendingQuery(), 2)) == [(batch_id, o) for o in range(3)]

    with_connection(database, body)


@pytest.mark.parametrize("seed", some(range(6), 2))
def test_a_walk_while_rows_move(database: str, seed: int) -> None:
    """Rows that stay where they are, are shown exactly once; a row that moves may be shown again, and no row is missed
    that is pending from the beginning to the end."""

    async def body(connection: Connection) -> None:
        rng = random.Random(seed)
        for number in range(4):
            await make_job(connection, rng.randrange(1, 60), created_at=at(number // 2))
        worker = await make_worker(connection)
        clock = 10.0
        held = await claim_rows(connection, worker, 30, now=at(clock))
        query = PendingQuery()
        before = {(row.span.batch_id, row.ordinal): row.position for row in await walk(connection, query, 500)}
        moved: set[Place] = set()
        seen: list[PendingRow] = []
        page = await list_pending(connection, query, None, 3)
        while True:
            seen += page.rows
            if page.next is None:
                break
            if rng.random() < 0.4 and clock < 40:
                clock += 1
                if held and rng.random() < 0.6:
                    verdicts = [rng.choice((DONE, LATER, None)) for _ in range(60)]
                    await settle_rows(connection, worker, held, lambda o, v=verdicts: v[o], now=at(clock))  # type: ignore[misc]
                    held = []
                else:
                    held += await claim_rows(connection, worker, rng.randrange(1, 9), now=at(clock))
                now = {(row.span.batch_id, row.ordinal): row.position for row in await walk(connection, query, 500)}
                moved |= {place for place, position in before.items() if now.get(place) != position}
            page = await list_pending(connection, query, page.next, 3)
        counts = Counter(places(seen))
        assert all(counts[place] == 1 for place in before.keys() - moved)
        after = {(row.span.batch_id, row.ordinal) for row in await walk(connection, query, 500)}
        assert all(counts[place] >= 1 for place in before.keys() & after)
        positions = [row.position for row in seen]
        assert positions == sorted(set(positions))

    with_connection(database, body)
