"""Batches: create, read, steer, run again, delete."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, get_args
from uuid import UUID

import msgspec

from penstock.api import objects
from penstock.api.audit import record
from penstock.api.endpoint import Call, Endpoint, Nothing
from penstock.api.errors import ApiError, check_priority, conflict, not_found
from penstock.api.files import cursor
from penstock.api.multipart import idempotency_key, invalid
from penstock.batches import read, run_again
from penstock.batches import steer as batch_steer
from penstock.batches.error_groups import is_fingerprint
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, get_batch
from penstock.batches.run_again import NotFailed, worn_out_message
from penstock.batches.validate import request_batch, validate_batch
from penstock.db.pool import Connection, borrowed
from penstock.erase import erase
from penstock.intake import files as stored
from penstock.model import BatchState, parse_id, request_public_id

ENDPOINTS_OF_BATCHES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/moderations",
)
# Checked in the handler, so that the error text names the allowed values.
BatchEndpoint = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ENDPOINTS_OF_BATCHES)})]
Window = Annotated[
    str,
    msgspec.Meta(
        description="How long the batch may take: a number and s, m, h or d, at most a year. Usually 24h.",
        examples=["24h", "30m", "7d"],
        extra_json_schema={"pattern": "^[1-9][0-9]{0,6}[smhd]$"},
    ),
]
Metadata = Annotated[
    dict[str, str],
    msgspec.Meta(
        extra_json_schema={
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        }
    ),
]
_DIALECTS = ("openai", "run")
"""Batches that were made over the API, and by `penstock run`. Both are read and steered alike."""
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
Moment = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799, description="Unix time, in seconds.")]
_STATUSES = (*get_args(objects.BatchStatus), "paused")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_WINDOW_S = 366 * 86_400
_MAX_NAMED = 20
_REQUEST_ID = re.compile(r"batch_req_([0-9a-f]{32})_([1-9][0-9]{0,9})")

# States by status: `in_progress` covers paused batches for clients.
_STATES_OF: Mapping[str, tuple[str, ...]] = {"in_progress": ("in_progress", "paused"), "finalizing": ()}


Move = Callable[[Connection, UUID, str | None], Awaitable[bool]]


class BatchBody(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: Window
    metadata: Metadata | None = None
    output_expires_after: objects.ExpiresAfter | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0


class WaitQuery(msgspec.Struct):
    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0


class BatchesQuery(msgspec.Struct):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    status: list[str] | None = None
    metadata: dict[str, str] | None = None
    created_after: Moment | None = None
    created_before: Moment | None = None


class DeleteQuery(msgspec.Struct):
    with_input: bool = False


class RetryBody(msgspec.Struct, forbid_unknown_fields=True):
    custom_ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=10_000)] | None = None
    request_ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=10_000)] | None = None
    fingerprint: str | None = None
    """The requests of one group of errors alone."""


# -- creating


async def create_batch(call: Call[None, BatchBody]) -> objects.Batch:
    """Stores the batch and answers; its file is validated right after."""
    body = call.body
    if body.endpoint not in ENDPOINTS_OF_BATCHES:
        raise invalid("endpoint", f"it is one of {', '.join(ENDPOINTS_OF_BATCHES)}.")
    window_s = _window_s(body.completion_window)
    metadata = body.metadata or {}
    _check_metadata(metadata)
    key = idempotency_key(call.request.headers)
    fingerprint = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).digest()
    file_id = parse_id("file", body.input_file_id)
    quota = await call.quota()
    check_priority(body.priority, quota)
    async with borrowed(call.database) as connection:
        requested = file_id and await request_batch(
            connection,
            owner=call.caller.owner,
            dialect="openai",
            file_id=file_id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            window_s=window_s,
            metadata=metadata,
            priority=body.priority,
            key=key,
            fingerprint=fingerprint,
            output_expires_after_s=(
                body.output_expires_after.seconds if body.output_expires_after else objects.DEFAULT_LIFETIME_S
            ),
            max_open=quota.max_open_batches,
        )
        if not requested:
            file = file_id and await stored.get_file(connection, file_id, call.caller.owner)
    if not requested:
        if not file:
            raise not_found("File", body.input_file_id, "input_file_id")
        raise ApiError(
            400,
            f"The file's purpose is '{file.purpose}'; a batch runs over a file uploaded with purpose 'batch'.",
            param="input_file_id",
            code="invalid_purpose",
        )
    if requested.existed:
        if requested.batch.fingerprint != fingerprint:
            raise conflict(
                "This Idempotency-Key was used for another batch.", param="Idempotency-Key", code="idempotency_conflict"
            )
    else:
        call.server.background.wake("validate")
    return objects.batch_object(requested.batch)


def _window_s(window: str) -> float:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise invalid("completion_window", "write a time of up to a year, such as 24h, 30m or 7d.")
    return float(seconds)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > 16:
        raise invalid("metadata", "it has at most 16 pairs.")
    if any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise invalid("metadata", "a key has at most 64 characters and a value 512.")
    refuse_nul("metadata", (text for pair in metadata.items() for text in pair))


def refuse_nul(name: str, texts: Iterable[str]) -> None:
    """Refuse the one character that a text in the database cannot hold."""
    if any("\x00" in text for text in texts):
        raise invalid(name, "it contains a NUL character.")


# -- looking


async def find_batch(call: Call[Any, Any], batch_id: UUID) -> Batch:
    """Find the caller's batch. Another owner's answers like one that does not exist."""
    async with borrowed(call.database) as connection:
        batch = await get_batch(connection, batch_id, call.caller.scope)
    return known(call, batch)


def known(call: Call[Any, Any], batch: Batch | None) -> Batch:
    if batch is None or batch.dialect not in _DIALECTS:
        raise not_found("Batch", call.path["batch_id"])
    return batch


async def retrieve_batch(call: Call[WaitQuery, None]) -> objects.Batch:
    """With `wait`, answers as soon as the batch has ended or the time is up."""
    batch_id = call.id("batch", "batch_id")
    batch = await find_batch(call, batch_id)
    if call.query.wait > 0 and not batch.state.terminal:
        batch = known(call, await call.server.hub.wait(batch, call.query.wait, call.request.receive))
    return objects.batch_object(batch)


async def list_batches(call: Call[BatchesQuery, None]) -> objects.BatchList:
    query = call.query
    states = _states(query.status)
    refuse_nul("metadata", (text for pair in (query.metadata or {}).items() for text in pair))
    rows: list[Batch] = []
    if states != []:
        async with borrowed(call.database) as connection:
            rows = await read.list_batches(
                connection,
                owner=call.caller.owner,
                dialect=_DIALECTS,
                after=cursor("batch", query.after),
                limit=query.limit + 1,
                states=states,
                metadata=query.metadata,
                created_after=_moment(query.created_after),
                created_before=_moment(query.created_before),
            )
    data = [objects.batch_object(row) for row in rows[: query.limit]]
    return objects.BatchList.of(data, has_more=len(rows) > query.limit)


def _states(wanted: Sequence[str] | None) -> list[str] | None:
    """States that the caller asked for, separated by commas or one by one. None: any state; an empty list: no batch."""
    if wanted is None:
        return None
    words = [word for entry in wanted for word in entry.split(",")]
    if not set(words) <= set(_STATUSES):
        raise invalid("status", f"it is one or more of {', '.join(_STATUSES)}.")
    return [state for word in words for state in _STATES_OF.get(word, (word,))]


def _moment(unix_s: int | None) -> datetime | None:
    return None if unix_s is None else datetime.fromtimestamp(unix_s, UTC)


# -- steering


async def cancel_batch(call: Call[None, Nothing | None]) -> objects.Batch:
    """Cancels a batch. It is `cancelled` at once if nothing was in flight."""
    return await _steer(call, "cancel", batch_steer.cancel_batch, BatchState.CANCELLING)


async def pause_batch(call: Call[None, Nothing | None]) -> objects.Batch:
    return await _steer(call, "pause", batch_steer.pause_batch, BatchState.PAUSED)


async def resume_batch(call: Call[None, Nothing | None]) -> objects.Batch:
    return await _steer(call, "resume", batch_steer.resume_batch, BatchState.IN_PROGRESS)


async def _steer(call: Call[Any, Any], verb: str, move: Move, there: BatchState) -> objects.Batch:
    """Move the batch to a state. A batch that is there already is left as it is; one that cannot go there is a
    conflict."""
    batch_id, scope = call.id("batch", "batch_id"), call.caller.scope
    async with borrowed(call.database) as connection:
        found = known(call, await get_batch(connection, batch_id, scope))
        moved = await steer(call, connection, found, move)
        batch = known(call, await get_batch(connection, batch_id, scope))
    if not moved and batch.state is not there:
        raise conflict(f"Cannot {verb} a batch with status '{batch.state.value}'.")
    return objects.batch_object(batch)


async def steer(
    call: Call[Any, Any], connection: Connection, found: Batch, move: Move, verb: str | None = None
) -> bool:
    """Move the caller's batch, whatever its dialect; False if it cannot go there. Of a job, the audit trail keeps the
    verb."""
    if found.state is BatchState.VALIDATING and call.server.providers:
        # So that its lines are known, and each has a line in the error file.
        await validate_batch(connection, found.id, call.server.providers.pool_of)
    async with connection.transaction():
        moved = await move(connection, found.id, call.caller.scope)
        if moved and found.dialect == "job" and verb is not None:
            await record(call, connection, verb, found)
    if moved and move is batch_steer.cancel_batch:
        # With nothing in flight there is nothing to wait for.
        await finish_batch(connection, found.id)
    return moved


async def retry_batch(call: Call[None, RetryBody | None]) -> objects.Batch:
    """Runs requests again that failed or were not run: all of them, those named, or failures of one group of errors.
    Completed requests are never run again."""
    batch_id = call.id("batch", "batch_id")
    body = call.body or RetryBody()
    if len([given for given in (body.custom_ids, body.request_ids, body.fingerprint) if given is not None]) > 1:
        raise invalid("request_ids", "give one of custom_ids, request_ids and fingerprint.")
    if body.fingerprint is not None and not is_fingerprint(body.fingerprint):
        raise invalid("fingerprint", "expected that of a group of errors.")
    refuse_nul("custom_ids", body.custom_ids or ())
    lines = (
        None if body.request_ids is None else [request_line(batch_id, text, "request_ids") for text in body.request_ids]
    )
    limits = call.server.config.retry
    async with borrowed(call.database) as connection:
        known(call, await get_batch(connection, batch_id, call.caller.scope))
        try:
            retried = await run_again.retry_batch(
                connection,
                batch_id,
                call.caller.scope,
                custom_ids=body.custom_ids,
                lines=lines,
                fingerprint=body.fingerprint,
                limits=limits,
            )
        except NotFailed as error:
            name = "request_ids" if body.custom_ids is None else "custom_ids"
            raise invalid(name, f"no failed requests of this batch: {_named(batch_id, error)}.") from None
        if not retried.requests and retried.worn_out:
            raise conflict(worn_out_message(retried.worn_out, limits.max_attempts_lifetime))
        if not retried.requests:
            raise conflict("None of these requests has failed.")
        batch = known(call, await get_batch(connection, batch_id, call.caller.scope))
    return objects.batch_object(batch)


def _named(batch_id: UUID, error: NotFailed) -> str:
    names = [request_public_id(batch_id, it) if isinstance(it, int) else it for it in error.named[:_MAX_NAMED]]
    more = len(error.named) - len(names)
    return ", ".join(f"'{name[:100]}'" for name in names) + (f" and {more} more" if more else "")


def request_line(batch_id: UUID, text: str, name: str) -> int:
    """The line that a request's id names."""
    match = _REQUEST_ID.fullmatch(text)
    if match is None or match[1] != batch_id.hex or int(match[2]) >= 2**31:
        raise invalid(name, f"'{text[:100]}' is no request of this batch.")
    return int(match[2])


