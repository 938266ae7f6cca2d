"""Operations on jobs: rows that are run again, and how far that is."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec

from penstock.api.audit import record
from penstock.api.batches import request_line
from penstock.api.endpoint import Call, Camel, Endpoint, Nothing
from penstock.api.errors import ApiError, conflict, not_found
from penstock.api.jobs import known_job
from penstock.api.multipart import idempotency_key, invalid
from penstock.batches import jobs, reprocess
from penstock.batches.error_groups import is_fingerprint
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, get_batch
from penstock.db.pool import Connection, borrowed
from penstock.export.grid import PENDING, STATUS_OF
from penstock.model import BatchState, parse_id, public_id, request_public_id

_MAX_NAMED = 10_000
_SHOWN = 20
_STATES = {status: state for state, status in STATUS_OF.items()}
_ONE = "/api/jobs/{job_id}"

Status = Literal["DONE", "ERROR", "NOT_FOUND", "SKIPPED", "PENDING"]


class ReprocessBody(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    scope: Literal["job", "items"]
    item_ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=_MAX_NAMED)] | None = None
    """The rows alone that are named, with the scope `items`."""
    statuses: Annotated[list[Status], msgspec.Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["ERROR", "NOT_FOUND"]
    )
    fingerprint: str | None = None
    """The rows alone of one group of errors, with the scope `job`."""
    reset_attempts: bool = False


class OperationStarted(Camel):
    operation_id: str


class JobOperation(Camel):
    id: str
    job_id: str
    kind: Literal["reprocess"]
    state: Literal["RUNNING", "DONE", "FAILED", "CANCELLED"]
    row: int
    """Number of the last row that was looked at; 0 before the first."""
    requeued: int
    worn_out: int
    error: str | None
    created_at: datetime
    ended_at: datetime | None


class JobOperations(Camel):
    operations: list[JobOperation]
    next: str | None


class OperationsQuery(msgspec.Struct):
    after: str | None = None
    page_size: Annotated[int, msgspec.Meta(ge=1, le=100)] = msgspec.field(default=20, name="pageSize")


async def reprocess_job(call: Call[None, ReprocessBody | None]) -> OperationStarted:
    """Runs rows again that have an outcome, in the background; each keeps its result until it has a new one."""
    job_id = call.id("job", "job_id")
    async with borrowed(call.database) as connection:
        batch = known_job(call, await get_batch(connection, job_id, call.caller.scope))
    if (body := call.body) is None:
        raise ApiError(400, 'The body is empty; {"scope": "job"} runs the failures again.', code="invalid_json")
    if (body.scope == "items") is not (body.item_ids is not None):
        raise invalid("itemIds", "expected with the scope 'items', and only there.")
    if body.fingerprint is not None and (body.scope == "items" or not is_fingerprint(body.fingerprint)):
        raise invalid("fingerprint", "expected that of a group of errors, with the scope 'job'.")
    key = idempotency_key(call.request.headers)
    async with borrowed(call.database) as connection:
        job = (await jobs.read_jobs(connection, [batch.id]))[batch.id]
        wish = _wish(call, job, batch, body)
        try:
            earlier = None if key is None else await reprocess.find_by_key(connection, batch.id, key, wish)
            if earlier is None:
                _refuse_by_state(batch, job, wish)
                if wish.ordinals is not None:
                    await reprocess.check_named(connection, batch.id, wish)
                async with connection.transaction():
                    earlier, new = await reprocess.start(connection, batch.id, wish, key=key)
                    if new:
                        await record(call, connection, "reprocess", batch)
        except reprocess.KeyTaken as taken:
            raise conflict(f"{taken.message}.", param="Idempotency-Key", code="idempotency_conflict") from None
        except reprocess.RowsRefused as refused:
            raise conflict(_describe(batch.id, refused), param="itemIds", code="rows_refused") from None
    call.server.background.wake("operate")
    return OperationStarted(operation_id=public_id("operation", earlier))


def _wish(call: Call[Any, Any], job: jobs.Job, batch: Batch, body: ReprocessBody) -> reprocess.Wish:
    limits = call.server.config.retry
    most = limits.max_attempts_lifetime
    if not body.reset_attempts:
        most = min(most, job.spec.get("maxAttempts") or limits.max_attempts)
    named = None
    if body.item_ids is not None:
        named = sorted({request_line(batch.id, text, "itemIds") - 1 for text in body.item_ids})
    return reprocess.Wish(
        sorted({_STATES[status] for status in body.statuses if status != PENDING}),
        most,
        named,
        body.fingerprint,
        body.reset_attempts,
        PENDING in body.statuses,
    )


def _refuse_by_state(batch: Batch, job: jobs.Job, wish: reprocess.Wish) -> None:
    """Refuse at once what the operation would end with: rows that were never run are asked for, or not there."""
    if batch.state is BatchState.CANCELLING:
        raise conflict("The job is being cancelled: ask again when its calls in flight have ended.")
    left = batch.counts.total - batch.counts.settled
    if wish.unrun and (not batch.state.terminal or wish.ordinals is not None):
        raise invalid(
            "statuses", "PENDING is for all rows of a job that was cancelled; those of others run by themselves."
        )
    if batch.state.terminal and (left or job.growing) and not wish.unrun:
        what = f"{left} rows were never run" if left else "Some rows were never read"
        raise conflict(
            f"{what}, for the job was cancelled: add PENDING to the statuses to run them too.",
            param="statuses",
        )


def _describe(batch_id: UUID, refused: reprocess.RowsRefused) -> str:
    ordinals: Sequence[int] = refused.ordinals
    names = ", ".join(f"'{request_public_id(batch_id, ordinal + 1)}'" for ordinal in ordinals[:_SHOWN])
    more = f" and {len(ordinals) - _SHOWN} more" if len(ordinals) > _SHOWN else ""
    return f"Cannot run {names}{more} again: {refused.message}."


async def list_operations(call: Call[OperationsQuery, None]) -> JobOperations:
    query, below = call.query, None
    if query.after is not None and (below := parse_id("operation", query.after)) is None:
        raise invalid("after", "expected the 'next' of the page before.")
    async with borrowed(call.database) as connection:
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        found = await reprocess.list_operations(connection, batch.id, below=below, limit=query.page_size + 1)
    page = found[: query.page_size]
    more = len(found) > query.page_size
    return JobOperations(
        operations=[_shown(batch.id, one) for one in page], next=public_id("operation", page[-1].id) if more else None
    )


async def retrieve_operation(call: Call[None, None]) -> JobOperation:
    async with borrowed(call.database) as connection:
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        return _shown(batch.id, await _find(call, connection, batch))


async def cancel_operation(call: Call[None, Nothing | None]) -> JobOperation:
    """Puts no more rows back. Those that were put back run, and one that was cancelled before is left as it is."""
    async with borrowed(call.database) as connection:
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        id_ = (await _find(call, connection, batch)).id
        async with connection.transaction():
            cancelled = await reprocess.cancel_operation(connection, batch.id, id_, call.caller.scope)
            if cancelled:
                await record(call, connection, "cancel_operation", batch, {"operation": public_id("operation", id_)})
        if cancelled:
            # The job may have waited for nothing else.
            await finish_batch(connection, batch.id)
        shown = _shown(batch.id, await _find(call, connection, batch))
    if shown.state != "CANCELLED":
        raise conflict(f"Cannot cancel an operation that is {shown.state}.")
    return shown


async def _find(call: Call[Any, Any], connection: Connection, batch: Batch) -> reprocess.Operation:
    found = await reprocess.find_operation(connection, batch.id, call.id("operation", "operation_id"))
    if found is None:
        raise not_found("Operation", call.path["operation_id"])
    return found


_SHOWN_STATES: dict[str, Literal["RUNNING", "DONE", "FAILED", "CANCELLED"]] = {
    "running": "RUNNING",
    "done": "DONE",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
}


def _shown(batch_id: UUID, operation: reprocess.Operation) -> JobOperation:
    return JobOperation(
        id=public_id("operation", operation.id),
        job_id=public_id("job", batch_id),
        kind="reprocess",
        state=_SHOWN_STATES[operation.state],
        row=operation.place + 1,
        requeued=operation.requeued,
        worn_out=operation.worn_out,
        error=operation.error,
        created_at=operation.created_at,
        ended_at=operation.ended_at,
    )


ENDPOINTS = (
    Endpoint(
        "POST", f"{_ONE}/reprocess", reprocess_job, "Run rows of a job again.", status=202, errors=(400, 404, 409)
    ),
    Endpoint("GET", f"{_ONE}/operations", list_operations, "Operations on a job, newest first.", errors=(404,)),
    Endpoint(
        "GET", f"{_ONE}/operations/{{operation_id}}", retrieve_operation, "One operation on a job.", errors=(404,)
    ),
    Endpoint(
        "POST",
        f"{_ONE}/operations/{{operation_id}}/cancel",
        cancel_operation,
        "Put no more rows back; those that were put back run.",
        errors=(404, 409),
    ),
)
