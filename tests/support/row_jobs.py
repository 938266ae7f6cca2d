"""Jobs made straight in SQL, for tests that do not care about uploads."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from uuid import UUID, uuid4

from penstock.batches.jobs import insert_job
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db.pool import Connection, Now
from penstock.model import Again, Lease, Outcome
from penstock.settle.write import Changes, settle
from tests.support.db import one
from tests.support.engine import claim_due

POOL = "rows"
ROUTE = "price"


async def make_job(
    connection: Connection,
    rows: int,
    *,
    owner: str = "ann",
    job_type: str = "prices",
    created_at: datetime | None = None,
) -> tuple[UUID, int]:
    """A job of so many rows, all of them stored: its batch and its lane."""
    batch_id, file_id = uuid4(), uuid4()
    values = {"batch": batch_id, "file": file_id, "owner": owner, "rows": rows, "at": created_at, "pool": POOL}
    (source,) = await one(
        connection,
        "INSERT INTO penstock.files (id, owner, filename, purpose, worker_id, created_at, lines, state, sealed_at)"
        " VALUES (%(file)s, %(owner)s, 'rows.csv', 'job', gen_random_uuid(), now(), %(rows)s, 'ready', now())"
        " RETURNING source_id",
        values,
    )
    values |= {"source": source, "route": ROUTE}
    await connection.execute(
        "INSERT INTO penstock.file_lanes VALUES (%(source)s, 0, %(route)s, 'rows', greatest(1, %(rows)s))", values
    )
    await connection.execute(
        "INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, summary, body)"
        " SELECT %(source)s, 0, n, n + 1, n + 1, 'Chair ' || n + 1,"
        '        convert_to(format(\'{"row": {"sku": %%s}, "raw": ["%%s"]}\', n + 1, n + 1), \'UTF8\')'
        "   FROM generate_series(0, %(rows)s - 1) AS n",
        values,
    )
    await connection.execute(
        "INSERT INTO penstock.batches (id, owner, dialect, file_id, pool, total, created_at, validated_at)"
        " VALUES (%(batch)s, %(owner)s, 'job', %(file)s, %(pool)s, %(rows)s, coalesce(%(at)s, now()), now())",
        values,
    )
    (lane,) = await one(
        connection,
        "INSERT INTO penstock.lanes (batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, total,"
        "  tag)"
        " VALUES (%(batch)s, %(owner)s, coalesce(%(at)s, now()), %(pool)s, %(route)s, 'rows', %(source)s, 0, %(rows)s,"
        "  0)"
        " RETURNING id",
        values,
    )
    await insert_job(
        connection, batch_id, owner=owner, job_type=job_type, spec={}, client="", columns=["sku"], ingested=True
    )
    return batch_id, lane


async def make_worker(connection: Connection) -> UUID:
    worker_id = uuid4()
    await liveness.register(connection, worker_id, POOL)
    return worker_id


async def claim_rows(connection: Connection, worker_id: UUID, want: int, *, now: Now = None) -> list[Lease]:
    """Lease so many rows, of whichever job has its turn."""
    return await claim_due(connection, pool=POOL, wants={ROUTE: want}, worker_id=worker_id, taper_floor=want, now=now)


def rows_of(leases: list[Lease]) -> list[tuple[Lease, int]]:
    return [(lease, ordinal) for lease in leases for ordinal in claims.first_ordinals(lease.ranges, 1_000_000)]


async def settle_rows(
    connection: Connection,
    worker_id: UUID,
    leases: list[Lease],
    verdict: Callable[[int], Outcome | Again | None],
    *,
    now: Now = None,
) -> None:
    """Settle leased rows as the verdict on each ordinal says; None gives the row back."""
    changes = Changes()
    for lease, ordinal in rows_of(leases):
        told = verdict(ordinal)
        if told is None:
            changes.give_back(lease, [(ordinal, ordinal + 1)])
        elif isinstance(told, Again):
            changes.agains.append((lease, ordinal, told))
        else:
            changes.outcomes.append((lease, ordinal, ordinal + 1, str(ordinal + 1), told))
    await settle(connection, worker_id, changes, now=now)