async def delete_batch(call: Call[DeleteQuery, None]) -> objects.BatchDeleted:
    """With `with_input`, the input file goes too, unless another batch is over it."""
    batch_id = call.id("batch", "batch_id")
    async with borrowed(call.database) as connection:
        known(call, await get_batch(connection, batch_id, call.caller.scope))
        gone = await erase.delete_batch(connection, batch_id, call.caller.scope, with_input=call.query.with_input)
    if not gone:
        raise not_found("Batch", call.path["batch_id"])
    call.server.background.wake("purge")
    return objects.BatchDeleted(id=call.path["batch_id"])


ENDPOINTS = (
    Endpoint("POST", "/v1/batches", create_batch, "Run every request of a file.", errors=(403, 404, 409)),
    Endpoint("GET", "/v1/batches", list_batches, "List batches, newest first; `metadata[key]=value` narrows it."),
    Endpoint(
        "GET",
        "/v1/batches/{batch_id}",
        retrieve_batch,
        "One batch, at once or, with `wait`, when it has ended.",
        errors=(404,),
    ),
    Endpoint("DELETE", "/v1/batches/{batch_id}", delete_batch, "Erase a batch and its results.", errors=(404, 409)),
    Endpoint(
        "POST", "/v1/batches/{batch_id}/cancel", cancel_batch, "Start nothing more of a batch.", errors=(404, 409)
    ),
    Endpoint(
        "POST",
        "/v1/batches/{batch_id}/pause",
        pause_batch,
        "Start nothing of a batch until it is resumed.",
        errors=(404, 409),
    ),
    Endpoint("POST", "/v1/batches/{batch_id}/resume", resume_batch, "Go on with a paused batch.", errors=(404, 409)),
    Endpoint("POST", "/v1/batches/{batch_id}/retry", retry_batch, "Run failed requests again.", errors=(404, 409)),
)
