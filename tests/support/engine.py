"""Files and batches made straight in SQL, for tests of the engine that do not care about intake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID, uuid4

from penstock.batches.create import create_batch
from penstock.batches.read import Batch, read_status
from penstock.batches.upkeep import fold_progress, hold_strays
from penstock.claim import claim as claims
from penstock.db.pool import Connection, Now, Pool
from penstock.model import Lease


async def make_file(connection: Connection, totals: Sequence[int], *, body: bytes = b"{}", now: Now = None) -> UUID:
    """A sealed file with one lane per entry of `totals`, lines interleaved as they would be in a file."""
    file_id = uuid4()
    cursor = await connection.execute(
        "INSERT INTO penstock.files (id, owner, filename, worker_id, created_at, lines, state, sealed_at)"
        " VALUES (%s, 'local', 'made.jsonl', %s, coalesce(%s, now()), %s, 'ready', now()) RETURNING source_id",
        [file_id, uuid4(), now, sum(totals)],
    )
    row = await cursor.fetchone()
    assert row is not None
    for lane, total in enumerate(totals):
        await connection.execute(
            "INSERT INTO penstock.file_lanes VALUES (%s, %s, %s, '/v1/chat/completions', %s)",
            [row[0], lane, f"model-{lane}", total],
        )
        await connection.execute(
            "INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, body)"
            " SELECT %(s)s, %(l)s, n, n * %(k)s + %(l)s + 1, %(l)s || '-' || n, %(b)s"
            "   FROM generate_series(0, %(n)s - 1) AS n",
            {"s": row[0], "l": lane, "n": total, "k": len(totals), "b": body},
        )
    return file_id


async def make_batch(
    connection: Connection,
    totals: Sequence[int],
    *,
    pool: str = "test",
    width: int | None = None,
    body: bytes = b"{}",
    now: Now = None,
) -> UUID:
    """A batch over a file of its own; with a width, its lanes let so many items run at a time."""
    file_id = await make_file(connection, totals, body=body, now=now)
    batch_id = await create_batch(connection, file_id=file_id, owner="local", pool=pool, now=now)
    if width is not None:
        await connection.execute("UPDATE penstock.lanes SET width = %s WHERE batch_id = %s", [width, batch_id])
    return batch_id


async def claim_due(
    connection: Connection,
    *,
    pool: str,
    wants: Mapping[str, int],
    worker_id: UUID,
    taper_floor: int = 1,
    suspect_ok: bool = True,
    now: Now = None,
) -> list[Lease]:
    """Lease up to `wants[route]` ordinals of each route, from all that is due; at most one suspect, and none unless
    `suspect_ok`."""
    await claims.line_up(connection, pool=pool, routes=wants, now=now)
    claimed = await claims.claim_in_line(
        connection,
        pool=pool,
        wants=wants,
        worker_id=worker_id,
        look=max(wants.values()),
        taper_floor=taper_floor,
        suspect_ok=suspect_ok,
        now=now,
    )
    return claimed.leases


def count_leased(leases: Iterable[Lease]) -> int:
    """How many ordinals these leases hold."""
    return sum(stop - start for lease in leases for start, stop in lease.ranges)


async def until(pool: Pool, batch_id: UUID, condition: Callable[[Batch], bool]) -> Batch:
    """The batch's status as soon as the condition holds."""
    async with asyncio.timeout(60):
        while True:
            async with pool.connection() as connection:
                status = await read_status(connection, batch_id)
            if condition(status):
                return status
            await asyncio.sleep(0.01)


async def tidy(connection: Connection, *ids: UUID) -> None:
    """What a round of housekeeping does for some batches, but for ending them."""
    await fold_progress(connection, ids)
    await hold_strays(connection, ids)
