"""Sealed files: one, a page of them, and the bytes as they were uploaded."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Lender, borrowed
from penstock.errors import PenstockError
from penstock.intake.pieces import unpack_piece

MESSAGE_BATCH: Final = "message_batch"
"""Purpose of the file behind a message batch: deleted with its batch, never listed."""

_NEWEST, _OLDEST = UUID(int=2**128 - 1), UUID(int=0)
_SQL = sql.load("penstock.intake", "intake.sql")
_LISTS = {
    (False, False): "list_files_before",
    (False, True): "list_files_after",
    (True, False): "list_files_of_purpose_before",
    (True, True): "list_files_of_purpose_after",
}
"""By whether a purpose is asked for, and whether the oldest come first."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """A sealed file: something uploaded (`input`), or a batch's results (`output`, `errors`)."""

    id: UUID
    owner: str
    source_id: int
    filename: str
    purpose: str
    kind: str
    batch_id: UUID | None
    bytes: int
    """As it was sent, before decompression."""
    lines: int
    chunks: int
    created_at: datetime
    expires_at: datetime | None
    problems: list[dict[str, Any]] | None
    """Why no batch can run over it: code, line, message, param."""
    digest: builtins.bytes | None


class ContentGone(PenstockError):  # noqa: N818 - what became of it
    """The bytes are not there any more, or never were: the file was deleted meanwhile, or not uploaded."""


async def get_file(connection: Connection, file_id: UUID, owner: str | None) -> FileRow | None:
    """The file, if that owner has it; any owner's if none is named."""
    cursor = await connection.execute(_SQL["read_file"], {"file_id": file_id, "owner": owner})
    row = await cursor.fetchone()
    file = FileRow(*row) if row else None
    return None if file is None or file.purpose == MESSAGE_BATCH else file


async def list_files(
    connection: Connection,
    *,
    owner: str,
    purpose: str | None = None,
    after: UUID | None = None,
    limit: int,
    ascending: bool = False,
) -> list[FileRow]:
    """The next page: `after` need not exist any more."""
    if purpose == MESSAGE_BATCH:
        return []
    name = _LISTS[purpose is not None, ascending]
    start = after or (_OLDEST if ascending else _NEWEST)
    parameters = {"owner": owner, "purpose": purpose, "after": start, "limit": limit}
    cursor = await connection.execute(_SQL[name], parameters, binary=True)
    return [FileRow(*row) for row in await cursor.fetchall()]


async def content(database: Lender, file: FileRow) -> AsyncGenerator[bytes, None]:
    """The bytes as they were uploaded, piece by piece. No connection is held between two pieces."""
    if file.bytes and not file.chunks:
        raise ContentGone(f"{file.filename}: its bytes were not kept")
    for chunk in range(file.chunks):
        async with borrowed(database) as connection:
            place = {"source_id": file.source_id, "chunk": chunk}
            row = await (await connection.execute(_SQL["read_chunk"], place, binary=True)).fetchone()
        if row is None:
            raise ContentGone(f"{file.filename}: was deleted while it was read")
        yield unpack_piece(*row)
