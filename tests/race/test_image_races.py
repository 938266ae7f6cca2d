"""An image that two jobs have: one is erased while the other is stored, in every order in which they meet."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable

from penstock.blobs.blobs import Erased, NewUse, Place, erase_images, read_images, run_steps, store_images
from penstock.db.pool import Connection
from tests.support.db import one
from tests.support.interleave import Interleaver, interleaver, orders, orders_of_twins

OLD, NEW = Place(1, 0), Place(2, 0)
DATA = b"an image"


async def store(connection: Connection, place: Place) -> None:
    uses = [NewUse(0, hashlib.sha256(DATA).digest(), DATA)]
    await run_steps(connection, store_images("alice", place, uses))


async def erase(connection: Connection, place: Place) -> Erased:
    return await run_steps(connection, erase_images(place, 0, 1, 10))


async def erase_to_the_end(connection: Connection, place: Place) -> None:
    while (await erase(connection, place)).next < 1:
        pass


async def is_whole(connection: Connection, *places: Place) -> None:
    """Each of these has the image, which is there once, or not at all if nobody has it."""
    for place in places:
        assert (await read_images(connection, place, [0], 100)).by_ordinal == {0: DATA}
    counted = "SELECT (SELECT count(*) FROM penstock.blobs), (SELECT count(*) FROM penstock.blob_bytes)"
    assert await one(connection, counted) == ((1, 1) if places else (0, 0))


def taking_turns(conninfo: str, body: Callable[[Interleaver], Awaitable[None]]) -> None:
    async def run() -> None:
        async with interleaver(conninfo, 2) as turns:
            await body(turns)

    asyncio.run(run())


def test_a_purge_beside_an_ingest_of_the_same_image(database: str) -> None:
    async def body(turns: Interleaver) -> None:
        db = turns.observer
        for order in orders(2):
            await store(db, OLD)
            play = await turns.play(order, [lambda c: erase(c, OLD), lambda c: store(c, NEW)])
            assert not play.was_blocked(0), "a purge waits for nobody"
            await erase_to_the_end(db, OLD)
            await is_whole(db, NEW)
            await erase_to_the_end(db, NEW)
            await is_whole(db)

    taking_turns(database, body)


def test_two_ingests_of_a_new_image(database: str) -> None:
    async def body(turns: Interleaver) -> None:
        db = turns.observer
        for order in orders_of_twins():
            await turns.play(order, [lambda c: store(c, OLD), lambda c: store(c, NEW)])
            await is_whole(db, OLD, NEW)
            await erase_to_the_end(db, OLD)
            await erase_to_the_end(db, NEW)
            await is_whole(db)

    taking_turns(database, body)


def test_two_purges_of_the_last_uses(database: str) -> None:
    async def body(turns: Interleaver) -> None:
        db = turns.observer
        for order in orders_of_twins():
            await store(db, OLD)
            await store(db, NEW)
            play = await turns.play(order, [lambda c: erase(c, OLD), lambda c: erase(c, NEW)])
            assert not play.was_blocked(0)
            assert not play.was_blocked(1)
            for place in (OLD, NEW):
                await erase_to_the_end(db, place)
            await is_whole(db)

    taking_turns(database, body)
