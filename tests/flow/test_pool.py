"""The pool of connections, and those who change their minds."""

from __future__ import annotations

import asyncio

from penstock.config import DatabaseLimits
from penstock.db.pool import open_pool


def test_who_is_cancelled_while_giving_a_connection_back_gives_it_back(database_18: str) -> None:
    async def scenario() -> None:
        pool = await open_pool(database_18, DatabaseLimits(pool_max=1, connect_wait_s=5))

        async def wait() -> None:
            async with pool.connection() as connection:
                await connection.execute("SELECT 1")

        try:
            for _ in range(3):
                held = await pool.getconn()
                waiting = asyncio.create_task(wait())
                giving = asyncio.create_task(pool.putconn(held))
                await asyncio.sleep(0)  # one waits, the other is about to hand over
                giving.cancel()
                await asyncio.gather(giving, return_exceptions=True)
                await waiting
            assert pool.get_stats()["pool_size"] == 1
        finally:
            await pool.close()

    asyncio.run(scenario())
