"""Samples of batches: summed up with age, without a loss, and read as a chart."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from penstock.batches.samples import find_span, read_points, roll_up_samples
from penstock.db.pool import Connection
from penstock.latency import LATENCY_BUCKETS
from tests.support.db import one, with_connection

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
APPEND = (
    "INSERT INTO penstock.samples (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried, refused,"
    "  input_tokens, output_tokens, latency, limit_now, in_flight)"
    " SELECT %(batch)s, 0, %(end)s - make_interval(secs => n), 2, 1, 0, 0, 1, 1, 7, 5,"
    "        array_fill(1::int8, ARRAY[%(buckets)s::int4]), 10, n %% 4"
    "   FROM generate_series(%(step)s::int4, %(seconds)s::int4, %(step)s::int4) AS n,"
    "        generate_series(1, %(workers)s::int4)"
)
TOTALS = (
    "SELECT sum(completed), sum(failed), sum(retried), sum(refused), sum(input_tokens), sum(output_tokens),"
    " penstock.sum_counts(latency) FROM penstock.samples WHERE batch_id = %s"
)


async def append(connection: Connection, *, seconds: int, end: datetime = NOW, workers: int = 2, step: int = 1) -> UUID:
    """What workers append in so many seconds up to a time."""
    batch_id = uuid4()
    parameters = {"batch": batch_id, "end": end, "seconds": seconds, "workers": workers, "step": step}
    await connection.execute(APPEND.encode(), {**parameters, "buckets": LATENCY_BUCKETS})
    return batch_id


async def roll_up(connection: Connection, now: datetime) -> None:
    while await roll_up_samples(connection, now=now):
        pass


async def rows_of(connection: Connection, batch_id: UUID) -> dict[int, int]:
    query = "SELECT resolution_s, count(*) FROM penstock.samples WHERE batch_id = %s GROUP BY 1 ORDER BY 1"
    return dict(await (await connection.execute(query, [batch_id])).fetchall())


def test_samples_are_summed_up_with_age(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await append(connection, seconds=9_000)
        totals = await one(connection, TOTALS, [batch_id])
        await roll_up(connection, NOW)
        assert await one(connection, TOTALS, [batch_id]) == totals
        rows = await rows_of(connection, batch_id)
        assert list(rows) == [0, 1, 10, 60]
        assert rows[0] <= 2 * 11
        assert rows[1] <= 610
        assert rows[10] <= 670
        assert rows[60] == 30
        # Limits are summed over the workers of a second; of several seconds, the highest counts.
        query = "SELECT min(limit_now), max(limit_now), min(in_flight), max(in_flight) FROM penstock.samples"
        assert await one(connection, f"{query} WHERE resolution_s = 1") == (20, 20, 0, 6)
        assert await one(connection, f"{query} WHERE resolution_s = 10") == (20, 20, 6, 6)
        await roll_up(connection, NOW + timedelta(days=1))
        assert await rows_of(connection, batch_id) == {60: 150}, "the chart of a batch that has ended stays as it is"
        assert await one(connection, TOTALS, [batch_id]) == totals

    with_connection(database, body)


def test_a_batch_of_two_months_has_a_bounded_number_of_samples(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await append(connection, seconds=60 * 86_400, step=300, workers=1)
        await connection.execute("UPDATE penstock.samples SET resolution_s = 10")
        totals = await one(connection, TOTALS, [batch_id])
        await roll_up(connection, NOW)
        assert await one(connection, TOTALS, [batch_id]) == totals
        rows = await rows_of(connection, batch_id)
        assert list(rows) == [10, 60, 600, 3_600, 86_400]
        assert rows[600] <= 260
        assert rows[3_600] <= 216
        assert rows[86_400] <= 51

    with_connection(database, body)


def test_a_chart_sums_workers_and_invents_nothing(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await append(connection, seconds=60, step=20)
        await append(connection, seconds=60)  # another batch's
        span = await find_span(connection, batch_id)
        assert span == (NOW - timedelta(seconds=60), NOW - timedelta(seconds=20))
        points = await read_points(connection, batch_id, NOW - timedelta(seconds=60), NOW, 1, now=NOW)
        assert [(point.at, point.width_s, point.completed, point.limit_now) for point in points] == [
            (NOW - timedelta(seconds=ago), 1, 4, 20) for ago in (60, 40, 20)
        ]
        (point,) = await read_points(connection, batch_id, NOW - timedelta(seconds=60), NOW, 60, now=NOW)
        assert (point.completed, point.failed, point.refused, point.input_tokens) == (12, 6, 6, 42)
        assert point.latency == [6] * LATENCY_BUCKETS
        assert point.limit_now == 20
        half = await read_points(connection, batch_id, NOW - timedelta(seconds=40), NOW - timedelta(seconds=20), 1)
        assert [point.at for point in half] == [NOW - timedelta(seconds=40)]
        assert await find_span(connection, uuid4()) is None

    with_connection(database, body)


@pytest.mark.parametrize(("late_s", "complete"), [(0, False), (3.9, False), (4, True)])
def test_the_last_second_is_marked_until_everybody_can_have_written(
    database_18: str, late_s: float, complete: bool
) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await append(connection, seconds=1, end=NOW + timedelta(seconds=1))
        now = NOW + timedelta(seconds=late_s)
        (point,) = await read_points(connection, batch_id, NOW, NOW + timedelta(seconds=9), 1, now=now)
        assert point.complete is complete

    with_connection(database_18, body)


def test_what_was_summed_up_stays_as_coarse_in_a_fine_chart(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await append(connection, seconds=700)
        await roll_up(connection, NOW)
        points = await read_points(connection, batch_id, NOW - timedelta(seconds=700), NOW, 1, now=NOW)
        assert {point.width_s for point in points} == {1, 10}
        assert sum(point.completed for point in points) == 4 * 700
        assert [point.at for point in points] == sorted({point.at for point in points})

    with_connection(database, body)
