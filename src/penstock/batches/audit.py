"""Audit trail: who changed which job, when, and from where. It outlives the job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.batches", "audit.sql")

_FORGET_ROWS = 1_000
_NEWEST = 2**63 - 1


class Change(NamedTuple):
    """A change that a user made."""

    id: int
    at: datetime
    owner: str
    """Owner of the object."""
    actor: str
    """Key that was used, or the owner where there are no keys."""
    client: str
    """Address that the request came from, or the adapter that found the file."""
    action: str
    object_id: UUID
    details: dict[str, Any]


async def record_change(
    connection: Connection,
    action: str,
    object_id: UUID,
    *,
    owner: str,
    actor: str,
    client: str,
    details: Mapping[str, Any] | None = None,
    now: Now = None,
) -> None:
    """Record a change, in the transaction that makes it."""
    parameters = {
        "action": action,
        "object_id": object_id,
        "owner": owner,
        "actor": actor,
        "client": client,
        "details": json.dumps(details or {}),
        "now": now,
    }
    await connection.execute(_SQL["record_change"], parameters)


async def list_changes(
    connection: Connection, *, object_id: UUID | None = None, below: int | None = None, limit: int
) -> list[Change]:
    """List changes, newest first: all, or those of one object; those older than `below`."""
    parameters = {"object_id": object_id, "below": _NEWEST if below is None else below, "limit": limit}
    statement = _SQL["list_changes" if object_id is None else "list_changes_of"]
    return [Change(*row) for row in await (await connection.execute(statement, parameters)).fetchall()]


async def forget_old(connection: Connection, keep_s: float, *, now: Now = None) -> int:
    """Delete changes that were made `keep_s` ago or earlier, at most a thousand. Returns how many."""
    parameters = {"limit": _FORGET_ROWS, "keep_s": keep_s, "now": now}
    return (await connection.execute(_SQL["forget_changes_if_old"], parameters)).rowcount
