"""Duties that one process does for all: in each interval one has the turn, whichever of them lives."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from penstock.db.duties import take_turn
from penstock.db.pool import Connection
from tests.support.db import connected, with_connection

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_one_process_at_a_time_has_the_turn(database: str) -> None:
    async def body(connection: Connection) -> None:
        assert await take_turn(connection, "round", 1.0, now=NOW)
        assert not await take_turn(connection, "round", 1.0, now=after(0.7))
        assert await take_turn(connection, "stuck", 1.0, now=NOW)
        async with connected(database) as other:
            async with other.transaction():
                assert await take_turn(other, "round", 1.0, now=after(1))
                # Its turn is being written: not to be waited for.
                assert not await take_turn(connection, "round", 1.0, now=after(9))
            assert await take_turn(connection, "round", 1.0, now=after(9))

    with_connection(database, body)


def test_a_duty_nobody_has_done_yet_is_due(database: str) -> None:
    async def body(connection: Connection) -> None:
        assert await take_turn(connection, "a new duty", 60.0, now=NOW)
        assert not await take_turn(connection, "a new duty", 60.0, now=after(30))
        assert await take_turn(connection, "a new duty", 60.0, now=after(60))

    with_connection(database, body)


def test_of_many_at_once_one_has_the_turn(database: str) -> None:
    async def body(_: Connection) -> None:
        async def ask(seconds: float) -> bool:
            async with connected(database) as connection:
                return await take_turn(connection, "crowded", 1.0, now=after(seconds))

        for second in range(5):
            turns = await asyncio.gather(*(ask(second) for _ in range(8)))
            assert sum(turns) == 1

    with_connection(database, body)
