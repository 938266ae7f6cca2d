"""Uploads in parts: opened with a size, filled in any order, completed into a file."""

from __future__ import annotations

from functools import partial
from typing import Annotated, cast

import msgspec

from penstock.api import objects
from penstock.api.endpoint import Call, Endpoint, Nothing
from penstock.api.files import lifetime_s
from penstock.api.multipart import Feeder, Form, clean_filename, idempotency_key, invalid
from penstock.api.upload_threads import upload_work
from penstock.db.pool import borrowed
from penstock.intake import parts
from penstock.intake.files import FileRow
from penstock.intake.parts import PartWriter, UploadRow
from penstock.model import parse_id, public_id

_FORM = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "format": "binary"}},
}


class UploadBody(msgspec.Struct, forbid_unknown_fields=True):
    bytes: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    filename: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    mime_type: Annotated[str, msgspec.Meta(max_length=255)]
    purpose: objects.Purpose
    expires_after: objects.ExpiresAfter | None = None


class CompleteBody(msgspec.Struct, forbid_unknown_fields=True):
    part_ids: Annotated[list[str], msgspec.Meta(min_length=1)]
    md5: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{32}$")] | None = None


async def create_upload(call: Call[None, UploadBody]) -> objects.Upload:
    body = call.body
    if not body.mime_type.isprintable():
        raise invalid("mime_type", "it is not a media type.")
    async with borrowed(call.database) as connection:
        row, _ = await parts.create_upload(
            connection,
            owner=call.caller.owner,
            filename=clean_filename(body.filename),
            purpose=body.purpose,
            mime_type=body.mime_type,
            size=body.bytes,
            limits=call.server.config.intake,
            expires_after_s=body.expires_after.seconds if body.expires_after else None,
            idempotency_key=idempotency_key(call.request.headers),
        )
    return _upload(row)


async def create_part(call: Call[None, None]) -> objects.UploadPart:
    """Taken as it arrives. Parts may be sent at the same time."""
    server = call.server
    upload_id = call.id("upload", "upload_id")
    form = Form(call.request.headers.get("content-type", ""), "data")
    work = upload_work(call)
    writer = await work.run(
        partial(
            PartWriter,
            server.conninfo,
            owner=call.caller.owner,
            worker_id=server.worker_id,
            upload_id=upload_id,
            limits=server.config.intake,
            idempotency_key=idempotency_key(call.request.headers),
            max_stored_bytes=(await call.quota()).max_stored_bytes,
        )
    )
    async with Feeder(writer, work) as feeder:
        async for data in call.request.stream():
            for piece in form.write(data):
                await feeder.put(piece)
        form.finish()
        await feeder.flush()
        row = await feeder.finish(writer.finish)
    return objects.UploadPart(
        id=public_id("part", row.id),
        created_at=objects.seconds(row.created_at),
        upload_id=public_id("upload", row.upload_id),
    )


async def complete_upload(call: Call[None, CompleteBody]) -> objects.Upload:
    """Puts the parts together in the order given. Asked for again, it answers the same."""
    server = call.server
    upload_id = call.id("upload", "upload_id")
    ids = []
    for text in call.body.part_ids:
        part_id = parse_id("part", text)
        if part_id is None:
            raise invalid("part_ids", f"the upload has no part {text[:100]}.")
        ids.append(part_id)
    done = await upload_work(call).run_for_client(
        partial(
            parts.complete_upload,
            server.conninfo,
            owner=call.caller.owner,
            worker_id=server.worker_id,
            upload_id=upload_id,
            part_ids=ids,
            limits=server.config.intake,
            md5=call.body.md5,
            lifetime_s=lifetime_s,
        )
    )
    server.background.wake("sweep")
    return _upload(done.upload, done.file)


async def cancel_upload(call: Call[None, Nothing | None]) -> objects.Upload:
    upload_id = call.id("upload", "upload_id")
    async with borrowed(call.database) as connection:
        row = await parts.cancel_upload(connection, upload_id, call.caller.owner)
    call.server.background.wake("sweep")
    return _upload(row)


def _upload(row: UploadRow, file: FileRow | None = None) -> objects.Upload:
    return objects.Upload(
        id=public_id("upload", row.id),
        bytes=row.bytes,
        created_at=objects.seconds(row.created_at),
        expires_at=objects.seconds(row.expires_at),
        filename=row.filename,
        purpose=row.purpose,
        status=cast(objects.UploadStatus, row.status),
        file=objects.file_object(file) if file is not None else None,
    )


ENDPOINTS = (
    Endpoint("POST", "/v1/uploads", create_upload, "Open an upload in parts.", errors=(409,)),
    Endpoint(
        "POST",
        "/v1/uploads/{upload_id}/parts",
        create_part,
        "Add a part.",
        form=_FORM,
        errors=(400, 404, 408, 409, 413, 422),
    ),
    Endpoint(
        "POST", "/v1/uploads/{upload_id}/complete", complete_upload, "Make a file of the parts.", errors=(404, 409)
    ),
    Endpoint(
        "POST", "/v1/uploads/{upload_id}/cancel", cancel_upload, "Give an upload up.", errors=(404, 409), frees=True
    ),
)
