"""How batches end: the only statements that end one, with the files and the events that go with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock", "ending.sql")


async def finish(connection: Connection, batches: Iterable[UUID], *, now: Now = None) -> set[UUID]:
    """End those of some batches that are over; returns them."""
    cursor = await connection.execute(_SQL["finish_if_over"], {"ids": list(batches), "now": now})
    return {batch_id for (batch_id,) in await cursor.fetchall()}


async def fail(
    connection: Connection, batch_id: UUID, problems: Sequence[Mapping[str, Any]], *, now: Now = None
) -> bool:
    """End a batch that cannot run, and keep why."""
    parameters = {"id": batch_id, "problems": json.dumps(problems), "now": now}
    return await (await connection.execute(_SQL["fail_if_validating"], parameters)).fetchone() is not None
