"""Deletion beside everything else, in every order: what is deleted is out of reach, what is kept is exact."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.read import get_batch
from penstock.batches.validate import request_batch
from penstock.claim import liveness
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.erase import purge as erase_purge
from penstock.model import BatchState
from tests.race.test_interleavings import (
    EVERY,
    LIMITS,
    Move,
    Scene,
    Setting,
    Stage,
    cancelling,
    claim,
    complete,
    end,
    last_item,
    one_at_a_time,
    over,
    paused,
    reclaim,
    rerun,
    running,
    some_failed,
    take,
)
from tests.race.test_lock_order import LOOPS, Bustle, loop, prepare
from tests.support.db import connected, one
from tests.support.engine import make_file, tidy
from tests.support.interleave import Interleaver, Order, Statement, interleaver, named, orders, orders_of_twins
from tests.support.thorough import some

SETTINGS: tuple[Setting, ...] = (running, last_item, some_failed, over, paused, cancelling, one_at_a_time)
_LEFT = """
SELECT (SELECT count(*) FROM penstock.leases WHERE batch_id = %(batch)s)
     + (SELECT count(*) FROM penstock.deferrals WHERE batch_id = %(batch)s)
     + (SELECT count(*) FROM penstock.progress WHERE batch_id = %(batch)s)
     + (SELECT count(*) FROM penstock.journal WHERE batch_id = %(batch)s)
     + (SELECT count(*) FROM penstock.batches WHERE id = %(batch)s)
     + (SELECT count(*) FROM penstock.files WHERE batch_id = %(batch)s)
     + (SELECT count(*) FROM penstock.outcomes WHERE lane_id = ANY (%(lanes)s))
     + (SELECT count(*) FROM penstock.attempts WHERE lane_id = ANY (%(lanes)s))
     + (SELECT count(*) FROM penstock.reclaims WHERE lane_id = ANY (%(lanes)s))
     + (SELECT count(*) FROM penstock.lanes WHERE id = ANY (%(lanes)s))
