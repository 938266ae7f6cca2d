"""The process's connections: autocommit, one statement per transaction, nothing held across round trips."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from penstock.config import DatabaseLimits
from penstock.db import arrays
from penstock.errors import PenstockError

Connection = psycopg.AsyncConnection[TupleRow]
Pool = AsyncConnectionPool[Connection]
Now = datetime | None
"""The time a statement takes as now: None is the database's clock; tests pass their own."""

# The server notices a vanished client, and the client a vanished server, within half a minute.
_KEEPALIVE = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


async def _configure(connection: Connection) -> None:
    arrays.register(connection)


async def open_pool(conninfo: str, limits: DatabaseLimits, *, name: str = "penstock") -> Pool:
    """Connect, or say why not. Connections are opened as needed, up to the limit."""
    kwargs: dict[str, Any] = {"autocommit": True, "application_name": name, **_KEEPALIVE}
    pool: Pool = AsyncConnectionPool(
        conninfo,
        min_size=1,
        max_size=limits.pool_max,
        kwargs=kwargs,
        configure=_configure,
        open=False,
        timeout=limits.connect_wait_s,
        name=name,
    )
    try:
        await pool.open(wait=True, timeout=limits.connect_wait_s)
    except PoolTimeout as error:
        await pool.close()
        raise PenstockError(
            f"cannot connect to the database: {await _reason(conninfo)}",
            hint="Check --database-url (or PENSTOCK_DATABASE_URL) and that the server accepts connections.",
        ) from error
    return pool


async def _reason(conninfo: str) -> str:
    try:
        connection = await psycopg.AsyncConnection.connect(conninfo, connect_timeout=5)
    except psycopg.Error as error:
        return str(error).strip().splitlines()[0]
    await connection.close()
    return "it did not answer in time"
