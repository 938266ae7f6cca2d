"""Batches: one run over one file. Nothing here depends on how many lines the file has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID, uuid4

from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.errors import PenstockError
from penstock.model import BatchState, Counts

_SQL = sql.load("penstock.work", "work.sql")

# A fold touches at most this many deltas, so that it stays a short statement however far behind it is.
_FOLD_LIMIT = 1_000


@dataclass(frozen=True, slots=True)
class Status:
    """A batch at one instant."""

    id: UUID
    state: BatchState
    created_at: datetime
    target: str | None
    ended_at: datetime | None
    counts: Counts


@dataclass(frozen=True, slots=True)
class KnownBatch:
    """A batch found by the key it was made under."""

    id: UUID
    state: BatchState
    total: int
    pool: str
    file_id: UUID
    digest: bytes | None
    metadata: dict[str, str]


async def create_batch(
    connection: Connection,
    *,
    file_id: UUID,
    owner: str,
    pool: str,
    batch_id: UUID | None = None,
    key: str | None = None,
    target: str | None = None,
    route: str | None = None,
    metadata: dict[str, str] | None = None,
    priority: int = 0,
    deadline: datetime | None = None,
    now: Now = None,
) -> UUID:
    """Create a batch over a sealed file. `route`, if given, replaces the models: all lanes go to one processor."""
    batch_id = batch_id or uuid4()
    cursor = await connection.execute(
        _SQL["create_batch_if_ready"],
        {
            "id": batch_id,
            "file_id": file_id,
            "owner": owner,
            "pool": pool,
            "key": key,
            "target": target,
            "route": route,
            "metadata": json.dumps(metadata or {}),
            "priority": priority,
            "deadline": deadline,
            "now": now,
        },
    )
    if not await cursor.fetchall():
        raise PenstockError(
            f"no file {file_id} to run",
            hint="It may have been deleted, or its intake has not finished.",
        )
    return batch_id


async def find_by_key(connection: Connection, owner: str, key: str) -> KnownBatch | None:
    cursor = await connection.execute(_SQL["find_batch_by_key"], {"owner": owner, "key": key})
    row = await cursor.fetchone()
    return KnownBatch(row[0], BatchState(row[1]), *row[2:]) if row else None


async def release_key(connection: Connection, batch_id: UUID) -> None:
    """Let the batch's key make a new batch; this one stays readable by its id."""
    await connection.execute(_SQL["release_key"], {"id": batch_id})


async def read_status(connection: Connection, batch_id: UUID) -> Status:
    cursor = await connection.execute(_SQL["read_status"], {"id": batch_id})
    row = await cursor.fetchone()
    if row is None:
        raise PenstockError(f"no batch {batch_id}", hint="It may have been deleted, or belong to another database.")
    (found, state, total, created_at, target, _, _, ended_at, *figures, in_flight) = row
    completed, failed, not_found, skipped, retried = figures
    counts = Counts(
        total=total,
        in_flight=in_flight,
        completed=completed,
        failed=failed,
        not_found=not_found,
        skipped=skipped,
        retried=retried,
    )
    rest = total - counts.settled - in_flight
    match BatchState(state):
        case BatchState.CANCELLED | BatchState.CANCELLING:
            counts.cancelled = rest
        case BatchState.EXPIRED:
            counts.expired = rest
        case _:
            counts.pending = rest
    return Status(found, BatchState(state), created_at, target, ended_at, counts)


async def pause(connection: Connection, batch_id: UUID, *, now: Now = None) -> bool:
    return await _moved(connection, "pause_if_running", batch_id, now)


async def resume(connection: Connection, batch_id: UUID, *, now: Now = None) -> bool:
    return await _moved(connection, "resume_if_paused", batch_id, now)


async def cancel(connection: Connection, batch_id: UUID, *, now: Now = None) -> bool:
    """Start nothing more of this batch. What is in flight finishes and is kept."""
    return await _moved(connection, "cancel_if_unfinished", batch_id, now)


async def finish(connection: Connection, batch_id: UUID, *, now: Now = None) -> bool:
    """End the batch if there is nothing left to do for it; freeze its counts."""
    if await _moved(connection, "finish_if_settled", batch_id, now):
        return True
    await connection.execute(_SQL["close_if_past_deadline"], {"id": batch_id, "now": now})
    return await _moved(connection, "finish_if_drained", batch_id, now)


async def _moved(connection: Connection, statement: str, batch_id: UUID, now: Now) -> bool:
    cursor = await connection.execute(_SQL[statement], {"id": batch_id, "now": now})
    return await cursor.fetchone() is not None


async def unfinished(connection: Connection, pool: str) -> list[UUID]:
    cursor = await connection.execute(_SQL["list_unfinished"], {"pool": pool})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def tidy(connection: Connection, batch_id: UUID) -> None:
    """Housekeeping of one batch: fold its counters, hold deferrals that slipped past a pause."""
    await connection.execute(_SQL["fold_progress"], {"batch": batch_id, "limit": _FOLD_LIMIT})
    await connection.execute(_SQL["hold_strays"], {"id": batch_id})
