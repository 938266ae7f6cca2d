"""Operations that a server does at once: none holds up the others, and none is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from uuid import UUID, uuid4

import pytest

from penstock.batches import reprocess
from penstock.batches.finish import finish_batch
from penstock.batches.reprocess import Doing, Step, Wish
from penstock.config import Config
from penstock.db.pool import Connection
from penstock.model import OutcomeState
from penstock.server import job_operations
from penstock.server.job_operations import JobOperations
from tests.support.db import connected, one, pooled
from tests.support.engine import claim_due, make_batch
from tests.support.wishes import WORKER, answer

ALL = Wish(["failed"], 50, afresh=True)

Body = Callable[[Connection, JobOperations, UUID], Awaitable[None]]


def with_operations(conninfo: str, body: Body) -> None:
    """Run a body with the operations of a server that is alive."""

    async def run() -> None:
        async with connected(conninfo) as connection, pooled(conninfo) as pool:
            server = uuid4()
            await connection.execute(
                "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
                " VALUES (%s, 'serve', 'h', 'm', 1, 0, now(), now())",
                [server],
            )
            await body(connection, JobOperations(Config(), pool), server)

    asyncio.run(run())


async def start(connection: Connection, *, blocked: bool = False) -> UUID:
    """An operation on a job with a failure; its only place is taken by another row, if the job is `blocked`."""
    pool = uuid4().hex
    batch_id = await make_batch(connection, [2 if blocked else 1], pool=pool, width=1 if blocked else None)
    claim = partial(claim_due, connection, pool=pool, wants={"model-0": 1}, worker_id=WORKER)
    await answer(connection, await claim(), OutcomeState.FAILED)
    if blocked:
        assert await claim()
    else:
        assert await finish_batch(connection, batch_id)
    return (await reprocess.start(connection, batch_id, ALL))[0]


async def state(connection: Connection, operation_id: UUID) -> str:
    (found,) = await one(connection, "SELECT state FROM penstock.operations WHERE id = %s", [operation_id])
    return str(found)


def test_those_without_room_hold_up_nobody(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_operations, "_AT_ONCE", 2)

    async def body(connection: Connection, operations: JobOperations, server: UUID) -> None:
        blocked = [await start(connection, blocked=True) for _ in range(2)]
        free = await start(connection)
        for _ in range(2):
            assert await operations.step(server)
        assert await state(connection, free) == "done"
        assert {await state(connection, each) for each in blocked} == {"running"}
        # Any server can go on with them.
        assert await one(connection, "SELECT count(worker_id) FROM penstock.operations") == (0,)
        await connection.execute("UPDATE penstock.lanes SET width = 3 WHERE width = 1")
        while await operations.step(server):
            pass
        assert {await state(connection, each) for each in blocked} == {"done"}

    with_operations(database, body)


def test_one_that_was_taken_without_its_knowing_is_done(database: str) -> None:
    """The connection broke after the take and before its answer."""

    async def body(connection: Connection, operations: JobOperations, server: UUID) -> None:
        lost = await start(connection)
        assert await reprocess.take(connection, server, 30)
        while await operations.step(server):
            pass
        assert await state(connection, lost) == "done"

    with_operations(database, body)


def test_one_that_fails_is_tried_again_and_the_others_go_on(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(connection: Connection, operations: JobOperations, server: UUID) -> None:
        failing, other = await start(connection), await start(connection)
        do_step = reprocess.do_step

        async def fail_first(connection: Connection, doing: Doing, worker_id: UUID) -> Step:
            if doing.id == failing:
                await connection.execute("SELECT 1 / 0")
            return await do_step(connection, doing, worker_id)

        monkeypatch.setattr(job_operations, "do_step", fail_first)
        while await operations.step(server):
            pass
        assert [await state(connection, each) for each in (failing, other)] == ["running", "done"]
        monkeypatch.setattr(job_operations, "do_step", do_step)
        assert not await operations.step(server), "not at once"
        monkeypatch.setattr(job_operations, "monotonic", lambda: float("inf"))
        while await operations.step(server):
            pass
        assert await state(connection, failing) == "done"

    with_operations(database, body)
