"""The process's connections: autocommit, one statement per transaction, nothing held across round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from penstock.config import DatabaseLimits
from penstock.db import arrays
from penstock.db.kept import Kept
from penstock.errors import PenstockError

Connection = psycopg.AsyncConnection[TupleRow]
Pool = AsyncConnectionPool[Connection]
Now = datetime | None
"""The time a statement takes as now: None is the database's clock; tests pass their own."""

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


def is_pooled(connection: psycopg.AsyncConnection[Any] | psycopg.Connection[Any], row: TupleRow | None) -> bool:
    """Whether a pooler answers for the server: `row` is what BACKEND_PID gave on this connection."""
    return row is not None and row[0] != connection.info.backend_pid


# What nobody waits for may stay at hand for so long, and out of the pool for so long in all.
_AT_HAND_S = 1.0
_OUT_S = 60.0

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
    """Connect, or say why not. Connections are opened as needed, up to the limit.

    `planned_once` is for connections that have few statements, each with one good plan: it is kept from its first use.
    """

    async def configure(connection: Connection) -> None:
        arrays.register(connection)
        if is_pooled(connection, await (await connection.execute(BACKEND_PID)).fetchone()):
            # Every transaction may get another server connection. What was prepared on this one is not known there,
            # and what is set on this one would be found by whichever client gets it next.
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
    pool: Pool = _WholePool(
        conninfo,
        min_size=1,
        max_size=limits.pool_max,
        connection_class=_Connection,
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
    return pool


class _Connection(psycopg.AsyncConnection[TupleRow]):
    """A connection that keeps the statements it is asked most."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[bytes, Kept] = {}


async def ask_again(connection: Connection, statement: bytes, parameters: Mapping[str, Any]) -> TupleRow | None:
    """The first row of a statement that is asked again and again and that somebody waits for."""
    if not isinstance(connection, _Connection) or connection.prepare_threshold is None:
        return await (await connection.execute(statement, parameters)).fetchone()
    kept = connection.kept.get(statement)
    if kept is None:
        kept = connection.kept[statement] = Kept(connection, statement, len(connection.kept))
    return await kept.ask(parameters)


class _WholePool(AsyncConnectionPool[Connection]):
    """A pool to which connections come back also from those who are cancelled, and that keeps some at hand.

    Cancelled while it hands a connection on to somebody who waits, psycopg's loses it, and leaves them waiting.
    Between two statements that follow each other closely a connection need not go all the way back either: what nobody
    waits for is at hand for the next one for a moment.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._at_hand: list[Connection] = []
        self._out_since: dict[Connection, float] = {}
        self._wanting = 0
        self._clearing: asyncio.TimerHandle | None = None
        self._returning: set[asyncio.Task[None]] = set()

    async def getconn(self, timeout: float | None = None) -> Connection:  # noqa: ASYNC109 -- the pool's own
        if self._at_hand:
            return self._at_hand.pop()
        self._wanting += 1
        try:
            connection = await super().getconn(timeout)
        finally:
            self._wanting -= 1
        self._out_since[connection] = monotonic()
        return connection

    async def putconn(self, conn: Connection) -> None:
        if self._may_stay(conn):
            self._at_hand.append(conn)
            if self._clearing is None:
                self._clearing = asyncio.get_running_loop().call_later(_AT_HAND_S, self._clear)
            return
        await self._put_back(conn)

    def _may_stay(self, connection: Connection) -> bool:
        since = self._out_since.get(connection)
        return (
            since is not None
            and not self._wanting
            and not self.closed
            and connection.pgconn.transaction_status == TransactionStatus.IDLE
            and monotonic() - since < _OUT_S
        )

    async def _put_back(self, connection: Connection) -> None:
        self._out_since.pop(connection, None)
        giving = asyncio.ensure_future(super().putconn(connection))
        cancelled: asyncio.CancelledError | None = None
        while not giving.done():
            try:
                await asyncio.shield(giving)
            except asyncio.CancelledError as error:
                cancelled = error
        giving.result()
        if cancelled is not None:
            raise cancelled

    def _clear(self) -> None:
        """Whatever is not in use now goes back: the pool sees to how many there are, and how old they get."""
        self._clearing = None
        while self._at_hand:
            returning = asyncio.ensure_future(self._put_back(self._at_hand.pop()))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)

    def get_stats(self) -> dict[str, int]:
        stats = super().get_stats()
        stats["pool_available"] = stats.get("pool_available", 0) + len(self._at_hand)
        return stats

    async def close(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109 -- the pool's own
        if self._clearing is not None:
            self._clearing.cancel()
        self._clear()
        await asyncio.gather(*self._returning)
        await super().close(timeout)


class borrowed:  # noqa: N801 -- used like a function
    """A connection for a statement or two. One that turns out to lead to the wrong server is not given back.

    The pool's own way to lend one ends with a commit, of which there is nothing left to do here.
    """

    __slots__ = ("_connection", "_pool")

    def __init__(self, pool: Pool) -> None:
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


async def _reason(conninfo: str) -> str:
    try:
        connection = await psycopg.AsyncConnection.connect(conninfo, connect_timeout=5)
    except psycopg.Error as error:
        return str(error).strip().splitlines()[0]
    await connection.close()
    return "it did not answer in time"
