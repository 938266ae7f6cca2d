"""Leftovers of jobs: what servers that know nothing of jobs leave when they finish the erasure of one.

There is no list of them. A walk looks at everything that may be one, a page at a time, and begins anew at its end.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from penstock.blobs.blobs import Place, erase_images, run_steps
from penstock.db import sql
from penstock.db.pool import Connection, fetch_one

_SQL = sql.load("penstock.erase", "leftovers.sql")

_PAGE = 200
_FIRST = UUID(int=0)
_BEYOND = 2**31 - 1
_KEYED_SOURCES = 20
_IMAGES_PER_STEP = 10


class LeftoverWalk:
    """Walk over jobs and uploads, with the places that it has reached."""

    def __init__(self) -> None:
        self._jobs = self._uploads = _FIRST
        self._keyed = self._images = 0

    async def step(self, connection: Connection, rows: int) -> int:
        """Look at the next page of each kind, and delete what nothing belongs to any more, about `rows` rows at a time.
        Returns how many objects were left over."""
        jobs, self._jobs = await _check(connection, "list_jobs_to_check", self._jobs, _FIRST)
        for batch_id, *_ in jobs:
            await _repeat(connection, "erase_errors_of_job", {"batch_id": batch_id, "limit": rows})
            await connection.execute(_SQL["erase_job_if_gone"], {"batch_id": batch_id})
        uploads, self._uploads = await _check(connection, "list_uploads_to_check", self._uploads, _FIRST)
        for file_id, *_ in uploads:
            await connection.execute(_SQL["erase_upload_if_deleted"], {"id": file_id})
        keyed, self._keyed = await _check_keys(connection, self._keyed)
        for source_id in keyed:
            await _repeat(connection, "erase_row_keys", {"source_id": source_id, "limit": rows})
        images, self._images = await _check(connection, "list_image_sources_to_check", self._images, 0)
        freed = [await _erase_images(connection, Place(source_id, lane)) for source_id, _, lane in images]
        return len(jobs) + len(uploads) + len(keyed) + sum(freed)


async def _check(connection: Connection, name: str, after: Any, first: Any) -> tuple[list[tuple[Any, ...]], Any]:
    """Those of the next page that are left over, and the place to go on from."""
    page = await (await connection.execute(_SQL[name], {"after": after, "limit": _PAGE})).fetchall()
    return [row for row in page if row[1]], page[-1][0] if len(page) == _PAGE else first


async def _check_keys(connection: Connection, after: int) -> tuple[list[int], int]:
    """The same for sources that have keys of rows. Keys may lie on other nodes than files: they are read apart."""
    sources: list[int] = []
    while len(sources) < _KEYED_SOURCES:
        found = await fetch_one(connection, _SQL["find_next_keyed_source"], {"after": after})
        after = 0 if found is None else found[0]
        if found is None:
            break
        sources.append(after)
    cursor = await connection.execute(_SQL["list_files_of_sources"], {"sources": sources})
    there = {source_id for (source_id,) in await cursor.fetchall()}
    return [source_id for source_id in sources if source_id not in there], after


async def _repeat(connection: Connection, name: str, parameters: dict[str, Any]) -> None:
    while (await connection.execute(_SQL[name], parameters)).rowcount == parameters["limit"]:
        pass


async def _erase_images(connection: Connection, place: Place) -> bool:
    """Delete a lane's uses of images, as far as no other transaction has one. Returns whether any was deleted."""
    next_, uses = 0, 0
    while next_ < _BEYOND:
        async with connection.transaction():
            erased = await run_steps(connection, erase_images(place, next_, _BEYOND, _IMAGES_PER_STEP))
        if not erased.uses:
            break
        next_, uses = erased.next, uses + erased.uses
    return uses > 0
