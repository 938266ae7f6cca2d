"""Leftovers of jobs, error groups and samples: what servers that know nothing of them leave when they finish a batch's
erasure. A worker may also have appended samples while their batch was being erased.

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
_PROBES = 20
_IMAGES_PER_STEP = 10


class LeftoverWalk:
    """Walk over jobs, error groups, uploads and samples, with the places that it has reached."""

    def __init__(self) -> None:
        self._jobs = self._failed = self._uploads = self._sampled = _FIRST
        self._keyed = self._images = 0

    async def step(self, connection: Connection, rows: int) -> int:
        """Look at the next page of each kind, and delete what nothing belongs to any more, about `rows` rows at a time.
        Returns how many objects were left over."""
        jobs, self._jobs = await _check(connection, "list_jobs_to_check", self._jobs, _FIRST)
        for batch_id, *_ in jobs:
            await connection.execute(_SQL["erase_job_if_gone"], {"batch_id": batch_id})
        names = ("find_next_batch_with_errors", "list_batches_there", "batches")
        failed, self._failed = await _check_apart(connection, *names, self._failed, _FIRST)
        for batch_id in failed:
            await _repeat(connection, "erase_errors_of_batch", {"batch_id": batch_id, "limit": rows})
        uploads, self._uploads = await _check(connection, "list_uploads_to_check", self._uploads, _FIRST)
        for file_id, *_ in uploads:
            await connection.execute(_SQL["erase_upload_if_deleted"], {"id": file_id})
        names = ("find_next_sampled_batch", "list_batches_there", "batches")
        sampled, self._sampled = await _check_apart(connection, *names, self._sampled, _FIRST)
        for batch_id in sampled:
            await _repeat(connection, "erase_samples_of_batch", {"batch_id": batch_id, "limit": rows})
        names = ("find_next_keyed_source", "list_files_of_sources", "sources")
        keyed, self._keyed = await _check_apart(connection, *names, self._keyed, 0)
        for source_id in keyed:
            await _repeat(connection, "erase_row_keys", {"source_id": source_id, "limit": rows})
        images, self._images = await _check(connection, "list_image_sources_to_check", self._images, 0)
        freed = [await _erase_images(connection, Place(source_id, lane)) for source_id, _, lane in images]
        return len(jobs) + len(failed) + len(uploads) + len(sampled) + len(keyed) + sum(freed)


async def _check(connection: Connection, name: str, after: Any, first: Any) -> tuple[list[tuple[Any, ...]], Any]:
    """Those of the next page that are left over, and the place to go on from."""
    page = await (await connection.execute(_SQL[name], {"after": after, "limit": _PAGE})).fetchall()
    return [row for row in page if row[1]], page[-1][0] if len(page) == _PAGE else first


async def _check_apart(
    connection: Connection, find_next: str, list_there: str, keys: str, after: Any, first: Any
) -> tuple[list[Any], Any]:
    """The same for keys of rows that may lie on other nodes than what they belong to: the two are read apart."""
    found: list[Any] = []
    while len(found) < _PROBES:
        row = await fetch_one(connection, _SQL[find_next], {"after": after})
        after = first if row is None else row[0]
        if row is None:
            break
        found.append(after)
    cursor = await connection.execute(_SQL[list_there], {keys: found})
    there = {key for (key,) in await cursor.fetchall()}
    return [key for key in found if key not in there], after


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
