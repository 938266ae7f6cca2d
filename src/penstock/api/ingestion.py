"""Files that adapters find: scan for them now, and see what became of them."""

from __future__ import annotations

import asyncio
from datetime import datetime
from time import monotonic
from typing import Annotated, Literal

import msgspec

from penstock.adapters import files
from penstock.adapters.config import Adapter
from penstock.api.endpoint import Call, Endpoint, Nothing
from penstock.api.errors import ApiError
from penstock.api.multipart import invalid
from penstock.backoff import Backoff
from penstock.db.pool import borrowed
from penstock.model import parse_id, public_id

_TAKE_AT_ONCE = 100
_FIRST_WAIT_S, _LAST_WAIT_S = 0.05, 1.0


class _Camel(msgspec.Struct, rename="camel", kw_only=True):
    """Struct whose fields are camelCase on the wire."""


class TakenFile(_Camel):
    path: str
    job_id: str


class SetAsideFile(_Camel):
    path: str
    reason: str


class AdapterScan(_Camel):
    adapter: str
    found: int
    """Files that match the pattern, whether new or not."""
    taken: list[TakenFile]
    set_aside: list[SetAsideFile]
    settling: int
    """New files that may not be complete yet."""
    more: bool
    """More is to be taken: the server goes on by itself."""
    problem: str | None


class Scan(_Camel):
    adapters: list[AdapterScan]


class IngestedFile(_Camel):
    id: str
    adapter: str
    path: str
    version: str
    bytes: int
    owner: str
    job_id: str | None
    """None if the file was set aside."""
    reason: str | None
    """Why it was set aside."""
    recorded_at: datetime


class IngestedFiles(_Camel):
    files: list[IngestedFile]
    next: str | None


class FilesQuery(msgspec.Struct):
    after: str | None = None
    user_id: Literal["me", "all"] = msgspec.field(default="me", name="userId")
    page_size: Annotated[int, msgspec.Meta(ge=1, le=100)] = msgspec.field(default=20, name="pageSize")


async def scan(call: Call[None, Nothing | None]) -> Scan:
    """Scan all adapters, each as soon as no other server is scanning it."""
    scanned = call.server.background.scans.scanned
    return Scan(adapters=list(await asyncio.gather(*(_scan(call, adapter) for adapter in scanned))))


async def _scan(call: Call[None, Nothing | None], adapter: Adapter) -> AdapterScan:
    server = call.server
    backoff, until = Backoff(_FIRST_WAIT_S, _LAST_WAIT_S), monotonic() + server.config.scan.scan_timeout_s
    while (report := await server.background.scan(adapter.name, _TAKE_AT_ONCE)) is None:
        if monotonic() > until:
            problem = "another server is still scanning it"
            return AdapterScan(
                adapter=adapter.name, found=0, taken=[], set_aside=[], settling=0, more=True, problem=problem
            )
        await backoff.wait()
    return AdapterScan(
        adapter=adapter.name,
        found=report.found,
        taken=[TakenFile(path=path, job_id=public_id("job", job_id)) for path, job_id in report.taken],
        set_aside=[SetAsideFile(path=path, reason=reason) for path, reason in report.set_aside],
        settling=report.settling,
        more=report.more,
        problem=report.problem,
    )


async def list_files(call: Call[FilesQuery, None]) -> IngestedFiles:
    """Files that were taken or set aside, newest first: the caller's, or everybody's for an admin that asks for it."""
    query = call.query
    if query.user_id == "all" and call.caller.role != "admin":
        raise ApiError(403, "Only an admin sees everybody's files.", param="userId", code="forbidden")
    after = None
    if query.after is not None and (after := parse_id("ingested", query.after)) is None:
        raise invalid("after", "expected the 'next' of the page before.")
    owner = None if query.user_id == "all" else call.caller.owner
    async with borrowed(call.database) as connection:
        rows = await files.list_files(connection, owner=owner, after=after, limit=query.page_size + 1)
    page = rows[: query.page_size]
    return IngestedFiles(
        files=[
            IngestedFile(
                id=public_id("ingested", row.id),
                adapter=row.adapter,
                path=row.path,
                version=row.version,
                bytes=row.bytes,
                owner=row.owner,
                job_id=None if row.batch_id is None else public_id("job", row.batch_id),
                reason=row.problem,
                recorded_at=row.recorded_at,
            )
            for row in page
        ],
        next=public_id("ingested", page[-1].id) if len(rows) > query.page_size else None,
    )


ENDPOINTS = (
    Endpoint("POST", "/api/ingestion/scan", scan, "Look for new files now.", role="admin", name="scan_for_files"),
    Endpoint(
        "GET",
        "/api/ingestion/files",
        list_files,
        "List files that were found.",
        name="list_ingested_files",
        errors=(403,),
    ),
)
