"""Samples of batches: read as points of a chart, and summed up as they grow older, so that a batch has few of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one

_SQL = sql.load("penstock.batches", "samples.sql")

RESOLUTIONS_S = (1, 10, 60, 600, 3_600, 86_400)
MAX_POINTS = 1_000

# A worker's own samples have this resolution.
_APPENDED_S = 0
_STORED_S = (_APPENDED_S, *RESOLUTIONS_S)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Columns of `read_samples` behind the interval: the sample's own time, and its figures.
_MOMENT = 3
_FIGURES = slice(4, None)

# Workers write a second when it is over: so long after its end it can be taken for complete.
_LATE_S = 3.0

_ROWS_AT_ONCE = 1_000
_STRETCH = 100
_STRETCHES = 10


class _Tier(NamedTuple):
    fine_s: int
    coarse_s: int
    kept_s: int
    """Age from which samples are summed up into coarser ones."""


# By the clock: samples of a second for ten minutes, of ten seconds for two hours.
_BY_CLOCK = (
    _Tier(_APPENDED_S, 1, 10),
    _Tier(1, 10, 600),
    _Tier(10, 60, 7_200),
)
# By the distance to the batch's last sample, so that the chart of a batch that has ended stays as it is. Together this
# bounds the samples of a batch: about 600 + 660 + 240 + 252 + 192, and one for each day before.
_BY_DISTANCE = (
    _Tier(60, 600, 6 * 3_600),
    _Tier(600, 3_600, 2 * 86_400),
    _Tier(3_600, 86_400, 10 * 86_400),
)


@dataclass(frozen=True, slots=True)
class Point:
    """Figures of a batch in one interval, of all workers together."""

    at: datetime
    width_s: int
    complete: bool
    """Whether the interval is over, and every worker has had the time to write its share."""
    completed: int
    failed: int
    not_found: int
    skipped: int
    retried: int
    refused: int
    input_tokens: int
    output_tokens: int
    latency: list[int]
    """Calls by how long they took, in the buckets of LATENCY_BOUNDS_MS."""
    limit_now: int | None
    in_flight: int | None


def choose_resolution_s(start: datetime, end: datetime) -> int:
    """The finest resolution that makes at most MAX_POINTS points of a time; the coarsest there is, if none does."""
    span_s = (end - start).total_seconds()
    return next((each for each in RESOLUTIONS_S if span_s <= each * MAX_POINTS), RESOLUTIONS_S[-1])


async def find_span(connection: Connection, batch_id: UUID) -> tuple[datetime, datetime] | None:
    """Find the times of a batch's first and last sample; None if it has none."""
    row = await fetch_one(connection, _SQL["find_span"], {"batch_id": batch_id, "resolutions": list(_STORED_S)})
    return None if row is None or row[0] is None else (row[0], row[1])


async def read_points(
    connection: Connection, batch_id: UUID, start: datetime, end: datetime, resolution_s: int, *, now: Now = None
) -> list[Point]:
    """Read the points of a chart from `start` to before `end`. Where nothing happened there are none."""
    parameters = {
        "batch_id": batch_id,
        "resolutions": list(_STORED_S),
        "resolution_s": resolution_s,
        "from": start,
        "to": end,
        "late_s": _LATE_S,
        "now": now,
    }
    rows = await (await connection.execute(_SQL["read_samples"], parameters)).fetchall()
    return [_sum_up(list(samples)) for _, samples in groupby(rows, key=itemgetter(0, 1))]


def _sum_up(rows: list[tuple[Any, ...]]) -> Point:
    """Sum the samples of one interval up, given in order of time."""
    at, width_s, complete, *_ = rows[0]
    if len(rows) == 1:
        return Point(at, width_s, complete, *rows[0][_FIGURES])
    columns = list(zip(*(row[_FIGURES] for row in rows), strict=True))
    moments = [row[_MOMENT] for row in rows]
    latencies, limits, in_flight = columns[-3:]
    summed: list[Any] = [
        *(sum(column) for column in columns[:-3]),
        [sum(calls) for calls in zip_longest(*latencies, fillvalue=0)],
        _find_highest(moments, limits),
        _find_highest(moments, in_flight),
    ]
    return Point(at, width_s, complete, *summed)


def _find_highest(moments: list[datetime], values: tuple[int | None, ...]) -> int | None:
    """The highest value of a moment, summed over the workers that told one for it."""
    told: defaultdict[datetime, int] = defaultdict(int)
    for moment, value in zip(moments, values, strict=True):
        if value is not None:
            told[moment] += value
    return max(told.values(), default=None)


async def roll_up_samples(connection: Connection, *, now: Now = None) -> bool:
    """Sum up samples that are old enough, some of each batch at a time. Returns whether there may be more."""
    for tier in _BY_CLOCK:
        parameters = {"fine_s": tier.fine_s, "kept_s": tier.kept_s + tier.coarse_s, "limit": _ROWS_AT_ONCE, "now": now}
        rows = await (await connection.execute(_SQL["list_to_roll_up"], parameters)).fetchall()
        batches: dict[UUID, datetime] = dict(rows)
        more = len(rows) == _ROWS_AT_ONCE
        for batch_id, at in batches.items():
            left = await _roll_up(connection, batch_id, tier, at)
            if tier is _BY_CLOCK[-1] and not left:
                await _roll_up_by_distance(connection, batch_id)
            more |= left
        if more:
            # Coarser ones wait: an interval is summed up once all of it is there.
            return True
    return False


async def _roll_up_by_distance(connection: Connection, batch_id: UUID) -> None:
    """Sum up the coarser samples of a batch, all there are: it is not listed for them."""
    span = await find_span(connection, batch_id)
    if span is not None:
        for tier in _BY_DISTANCE:
            while await _roll_up(connection, batch_id, tier, span[1]):
                pass


async def _roll_up(connection: Connection, batch_id: UUID, tier: _Tier, at: datetime) -> bool:
    """Sum up whole intervals of a batch that ended `kept_s` before a time. Returns whether there may be more."""
    coarse = timedelta(seconds=tier.coarse_s)
    parameters = {
        "batch_id": batch_id,
        "fine_s": tier.fine_s,
        "coarse_s": tier.coarse_s,
        "before": _EPOCH + (at - timedelta(seconds=tier.kept_s) - _EPOCH) // coarse * coarse,
        "stretch_s": _STRETCH * tier.coarse_s,
    }
    for _ in range(_STRETCHES):
        if not (await connection.execute(_SQL["roll_up_samples"], parameters)).rowcount:
            return False
    return True
