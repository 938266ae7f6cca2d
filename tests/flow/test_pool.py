"""The pool of connections: those who change their minds, and what stays at hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from uuid import uuid4

import psycopg
import pytest

from penstock.config import DatabaseLimits
from penstock.db import pool as pools
from penstock.db.pool import Connection, Pool, ask_again, borrowed, open_pool


def with_pool(conninfo: str, size: int, scenario: Callable[[Pool], Awaitable[None]]) -> None:
    async def play() -> None:
        pool = await open_pool(conninfo, DatabaseLimits(pool_max=size, connect_wait_s=5))
        try:
            async with asyncio.timeout(30):
                await scenario(pool)
        finally:
            await pool.close()

    asyncio.run(play())


async def pid(connection: Connection) -> int:
    row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
    assert row is not None
    return int(row[0])


async def asleep(connection: Connection, backend_pid: int) -> bool:
    cursor = await connection.execute(
        "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'", [backend_pid]
    )
    return await cursor.fetchone() is not None


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


class TestAtHand:
    def test_the_next_one_gets_what_the_last_one_gave(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            found = set()
            for _ in range(5):
                async with borrowed(pool) as connection:
                    found.add(await pid(connection))
            assert len(found) == 1
            assert pool.get_stats()["requests_num"] == 1  # the pool itself was asked once
            assert pool.get_stats()["pool_available"] == 1

        with_pool(database_18, 3, scenario)

    def test_who_waits_gets_it_first(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            order: list[int] = []

            async def use(number: int) -> None:
                async with borrowed(pool) as connection:
                    order.append(number)
                    await connection.execute("SELECT 1")

            held = await pool.getconn()
            waiting = [asyncio.create_task(use(number)) for number in range(4)]
            for _ in range(3):
                await asyncio.sleep(0)
            await pool.putconn(held)
            await asyncio.gather(*waiting)
            assert order == [0, 1, 2, 3]

        with_pool(database_18, 1, scenario)

    def test_after_a_while_it_goes_back(self, database_18: str, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(pool: Pool) -> None:
            monkeypatch.setattr(pools, "_AT_HAND_S", 0.01)
            async with borrowed(pool) as connection:
                first = await pid(connection)
            while not pool._pool:
                await asyncio.sleep(0)
            async with borrowed(pool) as connection:
                assert await pid(connection) == first
            assert pool.get_stats()["requests_num"] == 2

        with_pool(database_18, 1, scenario)

    def test_one_that_is_used_all_the_time_goes_back_now_and_then(
        self, database_18: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario(pool: Pool) -> None:
            monkeypatch.setattr(pools, "_OUT_S", 0.0)
            for _ in range(3):
                async with borrowed(pool) as connection:
                    await connection.execute("SELECT 1")
            assert pool.get_stats()["requests_num"] == 3

        with_pool(database_18, 1, scenario)

    def test_one_in_a_transaction_or_broken_does_not_stay(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            connection = await pool.getconn()
            first = await pid(connection)
            await connection.execute("BEGIN")
            await pool.putconn(connection)
            async with borrowed(pool) as connection:
                assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
                first = await pid(connection)
            connection = await pool.getconn()
            with pytest.raises(psycopg.OperationalError):
                await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
            await pool.putconn(connection)
            async with borrowed(pool) as connection:
                assert await pid(connection) != first

        with_pool(database_18, 1, scenario)

    def test_closing_closes_it_too(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            async with borrowed(pool) as connection:
                pass
            await pool.close()
            assert connection.closed

        with_pool(database_18, 2, scenario)


class TestAskedAgain:
    def test_answers_each_time_anew(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            statement = (
                b"SELECT %(number)s::int8, %(content)b::bytea, %(id)s::uuid, %(said)s::bool, '%%', %(number)s + 1"
            )
            for number in (1, 2, 40_000, 3, 5_000_000_000, -1):
                async with borrowed(pool) as connection:
                    asked = {"number": number, "content": b"\0%d" % number, "id": uuid4(), "said": number > 2}
                    row = await ask_again(connection, statement, asked)
                    assert row == (number, asked["content"], asked["id"], asked["said"], "%", number + 1)
                    nothing = dict.fromkeys(asked)
                    assert await ask_again(connection, statement.replace(b" + 1", b""), nothing) == (
                        *(None, None, None, None, "%", None),
                    )

        with_pool(database_18, 1, scenario)

    def test_is_the_same_as_asked_by_a_cursor(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            statement = b"SELECT %(at)s::timestamptz, now() > %(at)s, ARRAY[%(text)s, 'b'], 1.5::float8, NULL::text"
            asked = {"at": datetime(2026, 1, 2, 3, 4, 5, 678901, UTC), "text": "caf\u00e9 '\\"}
            async with borrowed(pool) as connection:
                kept = await ask_again(connection, statement, asked)
                assert kept == await (await connection.execute(statement, asked)).fetchone()
                assert await ask_again(connection, b"SELECT 1 WHERE %(no)s::bool", {"no": False}) is None

        with_pool(database_18, 1, scenario)

    def test_a_failure_is_raised_and_not_remembered(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            statement = b"SELECT 1 / %(number)s::int4"
            async with borrowed(pool) as connection:
                for _ in range(7):
                    with pytest.raises(psycopg.errors.DivisionByZero):
                        await ask_again(connection, statement, {"number": 0})
                    assert await ask_again(connection, statement, {"number": 1}) == (1,)
                with pytest.raises(psycopg.errors.UndefinedTable):
                    await ask_again(connection, b"SELECT FROM nowhere", {})

        with_pool(database_18, 1, scenario)

    def test_who_is_cancelled_leaves_the_connection_usable(self, database_18: str) -> None:
        async def scenario(pool: Pool) -> None:
            statement = b"SELECT pg_sleep(%(s)s)::text"
            async with borrowed(pool) as connection:
                asking = asyncio.create_task(ask_again(connection, statement, {"s": 60}))
                async with borrowed(pool) as other:
                    while not await asleep(other, connection.info.backend_pid):
                        pass
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
                assert await ask_again(connection, statement, {"s": 0}) == ("",)

        with_pool(database_18, 2, scenario)
