"""One row of a job, or one request of a batch, with everything that is known of it; and rows as a grid shows them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

import msgspec
from starlette.responses import Response

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.api.errors import not_found
from penstock.api.work import find_owned
from penstock.batches import jobs
from penstock.batches.error_groups import stored_fingerprint
from penstock.batches.read import Batch
from penstock.blobs.blobs import Place, read_images
from penstock.db.pool import Connection, borrowed
from penstock.dispatch.http.processor import join_url
from penstock.dispatch.rows.definition import parse_definition
from penstock.dispatch.rows.render import Image, render
from penstock.dispatch.rows.work import RenderError
from penstock.errors import UsageError
from penstock.export.grid import Grid, GridRow, find_grid, list_live, read_columns, read_grid
from penstock.export.merged import AttemptRow, MergedRow, RequestBody, read_attempts_page, read_results_page
from penstock.export.pending import PendingRow
from penstock.model import request_public_id

_MOST_ATTEMPTS: Final = 200
_LAST_ROW: Final = 2**31 - 1
_MAX_IMAGE_BYTES: Final = 64 * 1024 * 1024
_SHOWN_IMAGES: Final = {"image/png", "image/jpeg", "image/gif", "image/webp"}
_MARK: Final = "…"

STATUS_OF_REQUEST: Final = {
    "pending": "PENDING",
    "processing": "PROCESSING",
    "completed": "DONE",
    "failed": "ERROR",
    "not_found": "NOT_FOUND",
    "skipped": "SKIPPED",
    "cancelled": "CANCELLED",
    "expired": "EXPIRED",
}


class JobItem(Camel, kw_only=True):
    id: str
    row: int
    custom_id: str
    status: str
    attempts: int
    input: msgspec.Raw
    result: msgspec.Raw | None
    error: str | None
    locked_by: str | None
    updated_at: datetime
    cut: bool = False
    """Whether texts of it were cut, as `cellBytes` asks."""


class ItemAttempt(Camel):
    """Attempt that did not complete the row."""

    attempt: int
    at: datetime
    ms: int
    kind: str = msgspec.field(name="class")
    status: int | None
    message: str
    not_before: datetime | None
    worker: str


class ItemRequest(Camel):
    """Request as it was sent last, or would be sent. The provider's own headers and key are not shown."""

    method: str
    url: str
    """Below the provider's address, which only admins see."""
    headers: dict[str, str]
    body: msgspec.Raw | None


class ItemImage(Camel):
    type: str
    width: int | None
    height: int | None
    url: str
    """Relative to the API's root."""


class ItemDetails(JobItem, kw_only=True):
    raw_input: msgspec.Raw | None
    """Cells as they stood in the file."""
    error_code: str | None
    status_code: int | None
    request: ItemRequest | None
    request_problem: str | None
    """Why no request can be made of the row."""
    history: list[ItemAttempt]
    image: ItemImage | None


class _Body(msgspec.Struct):
    row: msgspec.Raw
    raw: msgspec.Raw = msgspec.Raw(b"null")


_decode_body = msgspec.json.Decoder(_Body).decode


# -- rows of the grid


async def is_job(connection: Connection, batch: Batch) -> bool:
    """Whether a batch has rows rather than requests."""
    return batch.dialect == "job" or (batch.dialect == "run" and await read_columns(connection, batch.id) is not None)


def row_item(batch_id: UUID, row: GridRow, cell_bytes: int | None = None) -> JobItem:
    """A row of a job."""
    input_, result, cut = _shorten(_decode_body(row.body).row, row.result, cell_bytes)
    return JobItem(
        id=request_public_id(batch_id, row.line),
        row=row.line,
        custom_id=row.custom_id,
        status=row.status,
        attempts=row.attempts,
        input=input_,
        result=result,
        error=row.error,
        locked_by=None if row.worker_id is None else str(row.worker_id),
        updated_at=row.updated_at,
        cut=cut,
    )


def request_item(batch: Batch, row: MergedRow, cell_bytes: int | None = None) -> JobItem:
    """A request of a batch."""
    input_, result, cut = _shorten(msgspec.Raw(row.body), row.response, cell_bytes)
    live = row.live
    return JobItem(
        id=request_public_id(batch.id, row.line),
        row=row.line,
        custom_id=row.custom_id,
        status=STATUS_OF_REQUEST[row.status],
        attempts=(row.attempts or 0) if live is None else live.attempts,
        input=input_,
        result=result,
        error=row.error_message or row.error_code,
        locked_by=None if live is None or live.worker_id is None else str(live.worker_id),
        updated_at=(row.finished_at or batch.created_at) if live is None else live.since,
        cut=cut,
    )


