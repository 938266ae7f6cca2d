"""Uploads in parts: parts come in any order and at once, and become a file in the order given at the end.

A part that arrives is a file being stored, like any other: if its process dies, the same sweep finds it. When it is
whole it leaves the files and joins its upload, in one statement. When the upload ends, however it does, its parts
become files that were given up, and the purge deletes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID, uuid5

import msgspec
import psycopg

from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.errors import UsageError
from penstock.intake import sweep
from penstock.intake.files import FileRow
from penstock.intake.intake import FileIntake
from penstock.intake.pace import keep_pace
from penstock.intake.pieces import unpack_piece
from penstock.intake.refusal import IntakeRefused
from penstock.intake.writer import FileWriter, IdempotencyConflict, given_up
from penstock.model import new_id, public_id

_COMPLETION_GRACE_S = 600.0
"""An upload that is being completed as it expires keeps its parts for this long."""
_EXPIRED_AT_ONCE = 100
_SPARE = 2
"""Parts may hold this many times what the upload asks for: some are sent again after a lost answer."""
_SQL = sql.load("penstock.intake", "intake.sql")


@dataclass(frozen=True, slots=True)
class UploadRow:
    id: UUID
    owner: str
    filename: str
    purpose: str
    mime_type: str
    bytes: int
    expires_after_s: int | None
    """Of the file it will become."""
    file_id: UUID | None
    created_at: datetime
    expires_at: datetime
    status: str
    """pending, completed, cancelled or expired."""


@dataclass(frozen=True, slots=True)
class PartRow:
    id: UUID
    upload_id: UUID
    bytes: int
    created_at: datetime


class UploadMissing(UsageError):  # noqa: N818 - a verdict on the request
    """That owner has no such upload."""


class UploadNotPending(UsageError):  # noqa: N818 - a verdict on the request
    """The upload was completed, cancelled, or has expired."""

    def __init__(self, upload: UploadRow) -> None:
        super().__init__(f"Upload {public_id('upload', upload.id)} is {upload.status}; expected pending.")
        self.upload = upload


# -- opening and ending


async def create_upload(
    connection: Connection,
    *,
    owner: str,
    filename: str,
    purpose: str,
    mime_type: str,
    size: int,
    limits: IntakeLimits,
    expires_after_s: int | None = None,
    idempotency_key: str | None = None,
) -> tuple[UploadRow, bool]:
    """Open an upload; or find the one of the same key, and say that it existed."""
    if size > limits.max_upload_bytes:
        raise IntakeRefused(
            f"{filename}: {size:,} bytes are more than {limits.max_upload_bytes:,} (max_upload_bytes)",
            code="file_too_large",
        )
    fingerprint = hashlib.sha256(msgspec.json.encode([filename, purpose, mime_type, size, expires_after_s])).digest()
    upload_id, existed = new_id(), False
    parameters = {
        "id": upload_id,
        "owner": owner,
        "filename": filename,
        "purpose": purpose,
        "mime_type": mime_type,
        "bytes": size,
        "expires_after_s": expires_after_s,
        "idempotency_key": idempotency_key,
        "fingerprint": fingerprint,
        "ttl_s": limits.upload_ttl_s,
    }
    if (await connection.execute(_SQL["insert_upload_if_new"], parameters)).rowcount == 0:
        cursor = await connection.execute(_SQL["read_upload_key"], parameters)
        (upload_id, of_that_time), existed = (await cursor.fetchall())[0], True
        if of_that_time != fingerprint:
            raise IdempotencyConflict(f"{filename}: the idempotency key was used before for an upload that differs")
    return _found(await get_upload(connection, upload_id, owner), upload_id), existed


async def get_upload(
    connection: Connection, upload_id: UUID, owner: str | None, *, now: Now = None
) -> UploadRow | None:
    cursor = await connection.execute(_SQL["read_upload"], {"id": upload_id, "owner": owner, "now": now})
    row = await cursor.fetchone()
    return UploadRow(*row) if row else None


async def cancel_upload(connection: Connection, upload_id: UUID, owner: str | None) -> UploadRow:
    """End an upload without a file. Cancelling twice is the same as once."""
    upload = _found(await get_upload(connection, upload_id, owner), upload_id)
    if upload.status == "pending":
        await _end(connection, "cancel_upload", upload_id)
        upload = _found(await get_upload(connection, upload_id, owner), upload_id)
    if upload.status != "cancelled":
        raise UploadNotPending(upload)
    return upload


async def expire_uploads(connection: Connection, *, now: Now = None) -> int:
    """Give up the parts of uploads that were not completed in time; returns how many uploads."""
    parameters = {"limit": _EXPIRED_AT_ONCE, "grace_s": _COMPLETION_GRACE_S, "now": now}
    expired = await (await connection.execute(_SQL["list_expired_uploads"], parameters)).fetchall()
    for (upload_id,) in expired:
        await _end(connection, "expire_upload", upload_id, now)
    return len(expired)


async def _end(connection: Connection, how: str, upload_id: UUID, now: Now = None) -> None:
    """End an upload unless that is done, and give its parts up. The lock comes first, in a statement of its own: only
    what runs after it sees a part that was added while it waited."""
    async with connection.transaction():
        parameters = {"id": upload_id, "now": now}
        if await (await connection.execute(_SQL["hold_upload_if_open"], parameters)).fetchone():
            await connection.execute(_SQL[how], parameters)
            await connection.execute(_SQL["give_up_parts"], parameters)


def _found(upload: UploadRow | None, upload_id: UUID) -> UploadRow:
    if upload is None:
        raise UploadMissing(f"No such Upload object: {public_id('upload', upload_id)}")
    return upload


# -- parts


class PartWriter:
    """Takes a part's bytes as they arrive. Closing it without `finish` stores nothing.

    Blocks like `FileIntake`. With an idempotency key, the same part sent again is the part of the first time.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        owner: str,
        worker_id: UUID,
        upload_id: UUID,
        limits: IntakeLimits,
        idempotency_key: str | None = None,
        max_stored_bytes: int = 0,
    ) -> None:
        self._part_id = uuid5(upload_id, idempotency_key) if idempotency_key is not None else new_id()
        with sweep.connected(conninfo) as connection:
            self._upload = _pending(connection, upload_id, owner)
            parts = connection.execute(_SQL["read_parts"], {"upload_id": upload_id}).fetchall()
        # A part that is sent again takes the place of the first.
        stored = sum(part[2] for part in parts if part[0] == self._part_id)
        self._max_bytes = min(limits.max_part_bytes, self._upload.bytes)
        filename = self._upload.filename
        if len(parts) >= limits.max_upload_parts or sum(part[2] for part in parts) > _SPARE * self._upload.bytes:
            raise IntakeRefused(
                f"{filename}: the {len(parts):,} parts there are hold more than enough",
                hint="Complete the upload, or cancel it and start again.",
            )
        self._writer = FileWriter(
            conninfo,
            owner=owner,
            worker_id=worker_id,
            filename=filename,
            limits=limits,
            keep_bytes=True,
            max_stored_bytes=max_stored_bytes and max_stored_bytes + stored,
        )
        self._joined = False

    @property
    def held_bytes(self) -> int:
        return self._writer.held_bytes

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        if self._writer.bytes + len(data) > self._max_bytes:
            limit = "max_part_bytes" if self._max_bytes < self._upload.bytes else "the size of the whole upload"
            raise IntakeRefused(f"the part has more than {self._max_bytes:,} bytes ({limit})", code="file_too_large")
        self._writer.take(data)

    def finish(self) -> PartRow:
        """The part is at its end: make it one of the upload's."""
        if not self._writer.bytes:
            raise IntakeRefused("the part is empty", code="invalid_request")
        with self._writer.session() as connection:
            self._writer.take_rest()
            self._writer.flush()
            parameters = {
                "upload_id": self._upload.id,
                "id": self._part_id,
                "file_id": self._writer.file_id,
                "bytes": self._writer.bytes,
                "chunks": self._writer.chunks,
                "digest": self._writer.digest,
            }
            try:
                row = connection.execute(_SQL["add_part_if_pending"], parameters).fetchone()
            except psycopg.errors.UniqueViolation:
                return self._earlier(connection.execute(_SQL["read_part"], parameters).fetchone())
            except psycopg.OperationalError as lost:
                row = self._joined_unheard(lost, parameters)
            if row is None:
                _pending(connection, self._upload.id, self._upload.owner)
                raise given_up(self._upload.filename)
        self._joined = True
        return PartRow(*row[:4])

    def close(self) -> None:
        if not self._joined:
            self._writer.abandon()

    def _earlier(self, row: tuple[Any, ...] | None) -> PartRow:
        if row is None or row[4] != self._writer.digest:
            raise IdempotencyConflict("the idempotency key was used before for a part that differs")
        return PartRow(*row[:4])

    def _joined_unheard(self, lost: psycopg.OperationalError, parameters: dict[str, Any]) -> tuple[Any, ...]:
        """Ask, when the answer was lost. Failing the file waits for a statement still under way."""
        try:
            with self._writer.another_session() as connection:
                sweep.fail(connection, self._writer.file_id)
                row = connection.execute(_SQL["read_part"], parameters).fetchone()
        except psycopg.Error:
            raise lost from None
        if row is None or row[4] != self._writer.digest:
            raise lost
        return row


