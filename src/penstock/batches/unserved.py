"""Unserved work, whose provider is gone: found, and moved to the provider that serves its model now."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.batches", "unserved.sql")

MOVED_AT_ONCE = 1_000


async def list_unserved(
    connection: Connection, served: Sequence[str], grace_s: float, *, now: Now = None
) -> dict[str, list[str]]:
    """List pools with work that are not among these and have no worker anywhere, each with its models."""
    cursor = await connection.execute(_SQL["list_unserved"], {"served": list(served), "grace_s": grace_s, "now": now})
    found: dict[str, list[str]] = {}
    for pool, route in await cursor.fetchall():
        found.setdefault(pool, []).append(route)
    return found


async def move_lanes(
    connection: Connection,
    pool: str,
    route: str,
    new_pool: str,
    grace_s: float,
    *,
    limit: int = MOVED_AT_ONCE,
    now: Now = None,
) -> int:
    """Move lanes of this model to another pool, some at a time, unless they are leased; returns how many. Rows of jobs
    stay: they are for the provider that their definition names."""
    cursor = await connection.execute(
        _SQL["move_if_unserved"],
        {
            "pool": pool,
            "route": route,
            "new_pool": new_pool,
            "grace_s": grace_s,
            "limit": limit,
            "now": now,
        },
    )
    row = await cursor.fetchone()
    return int(row[0]) if row is not None else 0
