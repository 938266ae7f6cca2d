"""Anthropic's Message Batches: made from one body, read while it arrives; results in one stream once it has ended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from starlette.responses import Response

from penstock.api.batches import steer
from penstock.api.endpoint import Call, Endpoint, Nothing
from penstock.api.errors import ApiError, conflict, not_found
from penstock.api.files import cursor, download
from penstock.api.multipart import Feeder, idempotency_key
from penstock.api.upload_threads import upload_work
from penstock.batches.create import find_batch_by_key
from penstock.batches.read import Batch, get_batch, list_batches
from penstock.batches.steer import cancel_batch
from penstock.batches.validate import request_batch, validate_batch
from penstock.db.pool import Connection, borrowed
from penstock.erase import erase
from penstock.export import read
from penstock.intake.files import FileRow
from penstock.intake.message_batch import URL, MessageBatchIntake
from penstock.model import BatchState, public_id
from penstock.quotas.quotas import QuotaExceeded, check_open_batches, hold_owner

_WINDOW = "24h"
_WINDOW_S = 24 * 3600.0

Moment = Annotated[datetime, msgspec.Meta(tz=True)]


class MessageBatchCounts(msgspec.Struct, kw_only=True):
    """They add up to the number of requests. All but `processing` stay 0 until the whole batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: Moment
    expires_at: Moment
    ended_at: Moment | None
    cancel_initiated_at: Moment | None
    archived_at: Moment | None
    results_url: str | None


class MessageBatchList(msgspec.Struct, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


class MessageBatchesQuery(msgspec.Struct):
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None


# -- asking for one


async def create_message_batch(call: Call[None, None]) -> MessageBatch:
    """The body is taken apart as it arrives. What is wrong with it is said at once and leaves nothing behind."""
    key = idempotency_key(call.request.headers)
    quota = await call.quota()
    if quota.max_open_batches and key is None:
        async with borrowed(call.database) as connection:
            await check_open_batches(connection, call.caller.owner, quota.max_open_batches)
    file = await _receive(call, key, quota.max_stored_bytes)
    return _object(call, await _begin(call, file, key, quota.max_open_batches))


async def _receive(call: Call[Any, Any], key: str | None, max_stored_bytes: int) -> FileRow:
    """The requests of the body, stored like the lines of a file."""
    server = call.server
    intake = MessageBatchIntake(
        server.conninfo,
        owner=call.caller.owner,
        worker_id=server.worker_id,
        limits=server.config.intake,
        serves=lambda model: server.providers.pool_of(model) is not None,
        idempotency_key=key,
        expires_after_s=erase.MESSAGE_RESULTS_KEPT.total_seconds(),
        max_stored_bytes=max_stored_bytes,
    )
    async with Feeder(intake, upload_work(call)) as feeder:
        async for data in call.request.stream():
            await feeder.put(data)
        await feeder.flush()
        return (await feeder.finish(intake.finish)).file


async def _begin(call: Call[Any, Any], file: FileRow, key: str | None, max_open: int) -> Batch:
    """The batch over them, started at once: a message batch is never seen before its requests are counted."""
    server, owner = call.server, call.caller.owner
    async with borrowed(call.database) as connection:
        try:
            requested = await request_batch(
                connection,
                owner=owner,
                dialect="anthropic",
                file_id=file.id,
                endpoint=URL,
                completion_window=_WINDOW,
                window_s=_WINDOW_S,
                key=key,
                fingerprint=file.digest,
                max_open=max_open,
            )
        except QuotaExceeded:
            await _drop(connection, file, owner, key)
            server.background.wake("purge")
            raise
        if requested is None:
            raise conflict("The batch was deleted while it was made.")
        batch = requested.batch
        if requested.existed and batch.fingerprint != file.digest:
            raise conflict("This Idempotency-Key was used for another batch.")
        if batch.state is BatchState.VALIDATING:
            await validate_batch(connection, batch.id, server.providers.pool_of)
            batch = await get_batch(connection, batch.id, owner) or batch
        if batch.problems:
            await erase.delete_batch(connection, batch.id, owner)
    if batch.problems:
        server.background.wake("purge")
        raise _refused(batch.problems)
    return batch


async def _drop(connection: Connection, file: FileRow, owner: str, key: str | None) -> None:
    """Delete the requests of a batch that may not be made; not if the same call, sent twice, has made it meanwhile."""
    async with connection.transaction():
        await hold_owner(connection, owner)
        if key is None or await find_batch_by_key(connection, owner, key) is None:
            await erase.delete_file(connection, file.id, owner, hidden=True)


def _refused(problems: list[dict[str, Any]]) -> ApiError:
    """By place, as clients know it: requests.N.params.model."""
    first = problems[0]
    place = "requests" if first["line"] is None else f"requests.{first['line'] - 1}"
    if param := first["param"]:
        place += "." + str(param).replace("body", "params", 1)
    return ApiError(400, f"{place}: {first['message']}")


# -- looking


def _object(call: Call[Any, Any], batch: Batch) -> MessageBatch:
    ended_at = batch.ended_at
    archived_at = batch.created_at + erase.MESSAGE_RESULTS_KEPT
    archived = ended_at is not None and archived_at <= datetime.now(UTC)
    name = public_id("msgbatch", batch.id)
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if ended_at is not None:
        status = "ended"
    elif batch.state is BatchState.CANCELLING:
        status = "canceling"
    return MessageBatch(
        id=name,
        processing_status=status,
        request_counts=_counts(batch, ended=ended_at is not None),
        created_at=batch.created_at.astimezone(UTC),
        expires_at=(batch.created_at + timedelta(seconds=_WINDOW_S)).astimezone(UTC),
        ended_at=_utc(ended_at),
        cancel_initiated_at=_utc(batch.cancelling_at),
        archived_at=archived_at.astimezone(UTC) if archived else None,
        results_url=call.link(f"{_ONE_BATCH.format(message_batch_id=name)}/results")
        if ended_at is not None and not archived
        else None,
    )


def _counts(batch: Batch, *, ended: bool) -> MessageBatchCounts:
    counts = batch.counts
    if not ended:
        return MessageBatchCounts(processing=counts.total)
    not_run = counts.total - counts.settled
    failed = counts.failed + counts.not_found + counts.skipped
    match batch.state:
        case BatchState.CANCELLED:
            return MessageBatchCounts(succeeded=counts.completed, errored=failed, canceled=not_run)
        case BatchState.EXPIRED:
            return MessageBatchCounts(succeeded=counts.completed, errored=failed, expired=not_run)
        case _:
            return MessageBatchCounts(succeeded=counts.completed, errored=failed + not_run)


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)


