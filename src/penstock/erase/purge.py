"""Purge: rows of deleted objects leave the tables, some at a time, by every server at once, until none is left."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from penstock.blobs.blobs import Place, erase_images, run_steps
from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.erase", "erase.sql")

Kind = Literal["file", "batch", "output", "errors", "upload", "message_batch", "message_batch_results", "session"]

_LAST = UUID(int=2**128 - 1)
_FIRST = UUID(int=0)

# A step is short even if every stretch it takes is empty.
_STRETCHES_PER_STEP = 100
_FINISHED_AT_ONCE = 100
# Images are large: so many other rows are deleted in the time of one.
_ROWS_PER_IMAGE = 100


@dataclass(frozen=True, slots=True)
class Erasure:
    """Report of one deletion: what was asked for and how many rows have been deleted. It holds no deleted data."""

    id: UUID
    owner: str
    kind: Kind
    object_id: UUID
    requested_at: datetime
    finished_at: datetime | None
    """Time from which no row of it was left."""
    templates: int
    chunks: int
    outcomes: int
    attempts: int
    others: int


async def purge_step(connection: Connection, rows: int, *, now: Now = None) -> int:
    """Delete about `rows` rows of deleted objects, each stretch in a transaction of its own.

    Returns how many were deleted, at least 1 if there may be more to do; 0 if nothing is left but stretches that other
    processes are deleting.
    """
    left, moved, after = rows, False, 0
    for _ in range(_STRETCHES_PER_STEP):
        if left <= 0:
            break
        taken = await _take_stretch(connection, after, left, now)
        if taken is None:
            cursor = await connection.execute(_SQL["list_emptied"], {"limit": _FINISHED_AT_ONCE})
            for (erasure_id,) in await cursor.fetchall():
                await _finish(connection, erasure_id, now)
                moved = True  # if it could not be finished just now, there is more to do
            break
        left, moved = left - taken.erased, True
        if not taken.went_on:
            after = taken.id
    return max(rows - left, int(moved))


async def list_erasures(
    connection: Connection, owner: str | None, after: UUID | None = None, limit: int = 20
) -> list[Erasure]:
    """List erasure reports, newest first; everybody's if no owner is named."""
    return await _read(connection, owner, _FIRST, after or _LAST, limit)


async def get_erasure(connection: Connection, erasure_id: UUID, owner: str | None) -> Erasure | None:
    found = await _read(connection, owner, erasure_id, UUID(int=min(erasure_id.int + 1, _LAST.int)), 1)
    return found[0] if found else None


async def _read(connection: Connection, owner: str | None, start: UUID, below: UUID, limit: int) -> list[Erasure]:
    parameters = {"owner": owner, "from": start, "below": below, "limit": limit}
    cursor = await connection.execute(_SQL["read_erasures"], parameters)
    return [Erasure(*row) for row in await cursor.fetchall()]


@dataclass(frozen=True, slots=True)
class _Taken:
    id: int
    erased: int
    went_on: bool
    """False if another transaction holds the stretch's next rows: it is left for another time."""


async def _take_stretch(connection: Connection, after: int, rows: int, now: Now) -> _Taken | None:
    """Delete the next rows of a stretch that no other process holds; None if there is no such stretch."""
    async with connection.transaction():
        row = await (await connection.execute(_SQL["take_piece"], {"after": after})).fetchone()
        if row is None:
            return None
        piece_id, erasure_id, what, key, batch_id, source_lane, start, total = row
        if what == "blobs":
            images = max(1, rows // _ROWS_PER_IMAGE)
            next_, erased = await run_steps(connection, erase_images(Place(key, source_lane), start, total, images))
        else:
            place: dict[str, Any] = {"key": key, "batch_id": batch_id, "source_lane": source_lane}
            bounds = {"next": start, "total": total, "rows": rows}
            done = await (await connection.execute(_SQL[f"erase_{what}"], place | bounds)).fetchone()
            next_, erased = done if done else (total, 0)
        await connection.execute(_SQL["advance_piece"], {"id": piece_id, "next": next_, "erased": erased})
    if next_ >= total:
        # Another replica may be deleting another stretch of it: then that replica finishes it, or the next step does.
        await _finish(connection, erasure_id, now)
    return _Taken(piece_id, int(erased), bool(erased) or next_ > start)


async def _finish(connection: Connection, erasure_id: UUID, now: Now) -> None:
    await connection.execute(_SQL["finish_erasure_if_empty"], {"id": erasure_id, "now": now})
