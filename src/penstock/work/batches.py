"""Batches: one run over one file. Nothing here depends on how many lines the file has."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from penstock import ending
from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.errors import PenstockError
from penstock.model import BatchState, new_id
from penstock.work.read import Batch, Status, Which, batch_of_result, get_batch, list_batches, read_status
from penstock.work.request import Requested, request_batch, unvalidated, validate_batch
from penstock.work.retry import NotFailed, NotRetryable, Retried, give_up_reruns, retry_batch, worn_out_message

__all__ = [
    "Batch",
    "KnownBatch",
    "NotFailed",
    "NotRetryable",
    "Requested",
    "Retried",
    "Status",
    "Which",
    "batch_of_result",
    "cancel",
    "changed",
    "closing",
    "create_batch",
    "find_by_key",
    "finish",
    "finish_all",
    "fold",
    "get_batch",
    "hold_strays",
    "list_batches",
    "pause",
    "read_status",
    "release_key",
    "request_batch",
    "resume",
    "retry_batch",
    "steered",
    "take_turn",
    "unfinished",
    "unvalidated",
    "validate_batch",
    "worn_out_message",
]

_SQL = sql.load("penstock.work", "work.sql")

# A fold touches at most this many deltas of a batch, so that it stays a short statement however far behind it is; and
# there are at most so many folds in a round.
_FOLD_LIMIT = 1_000
_FOLDS = 100


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
    batch_id = batch_id or new_id()
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


# -- steering


async def pause(connection: Connection, batch_id: UUID, owner: str | None = None, *, now: Now = None) -> bool:
    return await _moved(connection, "pause_if_running", batch_id, owner, now)


async def resume(connection: Connection, batch_id: UUID, owner: str | None = None, *, now: Now = None) -> bool:
    return await _moved(connection, "resume_if_paused", batch_id, owner, now)


async def cancel(connection: Connection, batch_id: UUID, owner: str | None = None, *, now: Now = None) -> bool:
    """Start nothing more of this batch. What is in flight finishes and is kept."""
    return await _moved(connection, "cancel_if_unfinished", batch_id, owner, now)


async def _moved(connection: Connection, statement: str, batch_id: UUID, owner: str | None, now: Now) -> bool:
    async with connection.transaction():
        # By itself: whoever holds the batch may be adding lanes, which only a statement that begins later can see.
        await connection.execute(_SQL["hold_batch"], {"id": batch_id})
        cursor = await connection.execute(_SQL[statement], {"id": batch_id, "owner": owner, "now": now})
        return await cursor.fetchone() is not None


# -- housekeeping


async def finish(connection: Connection, batch_id: UUID, *, now: Now = None) -> bool:
    """End the batch if there is nothing left to do for it; freeze its counts."""
    return bool(await finish_all(connection, [batch_id], now=now))


async def finish_all(connection: Connection, batches: Collection[UUID], *, now: Now = None) -> set[UUID]:
    """The same for many; returns those that have ended now."""
    await connection.execute(_SQL["close_if_past_deadline"], {"ids": list(batches), "now": now})
    await give_up_reruns(connection, batches, now=now)
    return await ending.finish(connection, batches, now=now)


async def unfinished(connection: Connection, *, after: UUID | None = None, limit: int = 500) -> list[UUID]:
    """Batches that have started and not ended, a page of them."""
    cursor = await connection.execute(_SQL["list_unfinished"], {"after": after or UUID(int=0), "limit": limit})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def changed(connection: Connection, *, limit: int) -> list[UUID]:
    """Batches whose figures have moved since the last fold."""
    cursor = await connection.execute(_SQL["list_changed"], {"limit": limit})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def closing(connection: Connection, *, limit: int, now: Now = None) -> list[UUID]:
    """Batches that are past their deadline or being cancelled, and have not ended."""
    cursor = await connection.execute(_SQL["list_closing"], {"limit": limit, "now": now})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def steered(connection: Connection, within_s: float, *, limit: int, now: Now = None) -> list[UUID]:
    """Batches that were paused, resumed, cancelled or reopened within so many seconds."""
    cursor = await connection.execute(_SQL["list_steered"], {"within_s": within_s, "limit": limit, "now": now})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def fold(connection: Connection, batches: Collection[UUID]) -> None:
    """Sum up the counters of some batches."""
    behind = list(batches)
    for _ in range(_FOLDS):
        if not behind:
            break
        cursor = await connection.execute(_SQL["fold_progress"], {"ids": behind, "limit": _FOLD_LIMIT})
        behind = [batch_id for (batch_id,) in await cursor.fetchall() if batch_id is not None]


async def keep_line(connection: Connection, *, limit: int, now: Now = None) -> None:
    """Give lanes without a place in line one, and batches near their deadline a greater share."""
    await connection.execute(_SQL["line_up_lanes"], {"limit": limit, "now": now})
    await connection.execute(_SQL["weigh_near"], {"limit": limit, "now": now})


async def hold_strays(connection: Connection, batches: Collection[UUID]) -> None:
    """Hold deferrals of some batches that slipped past a pause, and release those that slipped past a resume."""
    await connection.execute(_SQL["hold_strays"], {"ids": list(batches)})


async def take_turn(connection: Connection, duty: str, every_s: float, *, now: Now = None) -> bool:
    """Whether it is this process's turn at something that one of them does for all."""
    parameters = {"name": duty, "every_s": every_s, "now": now}
    return await (await connection.execute(_SQL["take_turn_if_due"], parameters)).fetchone() is not None
