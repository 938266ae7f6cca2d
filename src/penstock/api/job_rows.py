"""Rows of jobs: pages of them, and the sheet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec
import psycopg
from starlette.responses import Response, StreamingResponse

from penstock.api.endpoint import Call, Camel, Endpoint, Nothing
from penstock.api.files import attachment
from penstock.api.jobs import known_job
from penstock.api.multipart import invalid
from penstock.batches.read import get_batch
from penstock.db import arrays
from penstock.db.pool import borrowed
from penstock.export import sheet_file
from penstock.export.grid import STATUSES, GridRow, find_grid, find_ordinals, list_live, read_grid, stretches
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
    updated_at: datetime | None


class JobItems(Camel):
    items: list[JobItem]
    next: str | None


class ItemsQuery(msgspec.Struct):
    from_row: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = msgspec.field(default=1, name="from")
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = msgspec.field(default=100, name="pageSize")
    status: str | None = None
    statuses: str | None = None


class ExportQuery(msgspec.Struct):
    format: Format = "csv"
    gzip: bool = False


async def list_items(call: Call[ItemsQuery, None]) -> JobItems:
    """A page of rows in their order: all of them, or those with certain statuses."""
    query, size = call.query, call.query.page_size
    statuses = _statuses(query)
    async with borrowed(call.server.database) as connection, connection.transaction():
        batch = known_job(call, await get_batch(connection, call.id("job", "job_id"), call.caller.scope))
        grid = await find_grid(connection, batch.id)
        if grid is None:
            return JobItems(items=[], next=None)
        live = await list_live(connection, batch.id)
        start = query.from_row - 1
        if statuses is None:
            ordinals = list(range(start, min(start + size + 1, grid.total)))
        else:
            ordinals = await find_ordinals(connection, grid, live, statuses, start, size + 1)
        rows = await read_grid(connection, grid, live, stretches(ordinals[:size]))
    more = len(ordinals) > size
    return JobItems(items=[_item(batch.id, row) for row in rows], next=str(ordinals[size] + 1) if more else None)


def _statuses(query: ItemsQuery) -> set[str] | None:
    if query.status is None and query.statuses is None:
        return None
    words = {word for text in (query.status, query.statuses) if text for word in text.split(",")}
    if not words <= set(STATUSES):
        raise invalid("statuses", f"expected one or more of {', '.join(STATUSES)}.")
    return words


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

    async def blocks() -> AsyncIterator[bytes]:
        async with await psycopg.AsyncConnection.connect(call.server.conninfo) as connection:
            arrays.register(connection)
            await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
            await connection.set_read_only(True)
            async for block, _ in sheet_file.sheet_blocks(connection, job_id, query.format, gzip=query.gzip):
                if block:
                    yield block

    name = f"{call.path['job_id']}.{query.format}{'.gz' if query.gzip else ''}"
    headers = {"content-disposition": attachment(name), "cache-control": "private, no-store"}
    return StreamingResponse(blocks(), media_type="application/octet-stream", headers=headers)


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
        errors=(404,),
    ),
)
