"""Images of rows: one of each for an owner, never shared by two, gone with the last row that uses them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import psycopg
import pytest

from penstock.blobs.blobs import Erased, NewUse, Place, erase_images, read_images, run_steps, store_images
from penstock.db.pool import Connection
from tests.support.db import connected, one, with_connection

FIRST, SECOND = Place(1, 0), Place(2, 0)


def uses_of(*images: bytes, first: int = 0) -> list[NewUse]:
    return [NewUse(ordinal, hashlib.sha256(data).digest(), data) for ordinal, data in enumerate(images, first)]


async def store(connection: Connection, owner: str, place: Place, uses: Sequence[NewUse]) -> None:
    async with connection.transaction():
        await run_steps(connection, store_images(owner, place, uses))


async def erase(connection: Connection, place: Place, start: int = 0, total: int = 100, rows: int = 10) -> Erased:
    async with connection.transaction():
        return await run_steps(connection, erase_images(place, start, total, rows))


async def counts(connection: Connection) -> tuple[int, ...]:
    """Images, those with bytes, and uses."""
    return tuple(
        [
            (await one(connection, f"SELECT count(*) FROM penstock.{table}"))[0]
            for table in ("blobs", "blob_bytes", "blob_uses")
        ]
    )


def test_an_owner_has_each_image_once(database: str) -> None:
    async def body(connection: Connection) -> None:
        await store(connection, "alice", FIRST, uses_of(b"a", b"b", b"a"))
        await store(connection, "alice", FIRST, uses_of(b"b", b"c", first=3))
        await store(connection, "alice", SECOND, uses_of(b"a"))
        assert await counts(connection) == (3, 3, 6)
        read = await read_images(connection, FIRST, range(10), 1_000)
        assert (read.by_ordinal, read.stop) == ({0: b"a", 1: b"b", 2: b"a", 3: b"b", 4: b"c"}, None)

    with_connection(database, body)


def test_owners_never_share(database: str) -> None:
    async def body(connection: Connection) -> None:
        await store(connection, "alice", FIRST, uses_of(b"a"))
        await store(connection, "bob", SECOND, uses_of(b"a"))
        assert await counts(connection) == (2, 2, 2)
        await erase(connection, FIRST)
        assert await counts(connection) == (1, 1, 1)
        assert (await read_images(connection, SECOND, [0], 1)).by_ordinal == {0: b"a"}

    with_connection(database, body)


def test_as_many_are_read_as_there_is_room_for(database: str) -> None:
    async def body(connection: Connection) -> None:
        await store(connection, "alice", FIRST, uses_of(bytes(100), bytes(50), bytes(60), first=1))
        for room, found, stop in ((1, [1], 2), (100, [1], 2), (150, [1, 2], 3), (210, [1, 2, 3], None)):
            read = await read_images(connection, FIRST, [0, 1, 2, 3, 4], room)
            assert (list(read.by_ordinal), read.stop) == (found, stop), room
        assert await read_images(connection, SECOND, [0, 1], 100) == ({}, None)

    with_connection(database, body)


def test_an_image_goes_with_its_last_use(database: str) -> None:
    async def body(connection: Connection) -> None:
        await store(connection, "alice", FIRST, uses_of(b"a", b"b", b"a", b"c", b"a"))
        await store(connection, "alice", SECOND, uses_of(b"c", b"d"))
        place, images = 0, []
        while True:
            done = await erase(connection, FIRST, place, total=5, rows=2)
            images.append((await counts(connection))[0])
            if done.next == 5:
                break
            assert (done.next, done.uses) == (place + 2, 2)
            place = done.next
        assert images == [3, 3, 2]  # `a` until its third use goes, `c` because the other source has it
        assert (await read_images(connection, SECOND, [0, 1], 100)).by_ordinal == {0: b"c", 1: b"d"}
        assert await erase(connection, SECOND, total=2) == (2, 2)
        assert await counts(connection) == (0, 0, 0)
        assert await erase(connection, SECOND, total=2) == (2, 0)

    with_connection(database, body)


def test_the_schema_refuses_a_use_without_its_image(database: str) -> None:
    async def body(connection: Connection) -> None:
        await store(connection, "alice", FIRST, uses_of(b"a"))
        for statement in (b"INSERT INTO penstock.blob_uses VALUES (9, 0, 0, -1)", b"DELETE FROM penstock.blobs"):
            with pytest.raises(psycopg.errors.ForeignKeyViolation):
                await connection.execute(statement)

    with_connection(database, body)


def test_ingests_and_purges_of_the_same_images_all_at_once(database: str) -> None:
    """Sources come and go, all with the same few images: every use that is left has its bytes, and no other has any."""

    async def come_and_go(source: int) -> None:
        async with connected(database) as connection:
            for _ in range(15):
                await store(connection, "alice", Place(source, 0), uses_of(*IMAGES[source % 2 :: 1 + source % 3]))
                start = 0
                while start < 10:
                    start = (await erase(connection, Place(source, 0), start, total=10, rows=3)).next
            await store(connection, "alice", Place(source, 0), uses_of(*IMAGES[: source % 4]))

    async def body(connection: Connection) -> None:
        await asyncio.gather(*(come_and_go(source) for source in range(6)))
        assert await counts(connection) == (3, 3, 7)
        for source in range(6):
            read = await read_images(connection, Place(source, 0), range(10), 1_000)
            assert list(read.by_ordinal.values()) == IMAGES[: source % 4]
            await erase(connection, Place(source, 0))
        assert await counts(connection) == (0, 0, 0)

    with_connection(database, body)


IMAGES = [b"a", b"b", b"c", b"d", b"e"]