def _id(call: Call[Any, Any]) -> UUID:
    return call.id("msgbatch", "message_batch_id")


def _known(call: Call[Any, Any], batch: Batch | None) -> Batch:
    if batch is None or batch.dialect != "anthropic":
        raise not_found("MessageBatch", call.path["message_batch_id"])
    return batch


async def _find(call: Call[Any, Any]) -> Batch:
    async with borrowed(call.database) as connection:
        return _known(call, await get_batch(connection, _id(call), call.caller.scope))


async def retrieve_message_batch(call: Call[None, None]) -> MessageBatch:
    return _object(call, await _find(call))


async def list_message_batches(call: Call[MessageBatchesQuery, None]) -> MessageBatchList:
    """Newest first. `before_id` gives the page just before that batch, in the same order."""
    query = call.query
    if query.after_id is not None and query.before_id is not None:
        raise ApiError(400, "Give either after_id or before_id.")
    before = cursor("msgbatch", query.before_id, "before_id")
    async with borrowed(call.database) as connection:
        rows = await list_batches(
            connection,
            owner=call.caller.owner,
            dialect="anthropic",
            after=cursor("msgbatch", query.after_id, "after_id"),
            before=before,
            limit=query.limit + 1,
        )
    # One more than the page was asked for: it lies at the far end, which going back is the first.
    page = rows[: query.limit] if before is None else rows[-query.limit :]
    data = [_object(call, row) for row in page]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return MessageBatchList(data=data, has_more=len(rows) > query.limit, first_id=first, last_id=last)


async def message_batch_results(call: Call[None, None]) -> Response:
    """One line for every request, in the order in which they were given."""
    batch = await _find(call)
    shown = _object(call, batch)
    if shown.archived_at is not None:
        raise ApiError(404, f"The results of {shown.id} are not kept any more: it was archived.")
    if shown.results_url is None:
        raise ApiError(404, f"{shown.id} has no results yet: its processing status is {shown.processing_status}.")
    blocks = read.output_blocks(call.database, batch.id, "output", batch.state, "anthropic")
    return await download(blocks, f"{shown.id}_results.jsonl", {}, media_type="application/x-jsonl")


# -- steering


async def cancel_message_batch(call: Call[None, Nothing | None]) -> MessageBatch:
    """Nothing more is started; what is in flight finishes. Asking again changes nothing."""
    batch_id, scope = _id(call), call.caller.scope
    async with borrowed(call.database) as connection:
        found = _known(call, await get_batch(connection, batch_id, scope))
        moved = await steer(call, connection, found, cancel_batch)
        batch = _known(call, await get_batch(connection, batch_id, scope))
    if not moved and batch.state is not BatchState.CANCELLING:
        raise ApiError(400, f"{call.path['message_batch_id']} has ended: it cannot be canceled any more.")
    return _object(call, batch)


async def delete_message_batch(call: Call[None, None]) -> MessageBatchDeleted:
    """The batch with its requests and results, once it has ended."""
    batch_id, scope = _id(call), call.caller.scope
    name = call.path["message_batch_id"]
    async with borrowed(call.database) as connection:
        batch = _known(call, await get_batch(connection, batch_id, scope))
        if not batch.state.terminal:
            raise ApiError(400, f"{name} has not ended: cancel it, and delete it when it has.")
        gone = await erase.delete_batch(connection, batch_id, scope)
    if not gone:
        raise not_found("MessageBatch", name)
    call.server.background.wake("purge")
    return MessageBatchDeleted(id=name)


_BATCHES = "/v1/messages/batches"
_ONE_BATCH = "/v1/messages/batches/{message_batch_id}"

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST",
        _BATCHES,
        create_message_batch,
        'Run a list of messages: {"requests": [{"custom_id", "params"}, ...]}.',
        stream="application/json",
        dialect="anthropic",
        errors=(400, 409, 413),
    ),
    Endpoint("GET", _BATCHES, list_message_batches, "Your message batches, newest first.", dialect="anthropic"),
    Endpoint("GET", _ONE_BATCH, retrieve_message_batch, "One message batch.", dialect="anthropic", errors=(404,)),
    Endpoint(
        "POST",
        f"{_ONE_BATCH}/cancel",
        cancel_message_batch,
        "Start nothing more of a message batch.",
        dialect="anthropic",
        errors=(404,),
    ),
    Endpoint(
        "DELETE",
        _ONE_BATCH,
        delete_message_batch,
        "Delete a message batch that has ended, with its requests and results.",
        dialect="anthropic",
        errors=(400, 404, 409),
    ),
    Endpoint(
        "GET",
        f"{_ONE_BATCH}/results",
        message_batch_results,
        "The results of a message batch that has ended, a JSON object per line.",
        media="application/x-jsonl",
        dialect="anthropic",
        errors=(404, 409),
    ),
)
