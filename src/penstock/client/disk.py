"""Space of deleted data, given back to the disk: the rows are removed, then the tables made as small as they can be."""

from __future__ import annotations

import contextlib
from uuid import UUID

import psycopg
from psycopg import sql as compose

from penstock.client.api import Purged
from penstock.config import Config
from penstock.db import sql
from penstock.db.pool import Connection, Pool, fetch_one
from penstock.erase.erase import expire_batches
from penstock.erase.purge import purge_step

_SQL = sql.load("penstock.client", "disk.sql")

_ROWS_PER_STEP = 10_000
_BATCHES_PER_STEP = 500
_WORTH_BYTES = 1 << 20
_LOCK_WAIT_MS = 2_000


async def forget_old(database: Pool, config: Config) -> None:
    """Delete the batches and jobs that ended longer than `keep_s` ago, and remove their rows."""
    if not config.erase.keep_s:
        return
    place: UUID | None = UUID(int=0)
    async with database.connection() as connection:
        while place is not None:
            place, _ = await expire_batches(connection, config.erase.keep_s, place, _BATCHES_PER_STEP)
        while await purge_step(connection, config.erase.purge_batch_size):
            pass


async def give_back_space(database: Pool, config: Config) -> Purged:
    """Remove the rows of everything that was deleted, and give their space back.

    The embedded server's files are written anew, without gaps, if nothing is being worked off. Where tables are in use,
    only free pages at their ends are given back, and the rest is used again.
    """
    async with database.connection() as connection:
        before = await _measure(connection)
        while await purge_step(connection, _ROWS_PER_STEP):
            pass
        grace = {"grace_s": config.liveness.heartbeat_grace_s}
        alone = config.database_url is None and await fetch_one(connection, _SQL["is_anybody_at_work"], grace) == (
            False,
        )
        await connection.execute(compose.SQL("SET lock_timeout = {}").format(_LOCK_WAIT_MS))
        try:
            await _vacuum(connection, whole=alone)
        finally:
            await connection.execute("RESET lock_timeout")
        return Purged(before, await _measure(connection), alone)


async def _vacuum(connection: Connection, *, whole: bool) -> None:
    how = compose.SQL("VACUUM (FULL, ANALYZE) {}" if whole else "VACUUM (TRUNCATE, ANALYZE) {}")
    cursor = await connection.execute(_SQL["list_tables_with_room"], {"bytes": _WORTH_BYTES})
    for (table,) in await cursor.fetchall():
        # A table that is in use, or is another's, keeps its free pages: they are used again.
        with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.InsufficientPrivilege):
            await connection.execute(how.format(compose.SQL(table)))
    if whole:
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            await connection.execute("CHECKPOINT")


async def _measure(connection: Connection) -> int:
    row = await fetch_one(connection, _SQL["measure"], {})
    return int(row[0]) if row else 0