# -- completing


@dataclass(frozen=True, slots=True)
class CompletedUpload:
    upload: UploadRow
    file: FileRow | None
    """None if it was deleted since."""


class _EndedMeanwhile(Exception):  # noqa: N818 - not an error
    pass


def complete_upload(
    conninfo: str,
    *,
    owner: str,
    worker_id: UUID,
    upload_id: UUID,
    part_ids: Sequence[UUID],
    limits: IntakeLimits,
    md5: str | None = None,
    lifetime_s: Callable[[str, int | None], float | None] = lambda _, asked_s: asked_s,
) -> CompletedUpload:
    """Make one file of the parts, in the order given. Blocks, as long as storing the file once more takes:
    lines cross the borders of parts, which come in any order, so they are read now, from the pieces that were kept.

    An upload that is completed already is answered as it is, so that a client may ask again. `lifetime_s` gives
    the seconds that the file is kept, for the upload's purpose and the seconds it asked for.
    """
    with sweep.connected(conninfo) as connection:
        upload = _read(connection, upload_id, owner)
        if upload.status == "completed":
            return _completed(connection, upload)
        if upload.status != "pending":
            raise UploadNotPending(upload)
        parts = _in_order(connection, upload, part_ids)

        def end(sealing: psycopg.Connection, file_id: UUID) -> None:
            if sealing.execute(_SQL["hold_upload_if_open"], {"id": upload_id}).fetchone() is None:
                raise _EndedMeanwhile
            sealing.execute(_SQL["complete_upload"], {"id": upload_id, "file_id": file_id})
            sealing.execute(_SQL["give_up_parts"], {"id": upload_id})

        sums = hashlib.md5(usedforsecurity=False)
        with FileIntake(
            conninfo,
            owner=upload.owner,
            worker_id=worker_id,
            filename=upload.filename,
            limits=limits,
            purpose=upload.purpose,
            keep_bytes=True,
            keep_problems=True,
            expires_after_s=lifetime_s(upload.purpose, upload.expires_after_s),
        ) as taking:
            try:
                for piece in _pieces(connection, parts):
                    if md5 is not None:
                        sums.update(piece)
                    taking.feed(piece)
                if md5 is not None and md5.lower() != sums.hexdigest():
                    raise IntakeRefused(f"md5: the parts have {sums.hexdigest()}; expected {md5}", param="md5")
                taking.finish(end)
            except _EndedMeanwhile:
                pass
        upload = _read(connection, upload_id, owner)
        if upload.status != "completed":
            raise UploadNotPending(upload)
        return _completed(connection, upload)


