"""Lead: one process at a time works under a name, and its death or silence frees the name."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from penstock.db.lead import lead
from penstock.db.pool import Connection
from tests.support.db import one, with_connection
from tests.support.wait import wait_until

GRACE_S = 30.0


async def _answer() -> str:
    return "done"


def test_one_at_a_time_has_the_lead(database: str) -> None:
    async def body(_: Connection) -> None:
        began, end = asyncio.Event(), asyncio.Event()

        async def work() -> str:
            began.set()
            await end.wait()
            return "first"

        first = asyncio.create_task(lead(database, "scan a", GRACE_S, work))
        await began.wait()
        assert await lead(database, "scan a", GRACE_S, _answer) is None
        assert await lead(database, "scan b", GRACE_S, _answer) == "done"
        end.set()
        assert await first == "first"
        assert await lead(database, "scan a", GRACE_S, _answer) == "done"

    with_connection(database, body)


def test_a_failure_of_the_work_is_raised_and_frees_the_lead(database: str) -> None:
    async def fail() -> str:
        raise ValueError("of the work")

    async def body(_: Connection) -> None:
        with pytest.raises(ValueError, match="of the work"):
            await lead(database, "scan", GRACE_S, fail)
        assert await lead(database, "scan", GRACE_S, _answer) == "done"

    with_connection(database, body)


def test_a_lead_that_is_lost_ends_the_work(database: str) -> None:
    async def body(connection: Connection) -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def work() -> str:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return ""

        leading = asyncio.create_task(lead(database, "scan lost", 0.3, work))
        await began.wait()
        # It holds no snapshot that would keep dead rows.
        query = "SELECT pid, backend_xmin FROM pg_stat_activity WHERE application_name = 'scan lost'"
        ((pid, xmin),) = await (await connection.execute(query)).fetchall()
        assert xmin is None
        # Its client hears of it before its locks are gone: wait until it has ended.
        assert await one(connection, "SELECT pg_terminate_backend(%s, 30000)", [pid]) == (True,)
        with pytest.raises(psycopg.OperationalError):
            await leading
        assert cancelled.is_set()
        assert await lead(database, "scan lost", GRACE_S, _answer) == "done"

    with_connection(database, body)


def test_a_process_that_stands_still_loses_the_lead(database: str) -> None:
    """The event loop stands still, as that of a frozen process, until the lock is free."""

    async def body(_: Connection) -> None:
        async def work() -> str:
            query = "SELECT pg_try_advisory_lock(hashtextextended('scan still', 0))"
            with psycopg.connect(database, autocommit=True) as other:
                wait_until(lambda: other.execute(query).fetchone() == (True,), 30)
            return "lost"

        assert await lead(database, "scan still", 0.3, work) == "lost"

    with_connection(database, body)
