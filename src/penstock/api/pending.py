"""Pending rows of all jobs: what waits and what is in flight, by the time of the last change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.api.errors import ApiError, not_found
from penstock.api.multipart import invalid
from penstock.batches.read import get_batch
from penstock.db.pool import Connection, borrowed
from penstock.export import pending
from penstock.export.pending import PENDING_STATUSES, PendingPage, PendingQuery, PendingRow, Position, Summary
from penstock.model import parse_id, public_id, request_public_id


class PendingItem(Camel):
    id: str
    row: int
    job_id: str
    owner: str
    job_type: str
    status: str
    attempts: int
    locked_by: str | None
    locked_at: datetime | None
    updated_at: datetime
    summary: str | None


class PendingItems(Camel):
    items: list[PendingItem]
    next: str | None


class PendingItemsQuery(msgspec.Struct, rename="camel"):
    statuses: str | None = None
    user_id: Literal["me", "all"] = "me"
    job_type: str | None = None
    job_id: str | None = None
    since: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(default=None, name="from")
    until: Annotated[datetime, msgspec.Meta(tz=True)] | None = msgspec.field(default=None, name="to")
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 100
    after: str | None = None


async def list_pending(call: Call[PendingItemsQuery, None]) -> PendingItems:
    """A page of pending rows. It may hold fewer than asked for: the walk ends where `next` is null."""
    query = call.query
    if not call.server.config.serve.pending_dashboard:
        message = "The pending dashboard is off. The operator turns it on with pending_dashboard = true."
        raise ApiError(404, message, code="pending_dashboard_off")
    if query.user_id == "all" and call.caller.role != "admin":
        raise ApiError(403, "userId=all needs an admin's key.", type="permission_error", code="forbidden")
    owner = call.caller.owner if query.user_id == "me" else None
    statuses = read_statuses(query.statuses, PENDING_STATUSES) or set(PENDING_STATUSES)
    batch_id = None
    if query.job_id is not None and (batch_id := parse_id("job", query.job_id)) is None:
        raise not_found("Job", query.job_id, "jobId")
    asked = PendingQuery(statuses, batch_id, owner, query.job_type, query.since, query.until)
    async with borrowed(call.database) as connection:
        if batch_id is not None:
            batch = await get_batch(connection, batch_id, owner)
            if batch is None or batch.dialect != "job":
                raise not_found("Job", str(query.job_id), "jobId")
        page, cursor_at = await read_page(call, connection, "pending", asked, query.after, query.page_size)
        summaries = await pending.read_summaries(connection, page.rows)
    rows = zip(page.rows, summaries, strict=True)
    items = [_item(row, told) for row, told in rows if told is not None]
    return PendingItems(items=items, next=cursor_at(page.next))


def read_statuses(text: str | None, known: Sequence[str]) -> set[str] | None:
    """Statuses in a query, separated by commas; None if it names none."""
    if text is None:
        return None
    words = set(text.split(","))
    if not words <= set(known):
        raise invalid("statuses", f"expected one or more of {', '.join(known)}.")
    return words


async def read_page(
    call: Call[Any, Any], connection: Connection, name: str, asked: PendingQuery, after: str | None, size: int
) -> tuple[PendingPage, Callable[[Position | None], str | None]]:
    """The page behind a cursor, and what makes the cursor of the next one: that goes on after a position."""
    told = [
        name,
        sorted(asked.statuses),
        *(asked.batch_id, asked.owner, asked.job_type, asked.since, asked.until),
    ]
    cursors = await call.server.read_cursors(connection)
    start = None
    if after is not None:
        start = _position(cursors.decode(after, owner=call.caller.owner, query=told))

    def cursor_at(position: Position | None) -> str | None:
        return None if position is None else cursors.encode(position, owner=call.caller.owner, query=told)

    return await pending.list_pending(connection, asked, start, size), cursor_at


def _position(values: list[Any]) -> Position:
    try:
        return msgspec.convert(values, Position)
    except msgspec.ValidationError:
        # Signed, and yet no position: by another version of Penstock.
        raise invalid("after", "begin with the first page.") from None


def _item(row: PendingRow, told: Summary) -> PendingItem:
    span = row.span
    return PendingItem(
        id=request_public_id(span.batch_id, told.line),
        row=told.line,
        job_id=public_id("job", span.batch_id),
        owner=span.owner,
        job_type=span.job_type,
        status=row.status,
        attempts=span.attempts,
        locked_by=None if span.worker_id is None else str(span.worker_id),
        locked_at=None if span.worker_id is None else span.at,
        updated_at=span.at,
        summary=told.text,
    )


ENDPOINTS = (
    Endpoint(
        "GET",
        "/api/pending",
        list_pending,
        "Rows of all jobs that wait or are in flight, those that changed longest ago first.",
        errors=(403, 404),
    ),
)
