"""Files that adapters found: which are new, since when they are as they are, and what became of each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from penstock.adapters.source import FoundFile
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.model import new_id

_SQL = sql.load("penstock.adapters", "files.sql")
_LAST = UUID(int=2**128 - 1)
_MAX_PROBLEM_CHARS = 2_000


class IngestedFile(NamedTuple):
    """One version of a file: a job was made of it, or it was set aside."""

    id: UUID
    adapter: str
    path: str
    version: str
    bytes: int
    owner: str
    batch_id: UUID | None
    """The job; None if it was set aside."""
    problem: str | None
    """Why it was set aside."""
    recorded_at: datetime


async def sight_files(
    connection: Connection, adapter: str, files: Sequence[FoundFile], *, now: Now = None
) -> list[tuple[FoundFile, float]]:
    """Find the new among listed files, each with the seconds for which it has stayed the same."""
    listed = {(file.path, file.version): file for file in files}
    parameters = {
        "adapter": adapter,
        "paths": [file.path for file in files],
        "versions": [file.version for file in files],
        "now": now,
    }
    rows = await (await connection.execute(_SQL["sight_files_if_new"], parameters)).fetchall()
    return [(listed[path, version], seconds) for path, version, seconds in rows]


async def read_time(connection: Connection) -> datetime:
    """The database's clock, by which a scan begins."""
    row = await fetch_one(connection, _SQL["read_time"], {})
    if row is None:
        raise AssertionError("SELECT always answers one row")
    moment: datetime = row[0]
    return moment


async def forget_unseen(connection: Connection, adapter: str, began: datetime) -> None:
    """Forget files that were not seen since a scan began."""
    await connection.execute(_SQL["forget_unseen"], {"adapter": adapter, "began": began})


def record_taken(connection: psycopg.Connection, adapter: str, owner: str, file: FoundFile, batch_id: UUID) -> bool:
    """Record the job of a file, in the transaction that makes it. False if that version has one: make none then."""
    recorded = connection.execute(_SQL["record_file_if_new"], _record(adapter, owner, file, batch_id, None))
    return recorded.fetchone() is not None


async def set_aside(connection: Connection, adapter: str, owner: str, file: FoundFile, problem: str) -> bool:
    """Record why a file is not taken: that version is not tried again. False if it has a record."""
    return (
        await fetch_one(connection, _SQL["record_file_if_new"], _record(adapter, owner, file, None, problem))
        is not None
    )


def _record(adapter: str, owner: str, file: FoundFile, batch_id: UUID | None, problem: str | None) -> dict[str, Any]:
    return {
        "id": new_id(),
        "adapter": adapter,
        "path": file.path,
        "version": file.version,
        "bytes": file.size,
        "owner": owner,
        "batch_id": batch_id,
        # A text of the database has no NUL, which a message may quote.
        "problem": None if problem is None else problem.replace("\0", "\\0")[:_MAX_PROBLEM_CHARS],
        "now": None,
    }


async def list_files(
    connection: Connection, *, owner: str | None, after: UUID | None, limit: int
) -> list[IngestedFile]:
    """A page of what was taken and set aside, newest first: an owner's, or everybody's."""
    statement = _SQL["list_files" if owner is None else "list_files_of_owner"]
    parameters = {"owner": owner, "below": after or _LAST, "limit": limit}
    return [IngestedFile(*row) for row in await (await connection.execute(statement, parameters)).fetchall()]
