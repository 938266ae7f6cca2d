"""Batches paused, resumed and cancelled: a timestamp each, and the lanes closed or opened."""

from __future__ import annotations

from uuid import UUID

from penstock.batches.lifecycle import log_steered
from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.batches", "steer.sql")


async def pause_batch(connection: Connection, batch_id: UUID, owner: str | None = None, *, now: Now = None) -> bool:
    return await _steer(connection, "pause_if_running", "paused", batch_id, owner, now)


async def resume_batch(connection: Connection, batch_id: UUID, owner: str | None = None, *, now: Now = None) -> bool:
    return await _steer(connection, "resume_if_paused", "resumed", batch_id, owner, now)


async def cancel_batch(connection: Connection, batch_id: UUID, owner: str | None = None, *, now: Now = None) -> bool:
    """Start nothing more of this batch. Requests in flight finish, and their outcomes are kept."""
    return await _steer(connection, "cancel_if_unfinished", "cancelling", batch_id, owner, now)


async def hold_batch(connection: Connection, batch_id: UUID) -> None:
    """Lock a batch until the end of the transaction."""
    await connection.execute(_SQL["hold_batch"], {"id": batch_id})


async def _steer(
    connection: Connection, statement: str, state: str, batch_id: UUID, owner: str | None, now: Now
) -> bool:
    async with connection.transaction():
        # A statement by itself: the transaction that holds the batch may be adding lanes, which only a statement that
        # begins later can see.
        await hold_batch(connection, batch_id)
        cursor = await connection.execute(_SQL[statement], {"id": batch_id, "owner": owner, "now": now})
        moved = await cursor.fetchone() is not None
    if moved:
        log_steered(batch_id, state)
    return moved
