"""R14: notices only make things sooner. With the listening connection lost, or none to be had, polling goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.config import ClaimLimits, Config, RetryLimits, SettleLimits
from penstock.db.notify import WORK, NoticeListener, notify
from penstock.db.pool import Connection, Pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Item, Outcome, OutcomeState, Verdict
from penstock.worker.worker import Worker
from tests.support.db import one, pooled
from tests.support.engine import make_batch, until

CONFIG = Config(claim=ClaimLimits(claim_poll_s=0.05), settle=SettleLimits(settle_interval_s=0.005))
# Far beyond what a test waits for: whoever begins sooner was told.
NEVER_POLLS = replace(CONFIG, claim=ClaimLimits(claim_poll_s=60))
LISTENERS = "FROM pg_stat_activity WHERE application_name = 'penstock notices' AND datname = current_database()"


async def done(_: Item) -> Verdict:
    return Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=1)


@contextlib.asynccontextmanager
async def running_bell(conninfo: str) -> AsyncIterator[NoticeListener]:
    bell = NoticeListener(conninfo)
    task = asyncio.create_task(bell.run())
    try:
        yield bell
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def working(config: Config, pool: Pool, bell: NoticeListener) -> AsyncIterator[Worker]:
    worker = Worker(config, pool, "test", CoroutineDispatcher(each(done), 8, RetryLimits()), bell)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await task


def in_pool(conninfo: str, body: Callable[[Pool, Connection], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(120), pooled(conninfo) as pool, pool.connection() as connection:
            await body(pool, connection)

    asyncio.run(run())


async def heard_again(bell: NoticeListener, connection: Connection) -> None:
    """Until a new listener stands where the lost one was."""
    async with asyncio.timeout(60):
        while True:
            await bell.listening.wait()
            if await one(connection, f"SELECT count(*) {LISTENERS}") == (1,):
                return
            await asyncio.sleep(0.01)


def test_a_notice_begins_work_before_the_next_poll(database_18: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.loop._FIRST_POLL_S", NEVER_POLLS.claim.claim_poll_s)

    async def body(pool: Pool, connection: Connection) -> None:
        async with running_bell(str(pool.conninfo)) as bell, working(NEVER_POLLS, pool, bell):
            await bell.listening.wait()
            for _ in range(3):
                batch_id = await make_batch(connection, [5])
                await notify(connection, WORK, "test")
                await until(pool, batch_id, lambda status: status.state.terminal)

    in_pool(database_18, body)


def test_without_the_listening_connection_polling_goes_on(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        async with running_bell(str(pool.conninfo)) as bell, working(CONFIG, pool, bell):
            await bell.listening.wait()
            assert await one(connection, f"SELECT count(pg_terminate_backend(pid)) {LISTENERS}") == (1,)
            batch_id = await make_batch(connection, [50])
            status = await until(pool, batch_id, lambda status: status.state.terminal)
            assert status.counts.completed == 50
            await heard_again(bell, connection)

    in_pool(database_18, body)


def test_the_bell_rings_again_once_it_listens_again(database_18: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        async with running_bell(str(pool.conninfo)) as bell:
            with bell.subscribe(WORK, heard.put_nowait):
                # Beginning to listen rings by itself: what happened before was not heard.
                assert await heard.get() == ""
                await notify(connection, WORK, "first")
                assert await heard.get() == "first"
                await one(connection, f"SELECT count(pg_terminate_backend(pid)) {LISTENERS}")
                assert await heard.get() == ""
                await notify(connection, WORK, "second")
                assert await heard.get() == "second"

    in_pool(database_18, body)


def test_behind_a_pooler_there_is_no_bell_and_work_goes_on(pooler: str, database_18: str) -> None:
    pooled_database = make_conninfo(pooler, dbname=conninfo_to_dict(database_18)["dbname"])

    async def body(pool: Pool, connection: Connection) -> None:
        bell = NoticeListener(pooled_database)
        await bell.run()
        assert not bell.listening.is_set()
        async with working(CONFIG, pool, bell):
            batch_id = await make_batch(connection, [50])
            status = await until(pool, batch_id, lambda status: status.state.terminal)
            assert status.counts.completed == 50

    in_pool(pooled_database, body)
