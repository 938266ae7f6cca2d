"""Batches that grow while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.growth import NewInput, NotGrowing, create_growing_batch, grow_batch, seal_batch
from penstock.batches.read import get_batch
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.claim import claim as claims
from penstock.db import arrays
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.export.merged import read_results_page
from penstock.model import BatchState, Lease, OutcomeState
from tests.support.db import one, with_connection
from tests.support.engine import count_leased
from tests.support.wishes import ENDPOINT, POOL, answer, take

Move = Callable[[Connection, UUID], Coroutine[Any, Any, bool]]


async def growing(connection: Connection) -> UUID:
    return await create_growing_batch(connection, owner="local", pool=POOL, filename="found")


def inputs(names: Sequence[str], route: str = "model-0") -> list[NewInput]:
    return [NewInput(route, ENDPOINT, name, b'{"name": "%s"}' % name.encode(), name) for name in names]


async def state(connection: Connection, batch_id: UUID) -> tuple[BatchState, int, int, int]:
    batch = await get_batch(connection, batch_id, None)
    assert batch is not None
    return batch.state, batch.counts.total, batch.counts.pending, batch.counts.completed


def taken(leases: Sequence[Lease]) -> int:
    return count_leased(leases)


def test_it_completes_only_once_it_is_sealed(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await growing(connection)
        assert not await finish_batch(connection, batch_id)
        assert await grow_batch(connection, batch_id, inputs("ab")) == 2
        await answer(connection, await take(connection))
        # All that there is is done, and it goes on.
        assert not await finish_batch(connection, batch_id)
        assert await state(connection, batch_id) == (BatchState.IN_PROGRESS, 2, 0, 2)

        more = inputs("cd") + inputs("ef", "model-1") + inputs("g")
        assert await grow_batch(connection, batch_id, more) == 7
        assert await state(connection, batch_id) == (BatchState.IN_PROGRESS, 7, 5, 2)
        leases = await take(connection)
        assert taken(leases) == 5
        assert await seal_batch(connection, batch_id)
        assert await state(connection, batch_id) == (BatchState.IN_PROGRESS, 7, 0, 2)
        await answer(connection, leases)
        assert await finish_batch(connection, batch_id)
        assert (await state(connection, batch_id))[0] is BatchState.COMPLETED
        rows = await read_results_page(connection, batch_id)
        assert [(row.line, row.custom_id, row.route) for row in rows] == [
            (n + 1, name, "model-1" if name in "ef" else "model-0") for n, name in enumerate("abcdefg")
        ]
        assert rows[6].body == b'{"name": "g"}'
        assert await one(connection, "SELECT lines, bytes FROM penstock.files WHERE kind = 'input'") == (7, 7 * 13)

    with_connection(database, body)


def test_sealing_ends_what_is_done_already(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        empty, full = await growing(connection), await growing(connection)
        await grow_batch(connection, full, inputs("a"))
        await answer(connection, await take(connection))
        for batch_id, total in ((empty, 0), (full, 1)):
            assert await seal_batch(connection, batch_id)
            assert await state(connection, batch_id) == (BatchState.COMPLETED, total, 0, total)
            assert not await seal_batch(connection, batch_id)

    with_connection(database_18, body)


def test_nothing_is_added_where_nothing_would_run(database_18: str) -> None:
    async def refuse(connection: Connection, batch_id: UUID) -> None:
        with pytest.raises(NotGrowing, match="takes no more inputs"):
            await grow_batch(connection, batch_id, inputs("z"))

    async def body(connection: Connection) -> None:
        sealed, cancelled, deleted = [await growing(connection) for _ in range(3)]
        for batch_id in (sealed, cancelled, deleted):
            await grow_batch(connection, batch_id, inputs("a"))
        await seal_batch(connection, sealed)
        await cancel_batch(connection, cancelled)
        await refuse(connection, cancelled)
        assert await finish_batch(connection, cancelled)
        assert (await state(connection, cancelled))[:2] == (BatchState.CANCELLED, 1)
        await cancel_batch(connection, deleted)
        await finish_batch(connection, deleted)
        assert await erase.delete_batch(connection, deleted, None)
        for batch_id in (sealed, cancelled, deleted):
            await refuse(connection, batch_id)
        assert await one(connection, "SELECT count(*) FROM penstock.templates WHERE custom_id = 'z'") == (0,)

    with_connection(database_18, body)


def test_a_paused_batch_grows_and_runs_nothing(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await growing(connection)
        await grow_batch(connection, batch_id, inputs("a"))
        await pause_batch(connection, batch_id)
        await grow_batch(connection, batch_id, inputs("b") + inputs("c", "model-1"))
        assert await take(connection) == []
        await resume_batch(connection, batch_id)
        assert taken(await take(connection)) == 3

    with_connection(database_18, body)


def test_many_add_at_once_and_every_place_is_filled_once(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await growing(connection)

        async def add(number: int) -> None:
            async with await psycopg.AsyncConnection.connect(database, autocommit=True) as mine:
                arrays.register(mine)
                for turn in range(5):
                    names = [f"{number}-{turn}-{n}" for n in range(3)]
                    await grow_batch(mine, batch_id, inputs(names, f"model-{(number + turn) % 3}"))

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(add(number))
        got = 0
        while leases := await take(connection, 20):
            got += taken(leases)
            await answer(connection, leases)
        assert got == 90
        assert await seal_batch(connection, batch_id)
        assert (await state(connection, batch_id))[:2] == (BatchState.COMPLETED, 90)
        places = "SELECT count(*), count(DISTINCT line), max(line), count(DISTINCT custom_id) FROM penstock.templates"
        assert await one(connection, places) == (90, 90, 90, 90)
        dense = "SELECT bool_and(n = total) FROM (SELECT count(*) n, source_lane FROM penstock.templates GROUP BY 2) t"
        assert await one(connection, dense + " JOIN penstock.file_lanes USING (source_lane)") == (True,)

    with_connection(database, body)


def test_work_discovered_while_it_runs(database_18: str) -> None:
    """Each input finds two more, to a depth: what a processor does that follows links."""

    async def body(connection: Connection) -> None:
        batch_id = await growing(connection)
        await grow_batch(connection, batch_id, inputs("r"))
        while leases := await take(connection, 4):
            for lease in leases:
                for item in await claims.read_bodies(connection, lease, lease.ranges, max_rows=10, max_bytes=10_000):
                    if len(item.custom_id) < 5:
                        await grow_batch(connection, batch_id, inputs([f"{item.custom_id}0", f"{item.custom_id}1"]))
            await answer(connection, leases)
        assert await seal_batch(connection, batch_id)
        assert (await state(connection, batch_id))[:2] == (BatchState.COMPLETED, 31)
        done = "SELECT count(*) FROM penstock.outcomes WHERE state = %s"
        assert await one(connection, done, [OutcomeState.COMPLETED]) == (31,)

    with_connection(database_18, body)


@pytest.mark.parametrize("move", [pause_batch, cancel_batch, resume_batch], ids=lambda move: move.__name__)
def test_lanes_that_are_added_meanwhile_are_steered_too(database: str, move: Move) -> None:
    """Whoever steers waits for whoever adds, and then sees what was added."""

    async def body(connection: Connection) -> None:
        batch_id = await growing(connection)
        await grow_batch(connection, batch_id, inputs("a"))
        if move is resume_batch:
            await pause_batch(connection, batch_id)
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as other:
            arrays.register(other)
            async with other.transaction():
                await grow_batch(other, batch_id, inputs("b", "model-1"))
                moving = asyncio.create_task(move(connection, batch_id))
                await until_blocked(other, connection)
            assert await moving
            cursor = await other.execute("SELECT array_agg(open) FROM penstock.lanes")
            assert await cursor.fetchone() == ([move is resume_batch] * 2,)
        if move is cancel_batch:
            assert await finish_batch(connection, batch_id)

    with_connection(database, body)


async def until_blocked(watcher: Connection, waiting: Connection) -> None:
    async with asyncio.timeout(30):
        while True:
            cursor = await watcher.execute("SELECT cardinality(pg_blocking_pids(%s))", [waiting.info.backend_pid])
            if await cursor.fetchone() != (0,):
                return


def test_nothing_is_added_past_the_deadline(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await growing(connection)
        await connection.execute("UPDATE penstock.batches SET deadline = now()")
        with pytest.raises(NotGrowing, match="takes no more inputs"):
            await grow_batch(connection, batch_id, inputs("a"))

    with_connection(database_18, body)
