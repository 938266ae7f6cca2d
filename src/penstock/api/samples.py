"""Samples of batches and jobs: the points of their charts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec

from penstock.api.batches import Moment, known
from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.api.jobs import known_job
from penstock.api.multipart import invalid
from penstock.api.objects import Seconds
from penstock.api.work import find_owned
from penstock.batches.read import get_batch
from penstock.batches.samples import (
    MAX_POINTS,
    Point,
    choose_resolution_s,
    find_span,
    read_points,
)
from penstock.db.pool import Connection, borrowed
from penstock.latency import LATENCY_BOUNDS_MS, latency_percentile_ms

Resolution = Annotated[
    Literal[1, 10, 60, 600, 3600, 86400],
    msgspec.Meta(
        description=f"Seconds of an interval; without it, the finest that makes at most {MAX_POINTS:,} points."
    ),
]
Percentile = Annotated[
    float | None, msgspec.Meta(description="Milliseconds, estimated from the buckets; null if no call ended.")
]
Latency = Annotated[
    list[int],
    msgspec.Meta(
        description="Calls by how long they took: those below the first bound, the second, and so on; the last are"
        " above all bounds. Calls that the upstream did not admit are left out."
    ),
]
Bounds = Annotated[
    list[int], msgspec.Meta(description="Upper bounds of the latency buckets, in milliseconds: always the same.")
]
Complete = Annotated[
    bool, msgspec.Meta(description="False while workers may still add to the interval: it has just ended, or goes on.")
]


class BatchSample(msgspec.Struct, kw_only=True):
    at: Seconds
    seconds: int
    complete: Complete
    completed: int
    failed: int
    not_found: int
    skipped: int
    retried: int
    refused: int
    input_tokens: int
    output_tokens: int
    latency: Latency
    p50_ms: Percentile
    p95_ms: Percentile
    p99_ms: Percentile
    limit_now: int | None
    in_flight: int | None


class BatchSamples(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    resolution: Resolution
    latency_bounds_ms: Bounds
    data: list[BatchSample]


class JobSample(Camel):
    at: datetime
    seconds: int
    complete: Complete
    completed: int
    failed: int
    not_found: int
    skipped: int
    retried: int
    refused: int
    input_tokens: int
    output_tokens: int
    latency: Latency
    p50_ms: Percentile
    p95_ms: Percentile
    p99_ms: Percentile
    limit_now: int | None
    in_flight: int | None


class JobSamples(Camel):
    resolution: Resolution
    latency_bounds_ms: Bounds
    samples: list[JobSample]


class BatchSamplesQuery(msgspec.Struct):
    start: Moment | None = msgspec.field(default=None, name="from")
    end: Moment | None = msgspec.field(default=None, name="to")
    resolution: Resolution | None = None


class JobSamplesQuery(msgspec.Struct):
    start: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(default=None, name="from")
    end: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(default=None, name="to")
    resolution: Resolution | None = None


async def list_batch_samples(call: Call[BatchSamplesQuery, None]) -> BatchSamples:
    """A batch's figures by interval, oldest first; intervals in which nothing happened are left out. Samples get
    coarser with age, so that an interval can be longer than asked for: `seconds` says so."""
    query = call.query
    start, end = (None if each is None else datetime.fromtimestamp(each, UTC) for each in (query.start, query.end))
    async with borrowed(call.database) as connection:
        batch = known(call, await get_batch(connection, call.id("batch", "batch_id"), call.caller.scope))
        chart = await _read(connection, batch.id, start, end, query.resolution)
    return BatchSamples(
        resolution=chart.resolution_s,
        latency_bounds_ms=list(LATENCY_BOUNDS_MS),
        data=[BatchSample(at=int(point.at.timestamp()), **_figures(point)) for point in chart.points],
    )


async def list_job_samples(call: Call[JobSamplesQuery, None]) -> JobSamples:
    """A job's figures by interval, oldest first; intervals in which nothing happened are left out. Samples get
    coarser with age, so that an interval can be longer than asked for: `seconds` says so."""
    async with borrowed(call.database) as connection:
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        return await _chart(connection, batch.id, call.query)


async def list_work_samples(call: Call[JobSamplesQuery, None]) -> JobSamples:
    """The same of a batch or a job."""
    async with borrowed(call.database) as connection:
        return await _chart(connection, (await find_owned(call, connection)).id, call.query)


async def _chart(connection: Connection, batch_id: UUID, query: JobSamplesQuery) -> JobSamples:
    chart = await _read(connection, batch_id, query.start, query.end, query.resolution)
    return JobSamples(
        resolution=chart.resolution_s,
        latency_bounds_ms=list(LATENCY_BOUNDS_MS),
        samples=[JobSample(at=point.at, **_figures(point)) for point in chart.points],
    )


@dataclass(frozen=True, slots=True)
class _Chart:
    resolution_s: Any
    points: list[Point]


async def _read(
    connection: Connection, batch_id: UUID, start: datetime | None, end: datetime | None, resolution_s: int | None
) -> _Chart:
    """Read the points from `start` to before `end`; without them, from the first sample to the last."""
    span = await find_span(connection, batch_id)
    if span is None:
        return _Chart(resolution_s or 1, [])
    first, last = span
    start = first if start is None else max(start, first)
    end = last + timedelta(seconds=1) if end is None else min(end, last + timedelta(seconds=1))
    fitting_s = choose_resolution_s(start, end)
    if resolution_s is not None and resolution_s < fitting_s:
        most = f"at most {MAX_POINTS:,} points"
        raise invalid("resolution", f"there are {most}: ask for {fitting_s}, or a shorter time with 'from' and 'to'.")
    resolution_s = resolution_s or fitting_s
    return _Chart(resolution_s, await read_points(connection, batch_id, start, end, resolution_s))


def _figures(point: Point) -> dict[str, Any]:
    p50, p95, p99 = (latency_percentile_ms(point.latency, share) for share in (0.5, 0.95, 0.99))
    return {
        "seconds": point.width_s,
        "complete": point.complete,
        "completed": point.completed,
        "failed": point.failed,
        "not_found": point.not_found,
        "skipped": point.skipped,
        "retried": point.retried,
        "refused": point.refused,
        "input_tokens": point.input_tokens,
        "output_tokens": point.output_tokens,
        "latency": point.latency,
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "limit_now": point.limit_now,
        "in_flight": point.in_flight,
    }


ENDPOINTS = (
    Endpoint(
        "GET", "/v1/batches/{batch_id}/samples", list_batch_samples, "A batch's figures over time.", errors=(404,)
    ),
    Endpoint("GET", "/api/jobs/{job_id}/samples", list_job_samples, "A job's figures over time.", errors=(404,)),
    Endpoint(
        "GET", "/api/work/{work_id}/samples", list_work_samples, "Figures of a batch or job over time.", errors=(404,)
    ),
)
