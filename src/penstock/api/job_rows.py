"""Rows of jobs: pages of them, and the sheet."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
import psycopg
from starlette.responses import Response

from penstock.api.endpoint import Call, Camel, Endpoint, Nothing
from penstock.api.errors import not_found
from penstock.api.files import download
from penstock.api.items import (
    JobItem,
    is_job,
    list_requests,
    pending_request_item,
    read_row,
    request_item,
    row_item,
)
from penstock.api.jobs import known_job
from penstock.api.multipart import invalid
from penstock.api.pending import read_page, read_statuses
from penstock.api.work import find_owned
from penstock.batches.error_groups import is_fingerprint, list_failures_of
from penstock.batches.read import Batch, get_batch
from penstock.db import arrays
from penstock.db.pool import Connection, borrowed
from penstock.errors import UsageError
from penstock.export import sheet_file
from penstock.export.custom_ids import find_custom_id
from penstock.export.grid import (
    PENDING,
    STATUSES,
    Grid,
    LiveRows,
    find_grid,
    find_ordinals,
    list_live,
    read_grid,
    stretches,
)
from penstock.export.merged import read_bodies, read_results_page
from penstock.export.pending import PENDING_STATUSES, PendingPage, PendingQuery, Position, read_pending
from penstock.model import BatchState

Format = Literal["xlsx", "csv", "jsonl"]

_GIVEN_UP = (BatchState.CANCELLING, BatchState.CANCELLED, BatchState.EXPIRED)


class JobItems(Camel):
    items: list[JobItem]
    next: str | None


class ItemsQuery(msgspec.Struct):
    from_row: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = msgspec.field(default=1, name="from")
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = msgspec.field(default=100, name="pageSize")
    status: str | None = None
    statuses: str | None = None
    fingerprint: str | None = None
    sort: Literal["row", "updatedAt"] | None = None
    after: str | None = None
    custom_id: Annotated[str, msgspec.Meta(max_length=1_000)] | None = msgspec.field(default=None, name="customId")
    cell_bytes: Annotated[int, msgspec.Meta(ge=16, le=1_048_576)] | None = msgspec.field(default=None, name="cellBytes")


class ExportQuery(msgspec.Struct):
    format: Format = "csv"
    gzip: bool = False
    bom: bool = False
    """Begin a CSV file with a byte order mark, by which Excel knows that it is UTF-8."""


async def list_items(call: Call[ItemsQuery, None]) -> JobItems:
    """A page of rows in their order: all of them, those with certain statuses, or those that failed in one way. Pending
    rows can also be had by the time of their last change, and one row by its custom id: if that page is empty, the
    search goes on from `next`. Of a batch, rows are its requests, with the numbers of the file's lines. With
    `cellBytes`, longer texts in the input and the result are cut, and end with `…`."""
    query, size = call.query, call.query.page_size
    if query.custom_id is not None:
        return await _find_by_custom_id(call, query.custom_id)
    statuses = _statuses(query)
    if query.sort == "updatedAt" or query.after is not None:
        return await _list_by_time(call, statuses)
    if query.fingerprint is not None and (statuses is not None or not is_fingerprint(query.fingerprint)):
        raise invalid("fingerprint", "expected that of an error group, without statuses.")
    async with borrowed(call.database) as connection, connection.transaction():
        batch = await find_owned(call, connection, "job_id")
        if not await is_job(connection, batch):
            requests, later = await list_requests(connection, batch, query.from_row, size, statuses, query.fingerprint)
            items = [request_item(batch, row, query.cell_bytes) for row in requests]
            return JobItems(items=items, next=None if later is None else str(later))
        grid = await find_grid(connection, batch.id)
        if grid is None:
            return JobItems(items=[], next=None)
        start = query.from_row - 1
        narrowed = query.fingerprint is not None or statuses is not None
        stop = {} if narrowed else {"stop": start + size + 1}  # found by status, the page may end anywhere
        live = await list_live(connection, batch.id, start, **stop)
        if query.fingerprint is not None:
            ordinals = await _find_failures(connection, grid, live, query.fingerprint, start, size + 1)
        elif statuses is None:
            ordinals = list(range(start, min(start + size + 1, grid.total)))
        else:
            ordinals = await find_ordinals(connection, grid, live, statuses, start, size + 1)
        rows = await read_grid(connection, grid, live, stretches(ordinals[:size]))
    # A page of large rows has fewer.
    next_ = str(ordinals[len(rows)] + 1) if len(rows) < len(ordinals) else None
    return JobItems(items=[row_item(batch.id, row, query.cell_bytes) for row in rows], next=next_)


async def _find_by_custom_id(call: Call[ItemsQuery, None], custom_id: str) -> JobItems:
    query = call.query
    async with borrowed(call.database) as connection:
        batch = await find_owned(call, connection, "job_id")
        search = await find_custom_id(connection, batch.id, custom_id, query.from_row)
        if search.line is None:
            return JobItems(items=[], next=None if search.next is None else str(search.next))
        if not await is_job(connection, batch):
            requests = await read_results_page(connection, batch.id, search.line - 1, 1)
            return JobItems(items=[request_item(batch, row, query.cell_bytes) for row in requests], next=None)
        found = await read_row(connection, batch, search.line)
    return JobItems(items=[row_item(batch.id, found[1], query.cell_bytes)] if found else [], next=None)


async def _list_by_time(call: Call[ItemsQuery, None], statuses: set[str] | None) -> JobItems:
    query = call.query
    if query.sort == "row" or statuses is None or not statuses <= set(PENDING_STATUSES) or query.fingerprint:
        raise invalid("sort", "by updatedAt there are rows with statuses=PENDING,PROCESSING; 'after' is their cursor.")
    async with borrowed(call.database) as connection:
        batch = await find_owned(call, connection, "job_id")
        asked = PendingQuery(statuses, batch_id=batch.id)
        page, cursor_at = await read_page(call, connection, "items", asked, query.after, query.page_size)
        if not await is_job(connection, batch):
            items, next_ = await _read_pending_requests(connection, batch, page, query.cell_bytes)
            return JobItems(items=items, next=cursor_at(next_))
        grid = await find_grid(connection, batch.id)
        if grid is None:
            return JobItems(items=[], next=None)
        rows, next_ = await read_pending(connection, grid, page)  # a page of large rows has fewer
    return JobItems(items=[row_item(batch.id, row, query.cell_bytes) for row in rows], next=cursor_at(next_))


async def _read_pending_requests(
    connection: Connection, batch: Batch, page: PendingPage, cell_bytes: int | None
) -> tuple[list[JobItem], Position | None]:
    """The pending requests of a page, and where the next one goes on. What was never run of a batch that was cancelled
    or has expired does not wait any more."""
    if not page.rows:
        return [], page.next
    places = [(row.span.source_id, row.span.source_lane, row.ordinal) for row in page.rows]
    found = await read_bodies(connection, places)  # a page of large requests has fewer
    given_up = batch.state in _GIVEN_UP
    items = [
        pending_request_item(batch, row, request, cell_bytes)
        for row, request in zip(page.rows, found, strict=False)
        if request is not None and not (given_up and row.status == PENDING)
    ]
    return items, page.rows[len(found) - 1].position if len(found) < len(page.rows) else page.next


async def _find_failures(
    connection: Connection, grid: Grid, live: LiveRows, fingerprint: str, start: int, limit: int
) -> list[int]:
    """Find the next rows that failed in one way and are not being run again."""
    found: list[int] = []
    after = start - 1
    while len(found) < limit:
        failures = await list_failures_of(connection, grid.lane_id, fingerprint, after, limit)
        found += [ordinal for ordinal in failures if live.at(ordinal) is None]
        if len(failures) < limit:
            break
        after = failures[-1]
    return found[:limit]


def _statuses(query: ItemsQuery) -> set[str] | None:
    texts = [text for text in (query.status, query.statuses) if text]
    return read_statuses(",".join(texts) or None, (*STATUSES, "CANCELLED", "EXPIRED"))


async def export_job(call: Call[ExportQuery, Nothing | None]) -> Response:
    """The job's sheet as it is now, from one snapshot."""
    return await _export(call)


