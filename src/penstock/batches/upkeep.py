"""Upkeep of open batches: list those that need attention, fold their counters, keep their places in line."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from penstock.batches.error_groups import fold_error_groups
from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.batches", "upkeep.sql")

# A fold touches at most this many deltas of a batch, so that it stays a short statement however far behind it is; and
# there are at most so many folds in a round.
_FOLD_LIMIT = 1_000
_FOLDS = 100


async def list_unfinished(connection: Connection, *, after: UUID | None = None, limit: int = 500) -> list[UUID]:
    """List a page of batches that have started and not ended."""
    cursor = await connection.execute(_SQL["list_unfinished"], {"after": after or UUID(int=0), "limit": limit})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def list_changed(connection: Connection, *, limit: int) -> list[UUID]:
    """List batches whose figures have moved since the last fold."""
    cursor = await connection.execute(_SQL["list_changed"], {"limit": limit})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def list_closing(connection: Connection, *, limit: int, now: Now = None) -> list[UUID]:
    """List batches that are past their deadline or being cancelled, and have not ended."""
    cursor = await connection.execute(_SQL["list_closing"], {"limit": limit, "now": now})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def list_steered(connection: Connection, within_s: float, *, limit: int, now: Now = None) -> list[UUID]:
    """List batches that were paused, resumed, cancelled or reopened within the last `within_s` seconds."""
    cursor = await connection.execute(_SQL["list_steered"], {"within_s": within_s, "limit": limit, "now": now})
    return [batch_id for (batch_id,) in await cursor.fetchall()]


async def fold_progress(connection: Connection, batches: Collection[UUID]) -> None:
    """Sum up the counters of some batches, and of their errors."""
    if batches:
        await fold_error_groups(connection, batches)
    behind = list(batches)
    for _ in range(_FOLDS):
        if not behind:
            break
        cursor = await connection.execute(_SQL["fold_progress"], {"ids": behind, "limit": _FOLD_LIMIT})
        behind = [batch_id for (batch_id,) in await cursor.fetchall() if batch_id is not None]


async def refresh_places(connection: Connection, *, limit: int, now: Now = None) -> None:
    """Give lanes without a place in line one, and batches near their deadline a greater share."""
    await connection.execute(_SQL["line_up_lanes"], {"limit": limit, "now": now})
    await connection.execute(_SQL["weigh_near"], {"limit": limit, "now": now})


async def hold_strays(connection: Connection, batches: Collection[UUID]) -> None:
    """Hold deferrals of some batches that slipped past a pause, and release those that slipped past a resume."""
    await connection.execute(_SQL["hold_strays"], {"ids": list(batches)})
