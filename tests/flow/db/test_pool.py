"""The pool of connections, and tasks that are cancelled while they give one back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from penstock.config import DatabaseLimits
from penstock.db.pool import Pool, open_pool


def with_pool(conninfo: str, size: int, scenario: Callable[[Pool], Awaitable[None]]) -> None:
    async def play() -> None:
        pool = await open_pool(conninfo, DatabaseLimits(pool_max=size, connect_wait_s=5))
        try:
            async with asyncio.timeout(30):
                await scenario(pool)
        finally:
            await pool.close()

    asyncio.run(play())


def test_who_is_cancelled_while_giving_a_connection_back_gives_it_back(database_18: str) -> None:
    async def scenario(pool: Pool) -> None:
        async def wait() -> None:
            async with pool.connection() as connection:
                await connection.execute("SELECT 1")

        for _ in range(3):
            held = await pool.getconn()
            waiting = asyncio.create_task(wait())
            giving = asyncio.create_task(pool.putconn(held))
            await asyncio.sleep(0)  # one waits, the other is about to hand over
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)
            await waiting
        assert pool.get_stats()["pool_size"] == 1

    with_pool(database_18, 1, scenario)
