"""Rows of jobs: pages of them, and the sheet."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec
import psycopg
from starlette.responses import Response

from penstock.api.endpoint import Call, Camel, Endpoint, Nothing
from penstock.api.errors import not_found
from penstock.api.files import download
from penstock.api.jobs import known_job
from penstock.api.multipart import invalid
from penstock.api.pending import read_page, read_statuses
from penstock.batches.error_groups import is_fingerprint, list_failures_of
from penstock.batches.read import get_batch
from penstock.db import arrays
from penstock.db.pool import Connection, borrowed
from penstock.errors import UsageError
from penstock.export import sheet_file
from penstock.export.grid import (
    STATUSES,
    Grid,
    GridRow,
    LiveRows,
    find_grid,
    find_ordinals,
    list_live,
    read_grid,
    stretches,
)
from penstock.export.pending import PENDING_STATUSES, PendingQuery, read_pending
from penstock.model import request_public_id

Format = Literal["xlsx", "csv", "jsonl"]


class JobItem(Camel):
    id: str
    row: int
    status: str
    attempts: int
    input: msgspec.Raw
    result: msgspec.Raw | None
    error: str | None
    locked_by: str | None
    updated_at: datetime


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


class ExportQuery(msgspec.Struct):
    format: Format = "csv"
    gzip: bool = False
    bom: bool = False
    """Begin a CSV file with a byte order mark, by which Excel knows that it is UTF-8."""


async def list_items(call: Call[ItemsQuery, None]) -> JobItems:
    """A page of rows in their order: all of them, those with certain statuses, or those that failed in one way. Pending
    rows can also be had by the time of their last change."""
    query, size = call.query, call.query.page_size
    statuses = _statuses(query)
    if query.sort == "updatedAt" or query.after is not None:
        return await _list_by_time(call, statuses)
    if query.fingerprint is not None and (statuses is not None or not is_fingerprint(query.fingerprint)):
        raise invalid("fingerprint", "expected that of an error group, without statuses.")
    async with borrowed(call.server.database) as connection, connection.transaction():
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
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
    return JobItems(items=[_item(batch.id, row) for row in rows], next=next_)


async def _list_by_time(call: Call[ItemsQuery, None], statuses: set[str] | None) -> JobItems:
    query = call.query
    if query.sort == "row" or statuses is None or not statuses <= set(PENDING_STATUSES) or query.fingerprint:
        raise invalid("sort", "by updatedAt there are rows with statuses=PENDING,PROCESSING; 'after' is their cursor.")
    async with borrowed(call.server.database) as connection:
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        asked = PendingQuery(statuses, batch_id=batch.id)
        page, cursor_at = await read_page(call, connection, "items", asked, query.after, query.page_size)
        grid = await find_grid(connection, batch.id)
        if grid is None:
            return JobItems(items=[], next=None)
        rows, next_ = await read_pending(connection, grid, page)  # a page of large rows has fewer
    return JobItems(items=[_item(batch.id, row) for row in rows], next=cursor_at(next_))


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
    return read_statuses(",".join(texts) or None, STATUSES)


class _Body(msgspec.Struct):
    row: msgspec.Raw


_decode_body = msgspec.json.Decoder(_Body).decode


def _item(batch_id: UUID, row: GridRow) -> JobItem:
    return JobItem(
        id=request_public_id(batch_id, row.line),
        row=row.line,
        status=row.status,
        attempts=row.attempts,
        input=_decode_body(row.body).row,
        result=None if row.result is None else msgspec.Raw(row.result),
        error=row.error,
        locked_by=None if row.worker_id is None else str(row.worker_id),
        updated_at=row.updated_at,
    )


async def export_job(call: Call[ExportQuery, Nothing | None]) -> Response:
    """The job's sheet as it is now, from one snapshot."""
    job_id, query = call.id("job", "job_id"), call.query
    async with borrowed(call.server.database) as connection:
        known_job(call, await get_batch(connection, job_id, call.caller.scope))

    async def blocks() -> AsyncGenerator[bytes, None]:
        with call.server.count_export():
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
    Endpoint(
        "GET", "/api/jobs/{job_id}/items", list_items, "A page of a job's rows, from a row number on.", errors=(404,)
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