def pending_request_item(batch: Batch, row: PendingRow, request: RequestBody, cell_bytes: int | None) -> JobItem:
    """A request of a batch that waits or is in flight."""
    input_, _, cut = _shorten(msgspec.Raw(request.body), None, cell_bytes)
    worker_id = row.span.worker_id
    return JobItem(
        id=request_public_id(batch.id, request.line),
        row=request.line,
        custom_id=request.custom_id,
        status=row.status,
        attempts=row.span.attempts,
        input=input_,
        result=None,
        error=None,
        locked_by=None if worker_id is None else str(worker_id),
        updated_at=row.span.at,
        cut=cut,
    )


async def list_requests(
    connection: Connection, batch: Batch, from_row: int, size: int, statuses: set[str] | None, fingerprint: str | None
) -> tuple[list[MergedRow], int | None]:
    """A page of a batch's requests, by line, and where the next begins."""
    words = None if statuses is None else [word for word, told in STATUS_OF_REQUEST.items() if told in statuses]
    group = None if fingerprint is None else stored_fingerprint(fingerprint)
    read = partial(read_results_page, connection, batch.id, statuses=words, fingerprint=group)
    rows = await read(from_row - 1, size)
    more = rows and await read(rows[-1].line, 1, max_bytes=1)
    return rows, more[0].line if more else None


def _shorten(
    input_: msgspec.Raw, result: bytes | None, cell_bytes: int | None
) -> tuple[msgspec.Raw, msgspec.Raw | None, bool]:
    """Input and result with long texts cut, and whether any was."""
    if cell_bytes is None or len(input_) + len(result or b"") <= cell_bytes:
        return input_, None if result is None else msgspec.Raw(result), False
    cutter = _Cutter(cell_bytes)
    return cutter.shorten(input_), None if result is None else cutter.shorten(result), cutter.cut


