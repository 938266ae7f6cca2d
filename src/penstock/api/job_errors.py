"""Errors of jobs and batches in groups: how often each kind of failure came, since when, and an example."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.api.multipart import invalid
from penstock.api.work import find_owned
from penstock.batches.error_groups import ErrorGroup, is_fingerprint, list_error_groups
from penstock.db.pool import borrowed


class ErrorSample(Camel):
    row: int
    message: str


class JobErrorGroup(Camel):
    fingerprint: str
    code: str
    status: int | None
    """HTTP status of the upstream's answer."""
    count: int
    first_seen: datetime
    last_seen: datetime
    sample: ErrorSample


class JobErrors(Camel):
    errors: list[JobErrorGroup]
    next: str | None


class ErrorsQuery(msgspec.Struct):
    after: str | None = None
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = msgspec.field(default=1_000, name="pageSize")


async def list_errors(call: Call[ErrorsQuery, None]) -> JobErrors:
    """A page of error groups, those with most rows first. Pages follow each other by fingerprint."""
    query, size = call.query, call.query.page_size
    if query.after is not None and not is_fingerprint(query.after):
        raise invalid("after", "expected the 'next' of the page before.")
    async with borrowed(call.database) as connection:
        batch = await find_owned(call, connection, "job_id")
        found = await list_error_groups(connection, batch.id, query.after, size + 1)
    page = found[:size]
    return JobErrors(
        errors=[_group(group) for group in sorted(page, key=lambda group: -group.rows)],
        next=page[-1].fingerprint if len(found) > size else None,
    )


def _group(group: ErrorGroup) -> JobErrorGroup:
    return JobErrorGroup(
        fingerprint=group.fingerprint,
        code=group.code,
        status=group.status_code,
        count=group.rows,
        first_seen=group.first_at,
        last_seen=group.last_at,
        sample=ErrorSample(row=group.line, message=group.message),
    )


ENDPOINTS = (
    Endpoint("GET", "/api/jobs/{job_id}/errors", list_errors, "Errors of a job or a batch, in groups.", errors=(404,)),
)
