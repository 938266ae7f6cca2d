"""Batches that grow while they run: a job that is still being read, or work that its own processor discovers.

Such a batch has a file of its own, which grows with it. Inputs are stored and the totals moved in one transaction,
under the batch's lock; the batch cannot complete before it is sealed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from penstock.batches.finish import finish_batch
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.errors import PenstockError
from penstock.model import new_id

_SQL = sql.load("penstock.batches", "growth.sql")


class NewInput(NamedTuple):
    """One input to be added."""

    route: str
    endpoint: str
    custom_id: str
    body: bytes
    summary: str | None = None


class NotGrowing(PenstockError):  # noqa: N818 - what it is
    """The batch takes no more inputs: it was sealed, it is being cancelled, it has ended, or there is none."""


async def create_growing_batch(
    connection: Connection,
    *,
    owner: str,
    pool: str,
    filename: str,
    key: str | None = None,
    metadata: dict[str, str] | None = None,
    priority: int = 0,
    deadline: datetime | None = None,
    now: Now = None,
) -> UUID:
    """Create a batch without inputs, and the file that will hold them."""
    batch_id = new_id()
    parameters = {
        "id": batch_id,
        "file_id": new_id(),
        "owner": owner,
        "pool": pool,
        "filename": filename,
        "key": key,
        "metadata": json.dumps(metadata or {}),
        "priority": priority,
        "deadline": deadline,
        "now": now,
    }
    await connection.execute(_SQL["create_growing_batch"], parameters)
    return batch_id


class Growing(NamedTuple):
    """A batch that this transaction has locked to add inputs to it."""

    source_id: int
    total: int
    lanes: dict[tuple[str, str], tuple[int, int]]
    """Source lane and total, by (route, endpoint)."""


async def grow_batch(connection: Connection, batch_id: UUID, inputs: Sequence[NewInput], *, now: Now = None) -> int:
    """Add inputs, in this order, all or none; returns the batch's new total. Others who add to the same batch wait."""
    async with connection.transaction():
        growing = await hold_growing(connection, batch_id, now=now)
        added = Counter((one.route, one.endpoint) for one in inputs)
        for place in added:
            growing.lanes.setdefault(place, (len(growing.lanes), 0))
        await store_inputs(connection, growing, inputs)
        await move_totals(connection, batch_id, growing, added, sum(len(one.body) for one in inputs), now=now)
    return growing.total + len(inputs)


async def hold_growing(connection: Connection, batch_id: UUID, *, sealed_too: bool = False, now: Now = None) -> Growing:
    """Lock a batch that takes more inputs, and its file, until the end of the transaction. Raises NotGrowing.

    With `sealed_too`, one that runs and is sealed takes more: those that its own processors discover.
    """
    file = await (await connection.execute(_SQL["hold_file_of_batch"], {"id": batch_id})).fetchone()
    if file is not None:
        parameters = {"id": batch_id, "file_id": file[0], "sealed_too": sealed_too, "now": now}
        row = await (await connection.execute(_SQL["hold_if_growing"], parameters)).fetchone()
        if row is not None:
            cursor = await connection.execute(_SQL["list_file_lanes"], {"source_id": file[1]})
            lanes = {(route, endpoint): (lane, filled) for lane, route, endpoint, filled in await cursor.fetchall()}
            return Growing(file[1], row[0], lanes)
    raise NotGrowing(
        f"batch {batch_id} takes no more inputs", hint="It was sealed, cancelled or deleted, or its time is up."
    )


async def move_totals(
    connection: Connection,
    batch_id: UUID,
    growing: Growing,
    added: Mapping[tuple[str, str], int],
    added_bytes: int,
    *,
    width: int | None = None,
    now: Now = None,
) -> None:
    """Move the totals of a batch and its lanes past inputs that this transaction has stored beyond them. A new lane
    lets `width` of its inputs be in flight; None for any number."""
    await connection.execute(
        _SQL["grow_if_held"],
        {
            "id": batch_id,
            "source_id": growing.source_id,
            "lanes": [growing.lanes[place][0] for place in added],
            "routes": [route for route, _ in added],
            "endpoints": [endpoint for _, endpoint in added],
            "counts": list(added.values()),
            "bytes": added_bytes,
            "width": width,
            "now": now,
        },
    )


async def store_inputs(connection: Connection, growing: Growing, inputs: Sequence[NewInput]) -> None:
    """Store inputs beyond the totals of a batch that this transaction has locked."""
    seen: Counter[tuple[str, str]] = Counter()
    places: list[tuple[int, int]] = []
    for one in inputs:
        place = (one.route, one.endpoint)
        lane, filled = growing.lanes[place]
        places.append((lane, filled + seen[place]))
        seen[place] += 1
    await connection.execute(
        _SQL["add_templates"],
        {
            "source_id": growing.source_id,
            "lanes": [lane for lane, _ in places],
            "ordinals": [ordinal for _, ordinal in places],
            "lines": list(range(growing.total + 1, growing.total + 1 + len(inputs))),
            "custom_ids": [one.custom_id for one in inputs],
            "summaries": [one.summary for one in inputs],
            "bodies": [one.body for one in inputs],
        },
    )


async def read_discovered(
    connection: Connection, batch_id: UUID, growing: Growing, keys: Collection[str]
) -> tuple[int, list[str], set[str]] | None:
    """Read how many rows were added to a job by its processors, its columns, and which of some keys there are already.
    None if the batch is no job."""
    row = await fetch_one(connection, _SQL["read_discovered"], {"id": batch_id})
    if row is None:
        return None
    where = {"source_id": growing.source_id, "keys": list(keys)}
    known = await (await connection.execute(_SQL["find_row_keys"], where)).fetchall()
    return row[0], row[1], {key for (key,) in known}


async def count_discovered(
    connection: Connection, batch_id: UUID, growing: Growing, keys: Sequence[str], start: int, columns: Sequence[str]
) -> None:
    """Count rows that this transaction has added to a job from the ordinal `start` on, under their keys."""
    ordinals = list(range(start, start + len(keys)))
    named = {"source_id": growing.source_id, "keys": list(keys), "ordinals": ordinals}
    await connection.execute(_SQL["add_row_keys"], named)
    counted = {"id": batch_id, "rows": len(keys), "columns": list(columns)}
    await connection.execute(_SQL["count_discovered"], counted)


async def seal_batch(connection: Connection, batch_id: UUID, *, now: Now = None) -> bool:
    """Seal the batch: no more inputs will come, and it may complete from now on. False if it was not growing."""
    if await (await connection.execute(_SQL["seal_if_growing"], {"id": batch_id})).fetchone() is None:
        return False
    await finish_batch(connection, batch_id, now=now)
    return True
