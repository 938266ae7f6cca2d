"""The database refuses, in every way it has: work waits and goes on. It never costs an input an attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.batches.read import read_status
from penstock.config import ClaimLimits, Config, DatabaseLimits, LivenessLimits, RetryLimits, SettleLimits
from penstock.db.pool import Connection, Pool, open_pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import BatchState, Item, Outcome, OutcomeState, Verdict
from penstock.worker.worker import Worker
from tests.support.db import connected, one
from tests.support.engine import make_batch

DEADLINE_S = 60.0
PER_PHASE = 30
CONFIG = Config(
    claim=ClaimLimits(claim_min=4, claim_max=4, claim_poll_s=0.01),
    settle=SettleLimits(settle_interval_s=0.005),
    liveness=LivenessLimits(heartbeat_interval_s=0.1, heartbeat_grace_s=30),
    database=DatabaseLimits(statement_timeout_s=1, pool_max=3),
)
DONE = Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=1)

CODES = {
    "query_canceled": "57014",
    "lock_not_available": "55P03",
    "deadlock_detected": "40P01",
    "admin_shutdown": "57P01",
    "too_many_connections": "53300",
    "read_only_sql_transaction": "25006",
    "disk_full": "53100",
}
ALIKE = ("lock_not_available", "too_many_connections")
"""Treated as `deadlock_detected` and `disk_full` are; and both come about in earnest below."""
PLACES = {
    "claim": ("leases", "INSERT"),
    "settle": ("outcomes", "INSERT"),
    "heartbeat": ("workers", "UPDATE"),
    "housekeeping": ("progress", "DELETE"),
}


@dataclass
class Rig:
    """A worker at work, whose calls end only as the test lets them."""

    db: Connection
    """The test's own connection, which no fault touches."""
    name: str
    worker: Worker
    batch: UUID
    calls: asyncio.Semaphore
    log: pytest.LogCaptureFixture
    allowed: int = 0
    seen: list[int] = field(default_factory=list)

    def allow(self, count: int = PER_PHASE) -> None:
        self.allowed += count
        for _ in range(count):
            self.calls.release()

    async def completed(self) -> int:
        return (await read_status(self.db, self.batch)).counts.completed

    async def catches_up(self) -> None:
        """Everything that was allowed has its outcome."""
        await until(lambda: self._has(self.allowed))

    async def _has(self, count: int) -> bool:
        return await self.completed() >= count

    async def feels(self, word: str) -> None:
        """Somebody in the worker has said so."""

        async def said() -> bool:
            return any(word in record.getMessage() for record in self.log.records)

        await until(said)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():
            await asyncio.sleep(0.01)


Body = Callable[[Rig], Awaitable[None]]


def with_worker(
    admin: str, phases: int, body: Body, caplog: pytest.LogCaptureFixture, *, user: str | None = None
) -> None:
    """Run a worker beside the body, then see that everything was done once and nothing was charged."""

    async def run() -> None:
        conninfo = make_conninfo(admin, user=user) if user else admin
        async with connected(admin) as db:
            pool = await open_pool(conninfo, CONFIG.database)
            try:
                await work(db, pool)
            finally:
                await pool.close()
            await no_connection_is_left(db)

    async def work(db: Connection, pool: Pool) -> None:
        rig = await prepare(db, pool, phases * PER_PHASE, caplog)
        running = asyncio.create_task(rig.worker.run())
        try:
            await body(rig)
            await until(lambda: has_ended(rig))
        finally:
            rig.worker.stop()
            await asyncio.wait_for(running, DEADLINE_S)
        await all_is_well(rig)

    asyncio.run(run())


async def prepare(db: Connection, pool: Pool, lines: int, caplog: pytest.LogCaptureFixture) -> Rig:
    calls = asyncio.Semaphore(0)
    seen: list[int] = []

    async def call(item: Item) -> Verdict:
        await calls.acquire()
        seen.append(item.ordinal)
        return DONE

    worker = Worker(CONFIG, pool, "test", CoroutineDispatcher(each(call), 4, RetryLimits()))
    batch = await make_batch(db, [lines])
    (name,) = await one(db, "SELECT current_database()")
    return Rig(db, name, worker, batch, calls, caplog, seen=seen)


async def has_ended(rig: Rig) -> bool:
    return (await read_status(rig.db, rig.batch)).state.terminal


async def all_is_well(rig: Rig) -> None:
    status = await read_status(rig.db, rig.batch)
    assert status.state is BatchState.COMPLETED
    assert (status.counts.completed, status.counts.retried) == (rig.allowed, 0)
    assert sorted(rig.seen) == list(range(rig.allowed)), "called once each: the fault was the database's"
    assert await one(rig.db, "SELECT count(*), max(attempts) FROM penstock.outcomes") == (rig.allowed, 1)
    for table in ("attempts", "gates", "leases", "deferrals", "workers"):
        assert await one(rig.db, f"SELECT count(*) FROM penstock.{table}") == (0,), table
    assert rig.worker.lost_identities == 0
    assert rig.worker.halts == {}
    assert rig.worker.trouble == ""