"""


async def delete_batch(connection: Connection, scene: Scene) -> object:
    return await erase.delete_batch(connection, scene.batch, None)


async def delete_file(connection: Connection, scene: Scene) -> object:
    return await erase.delete_file(connection, FILES[scene.batch], None)


async def purge(connection: Connection, _: Scene) -> object:
    return await erase_purge.purge_step(connection, 3)


FILES: dict[UUID, UUID] = {}


class Ruins(Stage):
    """A stage on which batches have files of their own, and are judged by what is left of them."""

    async def play(self, setting: Setting, moves: tuple[Move, ...], order: Order) -> None:
        self._files.clear()
        scene = await self.scene(setting)
        ((file_id,),) = await self.ask("SELECT file_id FROM penstock.batches WHERE id = %s", scene.batch)
        FILES[scene.batch] = file_id
        lanes = [lane for (lane,) in await self.ask("SELECT id FROM penstock.lanes WHERE batch_id = %s", scene.batch)]
        try:
            play = await self._turns.play(order, [_bound(move, scene) for move in moves])
            for number, move in enumerate(moves):
                assert move is not claim or not play.was_blocked(number), "a claim waits for nobody"
                assert move is not purge or not play.was_blocked(number), "nor does a purge"
            if delete_batch in moves:
                await self._nothing_is_left(scene, lanes)
            else:
                await self._what_is_kept_is_exact(scene)
        except BaseException as error:
            error.add_note(f"{setting.__name__}: {named(order, [move.__name__ for move in moves])}")
            raise

    async def ask(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        return await (await self.db.execute(query.encode(), parameters)).fetchall()

    async def _nothing_more_comes(self, scene: Scene) -> None:
        assert await take(self.db, scene, scene.claimer) == []
        settled = await complete(self.db, scene)
        assert settled.outcomes == 0  # type: ignore[attr-defined]
        await liveness.reclaim(self.db, uuid4(), LIMITS, stuck_s=1e6, gone=[scene.holder, scene.claimer])
        await tidy(self.db, scene.batch)
        await finish_batch(self.db, scene.batch)

    async def _nothing_is_left(self, scene: Scene, lanes: list[object]) -> None:
        assert await get_batch(self.db, scene.batch, None) is None
        await self._nothing_more_comes(scene)
        while await erase_purge.purge_step(self.db, 100):
            pass
        assert await one(self.db, _LEFT, {"batch": scene.batch, "lanes": lanes}) == (0,)

    async def _what_is_kept_is_exact(self, scene: Scene) -> None:
        await self._nothing_more_comes(scene)
        batch = await get_batch(self.db, scene.batch, None)
        assert batch is not None
        assert batch.file_id is None
        assert batch.state in (BatchState.CANCELLED, BatchState.COMPLETED)
        places = await self._places(scene)
        assert batch.counts.settled == sum(len(place["settled"]) for place in places)
        assert batch.counts.completed == sum(place["completed"] for place in places)
        assert (batch.state is BatchState.COMPLETED) == (batch.counts.settled == batch.counts.total)
        assert not any(place["leased"] or place["unheld"] for place in places)
        while await erase_purge.purge_step(self.db, 100):
            pass
        ((templates,),) = await self.ask("SELECT count(*) FROM penstock.templates")
        assert templates == 0


def _bound(move: Move, scene: Scene) -> Statement:
    return lambda connection: move(connection, scene)


def on_ruins(conninfo: str, sessions: int, body: Callable[[Ruins], Awaitable[None]]) -> None:
    async def run() -> None:
        async with interleaver(conninfo, sessions) as turns:
            await body(Ruins(turns))

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("delete", [delete_batch, delete_file])
def test_deletion_beside_any_move_in_any_order(database_18: str, setting: Setting, delete: Move) -> None:
    async def body(stage: Ruins) -> None:
        for move in (*EVERY, purge):
            for order in orders(2, scenes=True):
                await stage.play(setting, (delete, move), order)
        for order in orders_of_twins():
            await stage.play(setting, (delete, delete), order)
        for order in orders(2):
            await stage.play(setting, (delete_batch, delete_file), order)

    on_ruins(database_18, 2, body)


TRIPLES: list[tuple[Setting, tuple[Move, Move, Move]]] = [
    (running, (delete_file, claim, complete)),
    (running, (delete_batch, claim, complete)),
    (running, (delete_file, reclaim, complete)),
    (over, (delete_file, rerun, end)),
    (over, (delete_batch, rerun, end)),
    (one_at_a_time, (delete_file, claim, complete)),
    (one_at_a_time, (delete_batch, complete, reclaim)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "moves"), TRIPLES, ids=lambda value: value.__name__ if callable(value) else value[0].__name__
)
def test_deletion_beside_two_moves(database: str, setting: Setting, moves: tuple[Move, Move, Move]) -> None:
    async def body(stage: Ruins) -> None:
        for order in orders(3):
            await stage.play(setting, moves, order)

    on_ruins(database, 3, body)


async def delete_all(conninfo: str, bustle: Bustle, seed: int) -> None:
    """One after the other, files and batches, while everybody is at them; then everything that is left of them."""
    dice = random.Random(seed)
    async with connected(conninfo) as connection:
        await connection.execute("SET deadlock_timeout = '100ms'")
        try:
            for batch in bustle.batches:
                batch_row = await get_batch(connection, batch, None)
                assert batch_row is not None
                if dice.random() < 0.5 and batch_row.file_id is not None:
                    assert await erase.delete_file(connection, batch_row.file_id, None)
                else:
                    assert await erase.delete_batch(connection, batch, None)
        except psycopg.errors.DeadlockDetected as error:
            raise AssertionError(f"deadlock in a deletion: {error}") from error


async def purge_all(conninfo: str, stop: asyncio.Event) -> None:
    async with connected(conninfo) as connection:
        await connection.execute("SET lock_timeout = '1ms'")
        while await erase_purge.purge_step(connection, 20) or not stop.is_set():
            await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("width", some([None, 4], 1))
def test_batches_deleted_while_they_are_worked_on(database: str, width: int | None) -> None:
    """With purges beside it: none of them waits, and nobody deadlocks."""

    async def run() -> None:
        async with connected(database) as connection:
            for seed in range(4):
                bustle = await prepare(connection, width)
                stop = asyncio.Event()
                async with asyncio.TaskGroup() as group:
                    purges = [group.create_task(purge_all(database, stop)) for _ in range(2)]
                    working = [
                        group.create_task(loop(database, moves, bustle, 10, 10 * seed + number))
                        for number, moves in enumerate(LOOPS)
                    ]
                    deleting = group.create_task(delete_all(database, bustle, seed))
                    await asyncio.wait([*working, deleting])
                    stop.set()
                    await asyncio.wait(purges)
                await purge_all(database, stop)
                for batch in bustle.batches:
                    row = await get_batch(connection, batch, None)
                    if row is not None:
                        assert row.state is BatchState.CANCELLED
                query = (
                    "SELECT (SELECT count(*) FROM penstock.leases),"
                    " (SELECT count(*) FROM penstock.templates t WHERE NOT EXISTS"
                    "   (SELECT FROM penstock.files f WHERE f.source_id = t.source_id)),"
                    " (SELECT count(*) FROM penstock.outcomes o WHERE NOT EXISTS"
                    "   (SELECT FROM penstock.lanes l WHERE l.id = o.lane_id)),"
                    " (SELECT count(*) FROM penstock.erasures WHERE finished_at IS NULL)"
                )
                assert await one(connection, query) == (0, 0, 0, 0)
                await connection.execute("DELETE FROM penstock.workers")

    asyncio.run(run())


def test_a_deletion_takes_leases_and_lanes_as_a_settle_does(database: str) -> None:
    """Lanes of width 1: a settle holds its lease and needs the lane, which the deletion closes."""

    async def body(turns: Interleaver) -> None:
        stage = Ruins(turns)
        for delete in (delete_file, delete_batch):
            for order in orders(2):
                await stage.play(one_at_a_time, (complete, delete), order)

    async def run() -> None:
        async with interleaver(database, 2) as turns:
            await body(turns)

    asyncio.run(run())


def test_a_file_cannot_be_run_while_it_is_being_deleted(database: str) -> None:
    async def body(turns: Interleaver) -> None:
        db = turns.observer
        for order in orders(2):
            file_id = await make_file(db, [3])

            async def ask(connection: Connection, file_id: UUID = file_id) -> object:
                plain: dict[str, Any] = {"endpoint": None, "completion_window": None, "window_s": None}
                return await request_batch(connection, owner="local", dialect="openai", file_id=file_id, **plain)

            async def delete(connection: Connection, file_id: UUID = file_id) -> object:
                return await erase.delete_file(connection, file_id, None)

            play = await turns.play(order, [ask, delete])
            assert play.answers[1] is True
            if play.answers[0] is not None:
                batch = await get_batch(db, play.answers[0].batch.id, None)
                assert batch is not None
                assert (batch.state, batch.file_id) == (BatchState.CANCELLED, None)

    async def run() -> None:
        async with interleaver(database, 2) as turns:
            await body(turns)

    asyncio.run(run())