def _read(connection: psycopg.Connection, upload_id: UUID, owner: str | None) -> UploadRow:
    row = connection.execute(_SQL["read_upload"], {"id": upload_id, "owner": owner, "now": None}).fetchone()
    return _found(UploadRow(*row) if row else None, upload_id)


def _pending(connection: psycopg.Connection, upload_id: UUID, owner: str) -> UploadRow:
    upload = _read(connection, upload_id, owner)
    if upload.status != "pending":
        raise UploadNotPending(upload)
    return upload


def _completed(connection: psycopg.Connection, upload: UploadRow) -> CompletedUpload:
    row = connection.execute(_SQL["read_file"], {"file_id": upload.file_id, "owner": upload.owner}).fetchone()
    return CompletedUpload(upload, FileRow(*row) if row else None)


_Part = tuple[int, int]
"""Its source, and how many chunks it has."""


def _in_order(connection: psycopg.Connection, upload: UploadRow, part_ids: Sequence[UUID]) -> list[_Part]:
    rows = connection.execute(_SQL["read_parts"], {"upload_id": upload.id}).fetchall()
    known = {row[0]: row[1:] for row in rows}
    for part_id in part_ids:
        if part_id not in known:
            raise IntakeRefused(f"part_ids: the upload has no part {public_id('part', part_id)}", param="part_ids")
    if len(set(part_ids)) < len(part_ids):
        raise IntakeRefused("part_ids: a part is named twice", param="part_ids")
    found = sum(known[part_id][1] for part_id in part_ids)
    if found != upload.bytes:
        message = f"part_ids: the parts have {found:,} bytes together; expected {upload.bytes:,}"
        raise IntakeRefused(message, param="part_ids")
    return [(known[part_id][0], known[part_id][2]) for part_id in part_ids]


def _pieces(connection: psycopg.Connection, parts: Sequence[_Part]) -> Iterator[bytes]:
    for source_id, chunks in parts:
        for chunk in range(chunks):
            keep_pace()
            place = {"source_id": source_id, "chunk": chunk}
            row = connection.execute(_SQL["read_chunk"], place, binary=True).fetchone()
            if row is None:
                raise _EndedMeanwhile
            yield unpack_piece(*row)
