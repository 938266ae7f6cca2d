"""Kickoff: a slice of a job, worked off in the request."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from penstock.api.answer_wait import while_caller_stays
from penstock.api.audit import record
from penstock.api.endpoint import Call, Camel, Endpoint, Nothing
from penstock.api.errors import conflict
from penstock.api.jobs import known_job
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, get_batch
from penstock.claim.claim_job import JobWork
from penstock.db.pool import borrowed
from penstock.model import BatchState
from penstock.server.kickoff import NotServed

# While the job's rows are in flight elsewhere, or still to come.
_LATER_MS = 1_000
_LONGEST_MS = 60_000


class KickoffQuery(msgspec.Struct):
    duration_ms: Annotated[int, msgspec.Meta(ge=1, le=_LONGEST_MS)] = msgspec.field(default=5_000, name="durationMs")


class Kickoff(Camel):
    processed: int
    """Rows that were decided in this time."""
    remaining: int
    retry_after_ms: int | None
    """Milliseconds after which there may be more to do; null if there is nothing left."""


async def kick_off_job(call: Call[KickoffQuery, Nothing | None]) -> Kickoff:
    """Works a job off for a slice of time, here and now, and answers how far it came."""
    before = await _read(call)
    if before.state in (BatchState.PAUSED, BatchState.CANCELLING):
        raise conflict(
            f"Cannot kick off a job that is {'paused' if before.state is BatchState.PAUSED else 'cancelled'}."
        )
    async with borrowed(call.database) as connection:
        await record(call, connection, "kickoff", before)
    try:
        working = call.server.kickoffs.work(before.id, before.owner, call.query.duration_ms / 1000)
        work = await while_caller_stays(call.request.receive, working)
    except NotServed as error:
        raise conflict(error.advice) from None
    if work is not None and work.over:
        # With nothing left to do there is no round to wait for.
        async with borrowed(call.database) as connection:
            await finish_batch(connection, before.id)
    after = await _read(call)
    remaining = after.counts.total - after.counts.settled
    ended = after.state.terminal or after.state is BatchState.CANCELLING
    # A job that has ended goes on with the first rows that an operation puts back.
    operating = work is not None and work.operating
    return Kickoff(
        processed=max(0, after.counts.settled - before.counts.settled),
        remaining=remaining,
        retry_after_ms=None if ended and not operating else _wait_ms(work),
    )


async def _read(call: Call[KickoffQuery, Nothing | None]) -> Batch:
    async with borrowed(call.database) as connection:
        return known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))


def _wait_ms(work: JobWork | None) -> int:
    wait_s = None if work is None else work.wait_s
    return _LATER_MS if wait_s is None else math.ceil(1000 * min(wait_s, _LONGEST_MS / 1000))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/api/jobs/{job_id}/kickoff",
        kick_off_job,
        "Work a job off for a slice of time, in this request.",
        errors=(404, 409),
    ),
)
