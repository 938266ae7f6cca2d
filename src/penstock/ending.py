"""How batches end: the only statements that end one, with the files and the events that go with it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from penstock.db import sql
from penstock.db.pool import Connection, Now

_log = logging.getLogger("penstock.housekeeping")
_SQL = sql.load("penstock", "ending.sql")


async def finish(connection: Connection, batches: Iterable[UUID], *, now: Now = None) -> set[UUID]:
    """End those of some batches that are over; returns them.

    A batch whose figures the schema refuses is logged and left as it is; the others end all the same.
    """
    ids = list(batches)
    try:
        cursor = await connection.execute(_SQL["finish_if_over"], {"ids": ids, "now": now})
    except psycopg.IntegrityError as error:
        if connection.info.transaction_status != TransactionStatus.IDLE:
            raise  # in the caller's transaction, which cannot go on
        if len(ids) == 1:
            _log.error("batch %s cannot end, its figures contradict each other: %s", ids[0], error)
            return set()
        half = len(ids) // 2
        return await finish(connection, ids[:half], now=now) | await finish(connection, ids[half:], now=now)
    return {batch_id for (batch_id,) in await cursor.fetchall()}


async def fail(
    connection: Connection, batch_id: UUID, problems: Sequence[Mapping[str, Any]], *, now: Now = None
) -> bool:
    """End a batch that cannot run, and keep why."""
    parameters = {"id": batch_id, "problems": json.dumps(problems), "now": now}
    return await (await connection.execute(_SQL["fail_if_validating"], parameters)).fetchone() is not None
