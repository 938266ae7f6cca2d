"""Batches that finish: the only statements that end a batch, with its result files and its webhook deliveries."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus

from penstock.batches.lifecycle import log_ended, log_failed
from penstock.batches.run_again import give_up_reruns
from penstock.db import sql
from penstock.db.pool import Connection, Now

_log = logging.getLogger("penstock.batches")
_SQL = sql.load("penstock.batches", "finish.sql")
_COUNTS = ("completed", "failed", "not_found", "skipped", "retried")


async def finish_batch(connection: Connection, batch_id: UUID, *, now: Now = None) -> bool:
    """End the batch if there is nothing left to do for it; freeze its counts."""
    return bool(await finish_batches(connection, [batch_id], now=now))


async def finish_batches(connection: Connection, batches: Collection[UUID], *, now: Now = None) -> set[UUID]:
    """End those of many batches for which there is nothing left to do; returns those that have ended now."""
    await connection.execute(_SQL["close_if_past_deadline"], {"ids": list(batches), "now": now})
    await give_up_reruns(connection, batches, now=now)
    return await end_if_over(connection, batches, now=now)


async def end_if_over(connection: Connection, batches: Iterable[UUID], *, now: Now = None) -> set[UUID]:
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
        return await end_if_over(connection, ids[:half], now=now) | await end_if_over(connection, ids[half:], now=now)
    ended = await cursor.fetchall()
    for batch_id, state, total, *counts, duration_s in ended:
        log_ended(batch_id, state, total, dict(zip(_COUNTS, counts, strict=True)), duration_s)
    return {row[0] for row in ended}


async def fail_batch(
    connection: Connection, batch_id: UUID, problems: Sequence[Mapping[str, Any]], *, now: Now = None
) -> bool:
    """End a batch that cannot run, and record why."""
    parameters = {"id": batch_id, "problems": json.dumps(problems), "now": now}
    failed = await (await connection.execute(_SQL["fail_if_validating"], parameters)).fetchone() is not None
    if failed:
        log_failed(batch_id, {str(problem["code"]) for problem in problems}, len(problems))
    return failed
