"""An asynchronous test's connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import psycopg

from penstock.config import DatabaseLimits
from penstock.db import arrays
from penstock.db.pool import Connection, Pool, open_pool

RUNNING_18 = "PENSTOCK_TEST_SERVER_18"
"""Variable with the conninfo of a server that has the template: a run started by a test starts none of its own."""

_T = TypeVar("_T")


@contextlib.asynccontextmanager
async def connected(conninfo: str) -> AsyncIterator[Connection]:
    async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=None) as connection:
        arrays.register(connection)
        yield connection


@contextlib.asynccontextmanager
async def pooled(conninfo: str) -> AsyncIterator[Pool]:
    pool = await open_pool(conninfo, DatabaseLimits())
    try:
        yield pool
    finally:
        await pool.close()


def with_connection(conninfo: str, body: Callable[[Connection], Awaitable[_T]]) -> _T:
    """Run an asynchronous test body on one connection."""

    async def run() -> _T:
        async with connected(conninfo) as connection:
            return await body(connection)

    return asyncio.run(run())


async def one(connection: Connection, query: str, parameters: Any = None) -> tuple[Any, ...]:
    """The only row of a query."""
    rows = await (await connection.execute(query.encode(), parameters)).fetchall()
    assert len(rows) == 1, rows
    return rows[0]
