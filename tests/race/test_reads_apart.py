"""What is read of control and payload tables one after the other, with something happening in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast
from uuid import uuid4

import psycopg
from psycopg.rows import TupleRow
from psycopg.types.json import Jsonb

from penstock.claim import claim as claims
from penstock.db import sql
from penstock.db.pool import Connection
from penstock.deliver.sinks import announce_answered
from penstock.model import Lease
from penstock.sessions.answers import get_request, read_answered
from penstock.sessions.sessions import put_session, resume_session
from tests.support.db import connected, one, with_connection
from tests.support.sessions import DEAD, OWNER, end, send, take, take_items

_DELIVER = sql.load("penstock.deliver", "deliver.sql")

WORKER = uuid4()
Move = Callable[[], Awaitable[object]]


class Interrupted:
    """A connection on which something happens once, after its first statement."""

    def __init__(self, connection: Connection, meanwhile: Move) -> None:
        self._connection = connection
        self._meanwhile: Move | None = meanwhile

    async def execute(self, *statement: Any, **options: Any) -> psycopg.AsyncCursor[TupleRow]:
        cursor = await self._connection.execute(*statement, **options)
        if self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            await meanwhile()
        return cursor


def interrupted(connection: Connection, meanwhile: Move) -> Connection:
    return cast(Connection, Interrupted(connection, meanwhile))


def test_bodies_whose_lease_is_lost_while_they_are_read_are_not_used(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        async with connected(database_18) as other:
            await send(connection, "a", "b")
            leases = await take(connection, WORKER)

            def losing(lease: Lease) -> Connection:
                gone = "DELETE FROM penstock.leases WHERE id = %s"
                return interrupted(connection, lambda: other.execute(gone, [lease.id]))

            first, second = leases
            found = await claims.read_heads(losing(first), leases, max_bytes=1 << 20)
            assert [item.lease for item in found] == [second]
            place = (second, second.ranges)
            assert len(await claims.read_bodies(connection, *place, max_rows=9, max_bytes=9)) == 1
            assert await claims.read_bodies(losing(second), *place, max_rows=9, max_bytes=9) == []

    with_connection(database_18, body)


def test_bodies_of_lost_leases_do_not_hide_the_others(database_18: str) -> None:
    """There is room for one body, and the first is of a lease that is gone."""

    async def body(connection: Connection) -> None:
        await send(connection, "a", "b", "c")
        leases = await take(connection, WORKER)
        await connection.execute("DELETE FROM penstock.leases WHERE id = ANY (%s)", [[leases[0].id, leases[1].id]])
        assert [item.lease for item in await claims.read_heads(connection, leases, max_bytes=1)] == [leases[2]]
        assert await claims.read_heads(connection, leases[:2], max_bytes=1) == []

    with_connection(database_18, body)


def test_a_request_is_never_found_nowhere(database_18: str) -> None:
    """Settled between the two reads it is told as it was, and answered the next time."""

    async def body(connection: Connection) -> None:
        async with connected(database_18) as other:
            (asked,) = await send(connection, "a")
            items = await take_items(connection, WORKER)
            meeting = interrupted(connection, lambda: end(other, WORKER, items))
            row = await get_request(meeting, OWNER, "a", asked.request_id)
            assert row is not None
            assert row.status == "processing"
            (row,) = await read_answered(connection, [asked.request_id])
            assert row.status == "completed"

    with_connection(database_18, body)


def test_an_answer_that_is_taken_back_in_between_is_looked_for_again(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        async with connected(database_18) as other:
            await put_session(connection, OWNER, "a", on_dead_head="block")
            (asked,) = await send(connection, "a")
            await end(connection, WORKER, await take_items(connection, WORKER), DEAD)

            async def run_again() -> None:
                assert await resume_session(other, OWNER, "a", retry_head=True)
                assert len(await take(other, WORKER)) == 1

            meeting = interrupted(connection, run_again)
            row = await get_request(meeting, OWNER, "a", asked.request_id)
            assert row is not None
            assert row.status == "processing"

    with_connection(database_18, body)


def test_two_who_read_the_same_answer_announce_it_once(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a", "b", announce=True)
        await end(connection, WORKER, await take_items(connection, WORKER, want=1))
        where = {"after": 0, "lanes": 9, "most": 9}
        found = await (await connection.execute(_DELIVER["list_to_announce"], where)).fetchall()
        found = [row for row in found if row[1] is not None]
        sinks = Jsonb([{"name": "s", "everything": True, "statuses": ["completed"], "owners": []}])
        assert [await announce_answered(connection, found, sinks) for _ in range(2)] == [1, 0]
        assert await one(connection, "SELECT count(*) FROM penstock.sink_deliveries") == (1,)

    with_connection(database_18, body)