async def download_job(call: Call[ExportQuery, None]) -> Response:
    """The same, as a browser follows a link."""
    return await _export(call)


async def _export(call: Call[ExportQuery, Any]) -> Response:
    job_id, query = call.id("job", "job_id"), call.query
    async with borrowed(call.database) as connection:
        known_job(call, await get_batch(connection, job_id, call.caller.scope))

    async def blocks() -> AsyncGenerator[bytes, None]:
        with call.server.count_export(call.caller.owner):
            async with await psycopg.AsyncConnection.connect(call.server.conninfo) as connection:
                arrays.register(connection)
                await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
                await connection.set_read_only(True)
                sheet = sheet_file.sheet_blocks(connection, job_id, query.format, gzip=query.gzip, bom=query.bom)
                async with aclosing(sheet):
                    async for block, _ in sheet:
                        if block:
                            yield block

    name = f"{call.path['job_id']}.{query.format}{'.gz' if query.gzip else ''}"
    try:
        return await download(blocks(), name, {})
    except sheet_file.NoJob:
        raise not_found("Job", call.path["job_id"]) from None
    except UsageError as error:
        raise invalid("format", error.advice) from None


ENDPOINTS = (
    Endpoint("GET", "/api/jobs/{job_id}/items", list_items, "A page of rows, from a row number on.", errors=(404,)),
    Endpoint(
        "GET",
        "/api/jobs/{job_id}/export",
        download_job,
        "A job's sheet, for a link.",
        media="application/octet-stream",
        errors=(404, 503),
    ),
    Endpoint(
        "POST",
        "/api/jobs/{job_id}/export",
        export_job,
        "A job's sheet.",
        media="application/octet-stream",
        errors=(404, 503),
    ),
)
