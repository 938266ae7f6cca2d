"""Batches created over sealed files: the cost does not depend on how many lines a file has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg

from penstock.batches.lifecycle import log_created
from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.errors import PenstockError
from penstock.model import BatchState, new_id

_SQL = sql.load("penstock.batches", "create.sql")


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
    target: str | None


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
    window_s: float | None = None,
    is_job: bool = False,
    result_files: bool = False,
    now: Now = None,
) -> UUID:
    """Create a batch over a sealed file. `route`, if given, replaces the models: all lanes go to one processor. A batch
    that `is_job` becomes one in this transaction. With `result_files` its results can be read by the ids of two files,
    which are there for as long as the batch is."""
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
            "window_s": window_s,
            "is_job": is_job,
            "output_file_id": new_id() if result_files else None,
            "error_file_id": new_id() if result_files else None,
            "now": now,
        },
    )
    if not await cursor.fetchall():
        raise PenstockError(
            f"no file {file_id} to run",
            hint="It may have been deleted, or its intake has not finished.",
        )
    log_created(batch_id, owner, "run")
    return batch_id


async def find_batch_by_key(connection: Connection, owner: str, key: str) -> KnownBatch | None:
    cursor = await connection.execute(_SQL["find_batch_by_key"], {"owner": owner, "key": key})
    row = await cursor.fetchone()
    return KnownBatch(row[0], BatchState(row[1]), *row[2:]) if row else None


@contextlib.asynccontextmanager
async def hold_key(
    conninfo: str, key: str, look_every_s: float, should_wait: Callable[[bool], bool] = lambda _: True
) -> AsyncIterator[None]:
    """Hold the lock of a key: one process at a time finds or makes its batch, so that a file is not stored twice.

    The lock is gone with its transaction, however that ends. Where a server cuts an idle transaction short, the batch's
    unique key still stands. `should_wait`, told whether it was asked before, may raise to give up.
    """
    connection = await psycopg.AsyncConnection.connect(conninfo)
    try:
        asked = False
        while not await _try_lock(connection, key) and should_wait(asked):
            asked = True
            await asyncio.sleep(look_every_s)
        yield
    finally:
        await connection.close()


async def _try_lock(connection: psycopg.AsyncConnection, key: str) -> bool:
    await connection.rollback()
    cursor = await connection.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [key])
    return await cursor.fetchone() == (True,)


async def release_key(connection: Connection, batch_id: UUID) -> None:
    """Let the batch's key make a new batch; this one stays readable by its id."""
    await connection.execute(_SQL["release_key"], {"id": batch_id})
