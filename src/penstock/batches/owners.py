"""Owners: how much of the work each gets beside the others."""

from __future__ import annotations

from penstock.db import sql
from penstock.db.pool import Connection

_SQL = sql.load("penstock.batches", "owners.sql")


async def set_weight(connection: Connection, owner: str, weight: float) -> None:
    """Set the weight of the owner's batches, those that wait and those to come."""
    await connection.execute(_SQL["set_weight"], {"owner": owner, "weight": weight})


async def list_weights(connection: Connection, owner: str | None = None) -> list[tuple[str, float]]:
    """Owners with a weight of their own; all others have weight 1."""
    cursor = await connection.execute(_SQL["list_weights"], {"owner": owner})
    return [(name, weight) for name, weight in await cursor.fetchall()]
