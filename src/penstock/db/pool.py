"""Connections of a process: autocommit, one statement per transaction, nothing held across round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakSet

import psycopg
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from penstock.config import DatabaseLimits
from penstock.db import arrays
from penstock.errors import PenstockError
from penstock.observe import catalogue
from penstock.observe.metrics import Sample, read_from
from penstock.shares import Shares

Connection = psycopg.AsyncConnection[TupleRow]
Now = datetime | None
"""Time that a statement takes as now: None is the database's clock; tests pass their own."""

# A server that has vanished without a word is noticed within half a minute.
KEEPALIVE: dict[str, Any] = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
# The same at the server's end, which would keep the connection of a client that has vanished, and what it has
# locked, for hours.
SERVER_KEEPALIVE = """
    set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
    set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '30s', false)
"""

BACKEND_PID = "SELECT pg_backend_pid()"

_KEPT_PART = 5
"""A fifth of a pool's connections are not for owners: keys are looked up by them, limits kept and duties done."""


def is_pooled(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any], row: TupleRow | None) -> bool:
    """Whether a pooler answers for the server: `row` is what BACKEND_PID gave on this connection."""
    return row is not None and row[0] != connection.info.backend_pid


class Pool(AsyncConnectionPool[Connection]):
    """Connections of a process. What is done for one owner takes them by `of`, and leaves some to all else.

    They come back also from tasks that are cancelled. psycopg's pool, cancelled while it passes a connection to the
    next in line, loses it and leaves that one waiting.
    """

    def __init__(self, *args: Any, max_size: int, **kwargs: Any) -> None:
        super().__init__(*args, max_size=max_size, **kwargs)
        self._shares = Shares(max(1, max_size - max(1, max_size // _KEPT_PART)))

    def of(self, owner: str) -> OwnerConnections:
        """Connections for what an owner has asked for."""
        return OwnerConnections(self, self._shares, owner)

    async def putconn(self, conn: Connection) -> None:
        returning = asyncio.ensure_future(super().putconn(conn))
        cancelled: asyncio.CancelledError | None = None
        while not returning.done():
            try:
                await asyncio.shield(returning)
            except asyncio.CancelledError as error:
                cancelled = error
        returning.result()
        if cancelled is not None:
            raise cancelled


class Lender(Protocol):
    """Whoever lends connections: a pool, or an owner's part of one."""

    async def getconn(self) -> Connection: ...

    async def putconn(self, conn: Connection) -> None: ...


class OwnerConnections:
    """Connections that are borrowed for one owner: as many at a time as its share of the pool."""

    __slots__ = ("_owner", "_pool", "_shares")

    def __init__(self, pool: Pool, shares: Shares, owner: str) -> None:
        self._pool = pool
        self._shares = shares
        self._owner = owner

    async def getconn(self) -> Connection:
        try:
            await self._shares.take(self._owner, self._pool.timeout)
        except TimeoutError:
            raise PoolTimeout("the owner has had all the connections that it may have") from None
        try:
            return await self._pool.getconn()
        except BaseException:
            self._shares.give_back(self._owner)
            raise

    async def putconn(self, conn: Connection) -> None:
        try:
            await self._pool.putconn(conn)
        finally:
            self._shares.give_back(self._owner)


# The connection itself is sound, but what it is connected to no longer takes writes: a primary that became a
# standby, or a server that is shutting down. A new connection may find the new primary.
_WRONG_SERVER = (
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.CannotConnectNow,
    psycopg.errors.AdminShutdown,
    psycopg.errors.CrashShutdown,
)


async def open_pool(
    conninfo: str, limits: DatabaseLimits, *, name: str = "penstock", planned_once: bool = False
) -> Pool:
    """Connect, or raise why not. Connections are opened as needed, up to the limit.

    `planned_once` is for connections that have few statements, each with one good plan: it is kept from its first use.
    """

    async def configure(connection: Connection) -> None:
        arrays.register(connection)
        if is_pooled(connection, await (await connection.execute(BACKEND_PID)).fetchone()):
            # Every transaction may get another server connection. Statements prepared on this one are not known there,
            # and settings of this one would apply to the client that gets it next.
            connection.prepare_threshold = None
            return
        milliseconds = int(limits.statement_timeout_s * 1000)
        await connection.execute(
            "SELECT set_config('statement_timeout', %s, false), set_config('jit', 'off', false)," + SERVER_KEEPALIVE,
            [f"{milliseconds}ms"],
        )
        if planned_once:
            await connection.execute("SET plan_cache_mode = force_generic_plan")

    kwargs: dict[str, Any] = {"autocommit": True, "application_name": name, "connect_timeout": 10, **KEEPALIVE}
    pool = Pool(
        conninfo,
        min_size=1,
        max_size=limits.pool_max,
        kwargs=kwargs,
        configure=configure,
        open=False,
        timeout=limits.connect_wait_s,
        # Reconnecting goes on, with growing and jittered waits, for as long as the process lives.
        reconnect_timeout=limits.connect_wait_s,
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
    _pools.add(pool)
    return pool


_pools: WeakSet[Pool] = WeakSet()


@read_from
def _read_pools() -> Iterator[Sample]:
    for pool in list(_pools):
        labels, told = (pool.name.removeprefix("penstock "),), pool.pop_stats()
        catalogue.POOL_REQUESTS.add(labels, told.get("requests_num", 0))
        catalogue.POOL_QUEUED.add(labels, told.get("requests_queued", 0))
        catalogue.POOL_WAIT.add(labels, told.get("requests_wait_ms", 0) / 1000)
        if not pool.closed:
            idle = told["pool_available"]
            yield Sample(catalogue.POOL_CONNECTIONS, (*labels, "idle"), idle)
            yield Sample(catalogue.POOL_CONNECTIONS, (*labels, "used"), told["pool_size"] - idle)


class borrowed:  # noqa: N801 -- used like a function
    """A connection for a statement or two. A connection that turns out to lead to the wrong server is not reused.

    The pool's own context manager ends with a commit, which is not needed here.
    """

    __slots__ = ("_connection", "_pool")

    def __init__(self, pool: Lender) -> None:
        self._pool = pool

    async def __aenter__(self) -> Connection:
        self._connection = await self._pool.getconn()
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, _WRONG_SERVER):
            await self._connection.close()
        await self._pool.putconn(self._connection)


async def fetch_one(connection: Connection, statement: bytes, parameters: Mapping[str, Any]) -> TupleRow | None:
    """Execute a statement and fetch its row, None if it has none."""
    return await (await connection.execute(statement, parameters)).fetchone()


async def _reason(conninfo: str) -> str:
    try:
        connection = await psycopg.AsyncConnection.connect(conninfo, connect_timeout=5)
    except psycopg.Error as error:
        return str(error).strip().splitlines()[0]
    await connection.close()
    return "it did not answer in time"
