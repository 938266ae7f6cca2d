"""Files: uploaded by clients, or the results of a batch, which are read from what was recorded."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.api import objects
from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import ApiError, conflict, not_found
from penstock.api.multipart import Feeder, Form, clean_filename, idempotency_key, invalid, missing
from penstock.api.upload_threads import upload_work
from penstock.batches.read import Batch, Which, find_batch_of_result
from penstock.db.pool import borrowed
from penstock.erase import erase
from penstock.export import follow, read
from penstock.intake import files as stored
from penstock.intake.files import ContentGone, FileRow
from penstock.intake.intake import FileIntake
from penstock.model import parse_id, public_id

_TEXT_FIELDS = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"type": "string", "enum": list(objects.PURPOSES)},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}
_FORM_BYTES = 1024 * 1024
"""What a form may be larger than its file."""
_PAGE_BYTES = 1024 * 1024


class FilesQuery(msgspec.Struct):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


class PutQuery(msgspec.Struct):
    purpose: objects.Purpose
    filename: str = "upload"
    expires_after_seconds: objects.Lifetime | None = None


class ContentQuery(msgspec.Struct):
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None = None


# -- taking files in


async def create_file(call: Call[None, None]) -> objects.File:
    """The form's fields may come before or after the file: what is known when the file begins is used at once."""
    form = Form(call.request.headers.get("content-type", ""), "file", _TEXT_FIELDS)
    refuse_too_large(call)
    async with AsyncExitStack() as closing:
        feeder: Feeder | None = None
        async for data in call.request.stream():
            pieces = form.write(data)
            if feeder is None and form.filename is not None:
                purpose = _purpose(form.fields["purpose"]) if "purpose" in form.fields else None
                upload = _open(call, form.filename, purpose, (await call.quota()).max_stored_bytes)
                feeder = await closing.enter_async_context(Feeder(upload, upload_work(call)))
            if feeder is not None:
                for piece in pieces:
                    await feeder.put(piece)
        form.finish()
        if feeder is None:
            raise missing("file")
        if "purpose" not in form.fields:
            raise missing("purpose")
        await feeder.flush()
        return await _finish(feeder, upload, _purpose(form.fields["purpose"]), _lifetime(form.fields))


async def put_file(call: Call[PutQuery, None]) -> objects.File:
    """The body is the file: `curl -T requests.jsonl '…/v1/files?purpose=batch&filename=requests.jsonl'`."""
    if call.request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Send the file as it is, without 'Content-Encoding'.", code="unsupported_media_type")
    refuse_too_large(call)
    quota = await call.quota()
    upload = _open(call, clean_filename(call.query.filename), call.query.purpose, quota.max_stored_bytes)
    async with Feeder(upload, upload_work(call)) as feeder:
        async for data in call.request.stream():
            await feeder.put(data)
        await feeder.flush()
        return await _finish(feeder, upload, call.query.purpose, call.query.expires_after_seconds)


def refuse_too_large(call: Call[Any, Any]) -> None:
    """Refuse by its Content-Length, before anything is read."""
    most = call.server.config.intake.max_upload_bytes
    if _content_length(call) > most + _FORM_BYTES:
        raise ApiError(413, f"The file is larger than {most:,} bytes (max_upload_bytes).", code="file_too_large")


def _content_length(call: Call[Any, Any]) -> int:
    """Size of the body, as its head says; 0 if it does not."""
    length = call.request.headers.get("content-length", "")
    return int(length) if length.isdigit() else 0


def _open(call: Call[Any, Any], filename: str, purpose: str | None, max_stored_bytes: int) -> FileIntake:
    server = call.server
    return FileIntake(
        server.conninfo,
        owner=call.caller.owner,
        worker_id=server.worker_id,
        filename=filename,
        limits=server.config.intake,
        purpose=purpose,
        keep_bytes=True,
        keep_problems=True,
        idempotency_key=idempotency_key(call.request.headers),
        max_stored_bytes=max_stored_bytes,
        expected_bytes=_content_length(call),
    )


