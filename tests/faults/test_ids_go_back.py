"""R25, R27: the database goes back in time under a worker that lives on and has calls in flight.

Ids are given out again then. A batch made afterwards gets the very ids of the one that is gone: of its source, its lane
and its lease. The answers of the one are not recorded for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.batches.read import read_status
from penstock.config import ClaimLimits, Config, RetryLimits
from penstock.db.embedded.cluster import ROLE
from penstock.db.migrate import migrate
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import BatchState, Item, Outcome, OutcomeState, Verdict
from penstock.worker.worker import Worker
from tests.support.cluster import OwnCluster
from tests.support.db import connected, pooled
from tests.support.engine import make_batch
from tests.support.wait import wait_until

DEADLINE_S = 60.0
LINES = 8
CONFIG = Config(claim=ClaimLimits(claim_poll_s=0.02))


class Held:
    """An upstream that keeps its callers waiting, and answers each with the batch it was called for."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers = asyncio.Event()

    async def __call__(self, item: Item) -> Verdict:
        self.calls += 1
        await self.answers.wait()
        return Outcome(OutcomeState.COMPLETED, f'"{item.lease.batch_id}"'.encode(), 200)


@contextlib.asynccontextmanager
async def working(conninfo: str, held: Held) -> AsyncIterator[Worker]:
    async with pooled(conninfo) as pool:
        worker = Worker(CONFIG, pool, "test", CoroutineDispatcher(each(held), LINES, RetryLimits()))
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            held.answers.set()
            worker.stop()
            await task


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def rows(conninfo: str, query: str) -> list[tuple[int | bytes | UUID, ...]]:
    async with connected(conninfo) as connection:
        return await (await connection.execute(query.encode())).fetchall()


async def until_found(conninfo: str, query: str) -> list[tuple[int | bytes | UUID, ...]]:
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await rows(conninfo, query)):
            await asyncio.sleep(0.02)
    return found


async def new_batch(conninfo: str) -> UUID:
    async with connected(conninfo) as connection:
        return await make_batch(connection, [LINES])


async def until_completed(conninfo: str, batch_id: UUID) -> None:
    async with connected(conninfo) as connection, asyncio.timeout(DEADLINE_S):
        while (await read_status(connection, batch_id)).state is not BatchState.COMPLETED:
            await asyncio.sleep(0.02)


class Restored:
    """One server; its data is put back to what it was."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._cluster = stack.enter_context(OwnCluster(directory / "primary"))
        self.conninfo = self._cluster.conninfo

    def remember(self) -> None:
        self._backup = self._cluster.copy("backup")

    def go_back(self) -> None:
        self._cluster.put_back(self._backup)


class Promoted:
    """A primary and a standby that has not heard the last of it when it takes over."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self._primary = stack.enter_context(OwnCluster(directory / "primary"))
        copy = self._primary.copy("copy", standby=True)
        self._standby = stack.enter_context(OwnCluster(directory / "standby", backup=copy))
        ports = f"{self._primary.port},{self._standby.port}"
        self.conninfo = make_conninfo(
            host="127.0.0.1,127.0.0.1", port=ports, user=ROLE, dbname=ROLE, target_session_attrs="read-write"
        )

    def remember(self) -> None:
        with (
            psycopg.connect(self._primary.conninfo, autocommit=True) as primary,
            psycopg.connect(self._standby.conninfo, autocommit=True) as standby,
        ):
            (written,) = primary.execute("SELECT pg_current_wal_insert_lsn()").fetchall()
            replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
            wait_until(lambda: standby.execute(replayed, written).fetchone() == (True,), DEADLINE_S)
        self._standby.unfollow()

    def go_back(self) -> None:
        self._primary.stop()
        self._standby.promote()


@pytest.mark.parametrize("way", [Restored, Promoted])
def test_answers_are_not_recorded_for_what_got_their_ids(tmp_path: Path, way: type[Restored | Promoted]) -> None:
    async def body(server: Restored | Promoted) -> None:
        held = Held()
        async with working(server.conninfo, held) as worker:
            await until_found(server.conninfo, "SELECT id FROM penstock.workers")
            await asyncio.to_thread(server.remember)
            old = await new_batch(server.conninfo)
            await until(lambda: held.calls == LINES)
            leases = await rows(server.conninfo, "SELECT id, lane_id FROM penstock.leases")
            await asyncio.to_thread(server.go_back)
            new = await new_batch(server.conninfo)
            again = await until_found(server.conninfo, "SELECT id, lane_id FROM penstock.leases")
            assert (again, new == old) == (leases, False), "the ids are the same, or this test shows nothing"
            held.answers.set()
            await until_completed(server.conninfo, new)
            answers = await rows(server.conninfo, "SELECT DISTINCT response FROM penstock.outcomes")
            assert answers == [(f'"{new}"'.encode(),)]
            assert worker.buffer.tally.fenced == LINES

    with contextlib.ExitStack() as stack:
        server = way(tmp_path, stack)
        migrate(server.conninfo)
        asyncio.run(body(server))