class _Cutter:
    """Cuts the texts in JSON values."""

    def __init__(self, cell_bytes: int) -> None:
        self._bytes = cell_bytes
        self.cut = False

    def shorten(self, content: bytes | msgspec.Raw) -> msgspec.Raw:
        try:
            return msgspec.Raw(msgspec.json.encode(self._cut(msgspec.json.decode(content))))
        except (ValueError, RecursionError):
            # Nested very deep, or with half of a surrogate pair: answers are stored as they came.
            return msgspec.Raw(msgspec.json.encode(self._cut(bytes(content).decode())))

    def _cut(self, value: Any) -> Any:
        if isinstance(value, str):
            if len(value) <= self._bytes // 4 or len(encoded := value.encode()) <= self._bytes:
                return value
            self.cut = True
            return encoded[: self._bytes].decode("utf-8", "ignore") + _MARK
        if isinstance(value, dict):
            return {name: self._cut(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._cut(each) for each in value]
        return value


# -- one row


def _row_number(call: Call[Any, Any]) -> int:
    text = call.path["row"]
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not 1 <= int(text) <= _LAST_ROW:
        raise not_found("Row", text, "row")
    return int(text)


async def read_row(connection: Connection, batch: Batch, number: int) -> tuple[Grid, GridRow] | None:
    grid = await find_grid(connection, batch.id)
    if grid is None:
        return None
    live = await list_live(connection, batch.id, number - 1, number)
    rows = await read_grid(connection, grid, live, [(number - 1, number)])
    return (grid, rows[0]) if rows else None


async def retrieve_item(call: Call[None, None]) -> ItemDetails:
    """A row with its request, its result, and every attempt that failed."""
    async with borrowed(call.database) as connection:
        batch = await find_owned(call, connection, "job_id")
        number = _row_number(call)
        job = (await jobs.read_jobs(connection, [batch.id])).get(batch.id)
        attempts = await read_attempts_page(connection, batch.id, None, _MOST_ATTEMPTS, number)
        history = [_attempt(attempt) for attempt in attempts]
        if job is None:
            rows = await read_results_page(connection, batch.id, number - 1, 1)
            if not rows or rows[0].line != number:
                raise not_found("Row", call.path["row"], "row")
            return _request_details(call, batch, rows[0], history)
        found = await read_row(connection, batch, number)
    if found is None:
        raise not_found("Row", call.path["row"], "row")
    # Its request is rendered, by templates that may have to be compiled first.
    return await asyncio.to_thread(_row_details, call, batch, job, found[1], history)


def _attempt(row: AttemptRow) -> ItemAttempt:
    return ItemAttempt(
        attempt=row.attempt,
        at=row.ended_at,
        ms=row.duration_ms,
        kind=row.error_code,
        status=row.status_code,
        message=row.error_message,
        not_before=row.not_before,
        worker=str(row.worker_id),
    )


def _fields(item: JobItem) -> dict[str, Any]:
    return {name: getattr(item, name) for name in JobItem.__struct_fields__}


def _request_details(call: Call[Any, Any], batch: Batch, row: MergedRow, history: list[ItemAttempt]) -> ItemDetails:
    pool = call.server.providers.pool_of(row.route) if call.server.providers else None
    return ItemDetails(
        **_fields(request_item(batch, row)),
        raw_input=None,
        error_code=row.error_code,
        status_code=row.status_code,
        request=ItemRequest(
            method="POST",
            url=_url(call, pool, row.url),
            headers={"Content-Type": "application/json", "Idempotency-Key": request_public_id(batch.id, row.line)},
            body=msgspec.Raw(row.body),
        ),
        request_problem=None,
        history=history,
        image=None,
    )


def _row_details(
    call: Call[Any, Any], batch: Batch, job: jobs.Job, row: GridRow, history: list[ItemAttempt]
) -> ItemDetails:
    body = _decode_body(row.body)
    request, problem = _rendered(call, batch, job, row)
    return ItemDetails(
        **_fields(row_item(batch.id, row)),
        raw_input=body.raw,
        error_code=row.error_code,
        status_code=None,
        request=request,
        request_problem=problem,
        history=history,
        image=_image(call, body) if job.images else None,
    )


def _rendered(call: Call[Any, Any], batch: Batch, job: jobs.Job, row: GridRow) -> tuple[ItemRequest | None, str | None]:
    """The request of a job's row; none for a Python function. An image is left out of it."""
    definition = job.spec.get("processor")
    if not isinstance(definition, dict):
        return None, None
    try:
        image = Image("image/png", b"") if job.images else None
        values = msgspec.json.decode(_decode_body(row.body).row)
        request = render(parse_definition(definition), values, attempt=max(1, row.attempts), image=image)
    except (RenderError, UsageError) as error:
        return None, str(error)
    headers = dict(request.headers)
    if request.body is not None:
        headers.setdefault("Content-Type", "application/json")
    return ItemRequest(
        method=request.method,
        url=_url(call, batch.pool, request.path),
        headers={**headers, "Idempotency-Key": request_public_id(batch.id, row.line)},
        body=msgspec.Raw(request.body) if request.body else None,
    ), None


def _url(call: Call[Any, Any], pool: str | None, path: str) -> str:
    """The URL that is called, for admins; others learn the path alone."""
    if call.caller.role == "admin":
        for provider in call.server.providers:
            if provider.pool == pool:
                return join_url(provider.base_url, path) or path
    return path


# -- its image


class _ImageRow(msgspec.Struct):
    media_type: str = ""
    width: int | None = None
    height: int | None = None


_decode_image = msgspec.json.Decoder(_ImageRow, strict=False).decode


def _image_row(body: _Body) -> _ImageRow:
    try:
        return _decode_image(body.row)
    except msgspec.ValidationError:  # a column of that name that holds something else
        return _ImageRow()


def _image(call: Call[Any, Any], body: _Body) -> ItemImage:
    told = _image_row(body)
    url = f"api/jobs/{call.path['job_id']}/items/{call.path['row']}/image"
    return ItemImage(type=told.media_type, width=told.width, height=told.height, url=url)


async def retrieve_image(call: Call[None, None]) -> Response:
    """The image of a row. Of a kind that no browser shows, it is a download."""
    async with borrowed(call.database) as connection:
        batch = await find_owned(call, connection, "job_id")
        number = _row_number(call)
        found = await read_row(connection, batch, number)
        if found is None:
            raise not_found("Image", call.path["row"], "row")
        grid, row = found
        images = await read_images(connection, Place(grid.source_id, grid.source_lane), [row.ordinal], _MAX_IMAGE_BYTES)
    if row.ordinal not in images.by_ordinal:
        raise not_found("Image", call.path["row"], "row")
    media = _image_row(_decode_body(row.body)).media_type
    headers = {
        "content-security-policy": "default-src 'none'; sandbox",
        "cache-control": "private, max-age=3600",
        "cross-origin-resource-policy": "same-origin",
    }
    if media not in _SHOWN_IMAGES:
        media, headers["content-disposition"] = "application/octet-stream", "attachment"
    return Response(images.by_ordinal[row.ordinal], media_type=media, headers=headers)


_ONE = "/api/jobs/{job_id}/items/{row}"

ENDPOINTS = (
    Endpoint("GET", _ONE, retrieve_item, "One row of a job, or one request of a batch.", errors=(404,)),
    Endpoint("GET", f"{_ONE}/image", retrieve_image, "The image of a row.", media="image/*", errors=(404,)),
)