async def no_connection_is_left(db: Connection) -> None:
    async def gone() -> bool:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        return await one(db, query) == (0,)

    await until(gone)


# -- errors of every class, raised where the statement writes


@asynccontextmanager
async def raised(rig: Rig, place: str, code: str) -> AsyncIterator[None]:
    """Every such statement fails with this SQLSTATE, after counting that it did: sequences are not rolled back."""
    table, event = PLACES[place]
    await rig.db.execute(
        f"""
        CREATE SEQUENCE felt_{place};
        CREATE FUNCTION refuse_{place}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
          PERFORM nextval('felt_{place}');
          RAISE EXCEPTION 'injected' USING ERRCODE = '{code}';
        END $$;
        CREATE TRIGGER refuse BEFORE {event} ON penstock.{table}
          FOR EACH STATEMENT EXECUTE FUNCTION refuse_{place}();
        """.encode()
    )
    try:
        yield
    finally:
        await rig.db.execute(f"DROP TRIGGER refuse ON penstock.{table}".encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        # The class decides what is done about an error: one of each in every run.
        pytest.param(code, id=name, marks=[pytest.mark.again] if name in ALIKE else [])
        for name, code in CODES.items()
    ],
)
def test_an_error_anywhere_delays_and_costs_nothing(
    database_18: str, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    async def body(rig: Rig) -> None:
        rig.allow()
        await rig.catches_up()
        for place in PLACES:
            async with raised(rig, place, code):
                rig.allow()
                await until(partial(was_felt, rig, place))
            await rig.catches_up()

    async def was_felt(rig: Rig, place: str) -> bool:
        # Twice: the worker has tried again while the fault lasted.
        return await one(rig.db, f"SELECT is_called AND last_value > 1 FROM felt_{place}") == (True,)

    with_worker(database_18, 1 + len(PLACES), body, caplog)


# -- the real thing


async def terminate(rig: Rig) -> None:
    await rig.db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


async def configure(rig: Rig, setting: str) -> None:
    await rig.db.execute(f"ALTER DATABASE {rig.name} {setting}".encode())


@asynccontextmanager
async def statements_time_out(rig: Rig) -> AsyncIterator[None]:
    """Somebody locks the outcomes for longer than a statement may take."""
    async with rig.db.transaction():
        await rig.db.execute("LOCK TABLE penstock.outcomes IN ACCESS EXCLUSIVE MODE")
        rig.allow()
        await rig.feels("statement timeout")
        yield


@asynccontextmanager
async def locks_time_out(rig: Rig) -> AsyncIterator[None]:
    await configure(rig, "SET lock_timeout = '50ms'")
    await terminate(rig)
    async with rig.db.transaction():
        await rig.db.execute("LOCK TABLE penstock.outcomes IN ACCESS EXCLUSIVE MODE")
        rig.allow()
        await rig.feels("lock timeout")
        yield
    await configure(rig, "RESET lock_timeout")


@asynccontextmanager
async def sessions_are_ended(rig: Rig) -> AsyncIterator[None]:
    """Again and again, while there is work."""
    for _ in range(10):
        rig.allow(PER_PHASE // 10)
        await terminate(rig)
        await rig.catches_up()
    yield


@asynccontextmanager
async def transactions_are_read_only(rig: Rig) -> AsyncIterator[None]:
    await configure(rig, "SET default_transaction_read_only = on")
    await terminate(rig)
    rig.allow()
    await rig.feels("read-only transaction")
    yield
    await rig.db.execute("SET default_transaction_read_only = off")
    await configure(rig, "RESET default_transaction_read_only")


@asynccontextmanager
async def connections_run_out(rig: Rig) -> AsyncIterator[None]:
    await rig.db.execute("ALTER ROLE plain CONNECTION LIMIT 0")
    await terminate(rig)
    rig.allow()
    await rig.feels("too many connections")
    yield
    await rig.db.execute("ALTER ROLE plain CONNECTION LIMIT -1")


Fault = Callable[[Rig], AbstractAsyncContextManager[None]]


@pytest.fixture
def plain_user(database_18: str) -> Iterator[str]:
    """A user whose connections can be limited: a superuser's cannot."""
    # A connection of its own each time: the faults end whatever is connected.
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute("CREATE ROLE plain LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA penstock TO plain")
        connection.execute("GRANT ALL ON ALL TABLES IN SCHEMA penstock TO plain")
    try:
        yield "plain"
    finally:
        with psycopg.connect(database_18, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute("DROP OWNED BY plain")
            connection.execute("DROP ROLE plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [statements_time_out, locks_time_out, sessions_are_ended, transactions_are_read_only, connections_run_out],
    ids=lambda fault: fault.__name__,
)
def test_work_goes_on_after(database_18: str, plain_user: str, caplog: pytest.LogCaptureFixture, fault: Fault) -> None:
    async def body(rig: Rig) -> None:
        rig.allow()
        await rig.catches_up()
        async with fault(rig):
            pass
        await rig.catches_up()
        rig.allow()
        await rig.catches_up()

    with_worker(database_18, 3, body, caplog, user=plain_user)
