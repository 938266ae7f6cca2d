"""Requests of a batch with their answers, one by one, and the attempts that failed."""

from __future__ import annotations

import re
from typing import Annotated, cast
from uuid import UUID

import msgspec

from penstock.api import objects
from penstock.api.batches import known, request_line
from penstock.api.endpoint import Call, Endpoint
from penstock.api.multipart import invalid
from penstock.batches.read import get_batch
from penstock.db.pool import borrowed
from penstock.export.merged import AttemptRow, MergedRow, read_attempts_page, read_results_page
from penstock.export.result_lines import NOT_RUN
from penstock.model import request_public_id

_ATTEMPT_ID = re.compile(r"attempt_([0-9]{1,18})_([0-9]{1,9})_([0-9]{1,18})")
_NOT_RUN = {state.value: told for state, told in NOT_RUN.items()}

Limit = Annotated[int, msgspec.Meta(ge=1, le=100)]


class ResultsQuery(msgspec.Struct):
    after: str | None = None
    limit: Limit = 20
    status: list[str] | None = None


class AttemptsQuery(msgspec.Struct):
    after: str | None = None
    limit: Limit = 20
    request_id: str | None = None


# -- requests


async def list_results(call: Call[ResultsQuery, None]) -> objects.RequestList:
    """Inputs and answers side by side, in input order. Empty once the inputs have been erased."""
    query = call.query
    batch_id = call.id("batch", "batch_id")
    after = 0 if query.after is None else request_line(batch_id, query.after, "after")
    statuses = _statuses(query.status)
    async with borrowed(call.database) as connection:
        known(call, await get_batch(connection, batch_id, call.caller.scope))
        rows = await read_results_page(connection, batch_id, after, query.limit, statuses)
        # A page can be short because its rows are large.
        more = bool(rows and await read_results_page(connection, batch_id, rows[-1].line, 1, statuses, max_bytes=1))
    data = [_request(batch_id, row) for row in rows]
    return objects.RequestList.of(data, has_more=more)


def _statuses(wanted: list[str] | None) -> list[str] | None:
    if wanted is None:
        return None
    words = [word for entry in wanted for word in entry.split(",")]
    if not set(words) <= set(objects.REQUEST_STATUSES):
        raise invalid("status", f"it is one or more of {', '.join(objects.REQUEST_STATUSES)}.")
    return words


def _request(batch_id: UUID, row: MergedRow) -> objects.Request:
    name = request_public_id(batch_id, row.line)
    response = None
    if row.response is not None or row.status_code is not None:
        body = msgspec.Raw(row.response) if row.response is not None else None
        response = objects.RequestResponse(row.status_code or 200, row.request_id or name, body)
    return objects.Request(
        id=name,
        line=row.line,
        custom_id=row.custom_id,
        status=cast(objects.RequestStatus, row.status),
        url=row.url,
        body=msgspec.Raw(row.body),
        response=response,
        error=_error(row),
        attempts=row.attempts or 0,
        finished_at=objects.seconds_or_none(row.finished_at),
    )


def _error(row: MergedRow) -> objects.RequestError | None:
    if row.status in _NOT_RUN:
        return objects.RequestError(*_NOT_RUN[row.status])
    if row.error_code is None and row.error_message is None:
        return None
    return objects.RequestError(row.error_code or row.status, row.error_message or row.status)


# -- attempts


async def list_attempts(call: Call[AttemptsQuery, None]) -> objects.AttemptList:
    """Attempts that did not complete: of the whole batch or of one request, in input order."""
    query = call.query
    batch_id = call.id("batch", "batch_id")
    line = None if query.request_id is None else request_line(batch_id, query.request_id, "request_id")
    async with borrowed(call.database) as connection:
        known(call, await get_batch(connection, batch_id, call.caller.scope))
        rows = await read_attempts_page(connection, batch_id, _parse_position(query.after), query.limit + 1, line)
    data = [_attempt(batch_id, row) for row in rows[: query.limit]]
    return objects.AttemptList.of(data, has_more=len(rows) > query.limit)


def _parse_position(after: str | None) -> tuple[int, int, int] | None:
    if after is None:
        return None
    match = _ATTEMPT_ID.fullmatch(after)
    if match is None:
        raise invalid("after", "it is the 'last_id' of the page before.")
    return int(match[1]), int(match[2]), int(match[3])


def _attempt(batch_id: UUID, row: AttemptRow) -> objects.Attempt:
    return objects.Attempt(
        id="attempt_{}_{}_{}".format(*row.position),
        request_id=None if row.line is None else request_public_id(batch_id, row.line),
        custom_id=row.custom_id,
        attempt=row.attempt,
        counted=row.counted,
        ended_at=objects.seconds(row.ended_at),
        duration_ms=row.duration_ms,
        status_code=row.status_code,
        error=objects.RequestError(row.error_code, row.error_message),
        not_before=objects.seconds_or_none(row.not_before),
    )


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/batches/{batch_id}/results",
        list_results,
        "The requests of a batch with their answers.",
        errors=(404,),
    ),
    Endpoint(
        "GET", "/v1/batches/{batch_id}/attempts", list_attempts, "The attempts of a batch that failed.", errors=(404,)
    ),
)