async def _finish(feeder: Feeder, upload: FileIntake, purpose: str, asked_s: int | None) -> objects.File:
    upload.purpose = purpose
    upload.expires_after_s = lifetime_s(purpose, asked_s)
    return objects.file_object((await feeder.finish(upload.finish)).file)


def lifetime_s(purpose: str, asked_s: int | None) -> float | None:
    """Seconds that a file is kept: what was asked for; else 30 days for an input of batches, for ever for others."""
    if asked_s is not None:
        return float(asked_s)
    return float(objects.DEFAULT_LIFETIME_S) if purpose == "batch" else None


def _purpose(value: str) -> str:
    if value not in objects.PURPOSES:
        raise invalid("purpose", f"it is one of {', '.join(objects.PURPOSES)}.")
    return value


def _lifetime(fields: Mapping[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after.anchor", "it can only be 'created_at'.")
    try:
        return msgspec.convert(seconds, objects.Lifetime, strict=False)
    except msgspec.ValidationError:
        raise invalid("expires_after.seconds", "give 3600 (1 hour) to 2592000 (30 days).") from None


# -- showing them


async def list_files(call: Call[FilesQuery, None]) -> objects.FileList:
    query = call.query
    async with borrowed(call.database) as connection:
        rows = await stored.list_files(
            connection,
            owner=call.caller.owner,
            purpose=query.purpose,
            after=cursor("file", query.after),
            limit=query.limit + 1,
            ascending=query.order == "asc",
        )
    data = [objects.file_object(row) for row in rows[: query.limit]]
    return objects.FileList.of(data, has_more=len(rows) > query.limit)


def cursor(kind: str, after: str | None, name: str = "after") -> Any:
    """Where a list goes on. The object itself may be gone by now."""
    if after is None:
        return None
    found = parse_id(kind, after)
    if found is None:
        raise invalid(name, "it is the 'last_id' of the page before.")
    return found


async def retrieve_file(call: Call[None, None]) -> objects.File:
    found = await _find(call)
    if isinstance(found, FileRow):
        return objects.file_object(found)
    if found.row is not None:
        return objects.file_object(found.row)
    # Not yet a file of its own: what the batch has recorded so far.
    batch = found.batch
    return objects.File(
        id=public_id("file", call.id("file", "file_id")),
        bytes=batch.output_bytes if found.which == "output" else batch.error_bytes,
        created_at=objects.seconds(batch.validated_at or batch.created_at),
        filename=found.filename,
        purpose="batch_output",
    )


async def delete_file(call: Call[None, None]) -> objects.FileDeleted:
    file_id, scope = call.id("file", "file_id"), call.caller.scope
    async with borrowed(call.database) as connection:
        gone = await erase.delete_file(connection, file_id, scope)
        if not gone and await find_batch_of_result(connection, file_id, scope) is not None:
            raise conflict("The batch is still writing this file. Cancel the batch, or wait for its end.")
    if not gone:
        raise not_found("File", call.path["file_id"])
    call.server.background.wake("purge")
    return objects.FileDeleted(id=call.path["file_id"])


async def file_content(call: Call[ContentQuery, None]) -> Response:
    found = await _find(call)
    database, offset = call.database, call.query.offset
    if isinstance(found, FileRow):
        if offset is not None:
            raise invalid("offset", "only the results of a batch can be read from an offset.")
        return await download(stored.content(database, found), found.filename, {"content-length": str(found.bytes)})
    if found.row is None or offset is not None:
        return await _follow(call, found, offset or 0)
    blocks = read.output_blocks(database, found.batch.id, found.which, found.batch.state, "openai")
    return await download(blocks, found.filename, {"x-incomplete": "false", "x-last-line": str(found.row.lines)})


@dataclass(frozen=True, slots=True)
class _Result:
    """A file that is the result of a batch. While that is running, it has no row."""

    row: FileRow | None
    batch: Batch
    which: Which

    @property
    def filename(self) -> str:
        return f"{public_id('batch', self.batch.id)}_{'output' if self.which == 'output' else 'error'}.jsonl"


async def _find(call: Call[Any, Any]) -> FileRow | _Result:
    """The caller's file. Another owner's file answers like one that does not exist."""
    file_id = call.id("file", "file_id")
    async with borrowed(call.database) as connection:
        row = await stored.get_file(connection, file_id, call.caller.scope)
        if row is not None and row.kind == "input":
            return row
        result = await find_batch_of_result(connection, file_id, call.caller.scope)
        if row is None and result is not None and result[0].state.terminal:
            # The batch has ended since the first look, and its files are there now; or they are deleted.
            row = await stored.get_file(connection, file_id, call.caller.scope)
    if result is None or (row is None and result[0].state.terminal):
        raise not_found("File", call.path["file_id"])
    return _Result(row, *result)


async def _follow(call: Call[Any, Any], found: _Result, offset: int) -> Response:
    """Results in the order in which they were recorded, up to the last one there is now."""
    database, batch, which = call.database, found.batch, found.which
    counts = batch.counts
    async with borrowed(database) as connection:
        end = max(offset, await follow.number_lines(connection, batch.id, which))
    # Lines that were never run are in no journal.
    run = counts.completed + counts.failed + counts.not_found + counts.skipped
    whole = batch.state.terminal and (which == "output" or run == counts.total)

    async def lines() -> AsyncGenerator[bytes, None]:
        place = offset
        while place < end:
            page = await follow.read_journal_page(database, batch.id, which, place, _PAGE_BYTES)
            if not page.lines:
                return
            yield b"".join(line for line, after in zip(page.lines, page.offsets, strict=True) if after <= end)
            place = page.after

    headers = {"x-incomplete": "false" if whole else "true", "x-last-line": str(end)}
    return await download(lines(), found.filename, headers)


class _Download(StreamingResponse):
    """Answer that is a file. Its blocks are closed with it, however it ends: what they hold is free at once."""

    blocks: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.blocks.aclose()


async def download(
    blocks: AsyncGenerator[bytes, None],
    filename: str,
    headers: Mapping[str, str],
    *,
    media_type: str = "application/octet-stream",
) -> Response:
    """An answer that is a file. Its first block is read before the answer begins, so that a failure can be told."""
    try:
        first = await anext(blocks, b"")
    except ContentGone as gone:
        raise ApiError(404, gone.message, param="id", code="content_gone") from None
    except read.ResultsChangedError:
        raise conflict("The batch has gone on meanwhile: read it again.") from None

    async def body() -> AsyncIterator[bytes]:
        if first:
            yield first
        async for block in blocks:
            yield block

    response = _Download(
        body(),
        media_type=media_type,
        headers={
            **headers,
            "content-disposition": attachment(filename),
            "x-content-type-options": "nosniff",
            "cache-control": "private, no-store",
        },
    )
    response.blocks = blocks
    return response


def attachment(filename: str) -> str:
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._- ()") else "_" for c in filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"


ENDPOINTS = (
    Endpoint("POST", "/v1/files", create_file, "Upload a file.", form=_FORM, errors=(400, 408, 409, 413, 422)),
    Endpoint(
        "PUT",
        "/v1/files",
        put_file,
        "Upload a file as the whole body, as `curl -T` does.",
        stream="application/octet-stream",
        errors=(408, 409, 413, 415),
    ),
    Endpoint("GET", "/v1/files", list_files, "List files."),
    Endpoint("GET", "/v1/files/{file_id}", retrieve_file, "One file.", errors=(404,)),
    Endpoint(
        "DELETE",
        "/v1/files/{file_id}",
        delete_file,
        "Delete a file. Batches that still run over it are cancelled.",
        errors=(404, 409),
    ),
    Endpoint(
        "GET",
        "/v1/files/{file_id}/content",
        file_content,
        "A file's bytes. Of a running batch: the results so far.",
        media="application/octet-stream",
        errors=(404,),
    ),
)
