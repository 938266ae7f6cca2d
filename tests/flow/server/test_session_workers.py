"""Sessions served where they are handed in: the commit that stores a request claims it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from penstock.claim import gates, liveness
from penstock.config import Config, LivenessLimits, RetryLimits
from penstock.db.pool import Connection
from penstock.dispatch.coroutines import CoroutineDispatcher
from penstock.model import ClaimPermit, Item, SessionRequest, Verdict
from penstock.sessions.accept import Accepted, Existing, accept_many
from penstock.sessions.answers import get_request
from penstock.worker.loop import WorkerLoop
from tests.support.db import one, pooled, with_connection
from tests.support.postgres_proxy import PostgresProxy
from tests.support.recorder import recording
from tests.support.server import served
from tests.support.session_api import Place, new_database, write_config
from tests.support.sessions import DEAD, DONE, ENDPOINT, POOL, ROUTE, accepted, end, send, take, take_items, wish
from tests.support.wait import wait_until

WORKER, OTHER = uuid4(), uuid4()
ACCEPT = r"INSERT INTO penstock\.session_requests"
CLAIM = "granted AS MATERIALIZED"
SETTLE = r"INSERT INTO penstock\.outcomes"
DEADLINE_S = 30.0


async def hand_in(connection: Connection, *keys: str, room: int = 99, **options: Any) -> list[Accepted]:
    permits = {POOL: ClaimPermit(WORKER, room)}
    found = await accept_many(connection, [wish(key, **options) for key in keys], permits=permits)
    return [accepted(each) for each in found]


def item(taken: Accepted) -> Item:
    assert taken.lease is not None
    asked = SessionRequest(taken.request_id, ENDPOINT, stream=False, waited=True, cancelled=False)
    return Item(taken.lease, taken.ordinal, taken.sequence, "c", b"{}", asked)


def test_the_first_request_of_an_idle_session_is_claimed_as_it_is_stored(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, behind, other = await hand_in(connection, "a", "a", "b")
        assert first.lease is not None
        assert other.lease is not None
        assert behind.lease is None
        assert (first.lease.lane_id, first.lease.ranges) == (first.lane_id, ((0, 1),))
        # What the claim would have left behind is what it finds.
        assert await take(connection, OTHER) == []
        held = "SELECT count(*), count(DISTINCT lane_id) FROM penstock.leases WHERE worker_id = %s"
        assert await (await connection.execute(held, [WORKER])).fetchone() == (2, 2)
        settled = await end(connection, WORKER, [item(first), item(other)])
        assert (settled.outcomes, settled.fenced, settled.more) == (2, 0, True)
        (next_item,) = await take_items(connection, OTHER)
        assert next_item.session_request_id == behind.request_id
        settled = await end(connection, OTHER, [next_item])
        assert (settled.outcomes, settled.more) == (1, False)
        (again,) = await hand_in(connection, "a")
        assert (again.sequence, again.lease is not None) == (3, True)
        row = await get_request(connection, "local", "a", again.request_id)
        assert row is not None
        assert (row.status, row.attempts) == ("processing", 1)

    with_connection(database, body)


def test_it_is_a_claim_like_any_other(database: str) -> None:
    """What is under way, blocked, closed or gated is not begun; nor more than there is room for."""

    async def body(connection: Connection) -> None:
        await send(connection, "busy", "queued")
        assert len(await take(connection, OTHER, 1)) == 1
        assert [each.lease for each in await hand_in(connection, "busy", "queued")] == [None, None]
        crowd = await hand_in(connection, *"abcde", room=2)
        assert [each.lease is not None for each in crowd] == [True, True, False, False, False]
        assert [each.lease for each in await hand_in(connection, "f", "g", room=0)] == [None, None]

        (dead,) = await hand_in(connection, "blocks", on_dead_head="block")
        await end(connection, WORKER, [item(dead)], DEAD)
        assert [each.lease for each in await hand_in(connection, "blocks")] == [None]

        await gates.close(connection, POOL, ROUTE, 60, "busy", "later")
        assert [each.lease for each in await hand_in(connection, "gated")] == [None]
        (open_route,) = await hand_in(connection, "another-route", route="model-1")
        assert open_route.lease is not None
        shut = {POOL: ClaimPermit(WORKER, 9, frozenset({"model-1"}))}
        (shut_route,) = await accept_many(connection, [wish("shut", route="model-1")], permits=shut)
        assert accepted(shut_route).lease is None

    with_connection(database, body)


def test_a_key_used_before_claims_nothing(database: str) -> None:
    async def body(connection: Connection) -> None:
        (first,) = await hand_in(connection, "a", idempotency_key="k")
        permits = {POOL: ClaimPermit(WORKER, 9)}
        (again,) = await accept_many(connection, [wish("a", idempotency_key="k")], permits=permits)
        assert isinstance(again, Existing)
        await end(connection, WORKER, [item(first)], DONE)
        known, new = await accept_many(connection, [wish("a", idempotency_key="k"), wish("a")], permits=permits)
        assert isinstance(known, Existing)
        assert accepted(new).lease is not None
        assert (accepted(new).ordinal, accepted(new).lane_id) == (1, first.lane_id)
        assert await one(connection, "SELECT count(*) FROM penstock.leases") == (1,)

    with_connection(database, body)


def test_what_its_worker_leaves_behind_is_taken_back(database: str) -> None:
    """A lease of an identity that is gone is lost like any other: the request runs again, elsewhere."""

    async def body(connection: Connection) -> None:
        (taken,) = await hand_in(connection, "a")
        await liveness.register(connection, OTHER, POOL)
        await liveness.reclaim(connection, OTHER, LivenessLimits(), stuck_s=600)
        assert (await end(connection, WORKER, [item(taken)])).fenced == 1
        (second,) = await take_items(connection, OTHER)
        assert (second.session_request_id, second.lease.reclaims) == (taken.request_id, 1)

    with_connection(database, body)


# -- a server


@pytest.fixture
def place(tmp_path: Path, server_18: str) -> Iterator[tuple[Place, PostgresProxy]]:
    with recording() as upstream, new_database(server_18) as database, PostgresProxy(server_18) as proxy:
        config = write_config(tmp_path, upstream)
        with served(tmp_path, "--config", config, database=proxy.proxied(database)) as running:
            yield Place(running, upstream, database), proxy


def test_two_commits_and_no_look_at_the_queue(place: tuple[Place, PostgresProxy]) -> None:
    here, proxy = place
    assert here.send("s", "up").status == 200

    def count_statements(series: int) -> tuple[int, int, int]:
        stored, claimed, settled = (proxy.watch(text) for text in (ACCEPT, CLAIM, SETTLE))
        before, texts = here.upstream.texts, [f"m{series}.{number}" for number in range(5)]
        for text in texts:
            assert here.send("s", text).status == 200
        assert here.upstream.texts == before + texts
        return stored.fired, claimed.fired, settled.fired

    # A request is not claimed as it is stored while its worker looks for lost leases, for a moment in some seconds.
    seen: list[tuple[int, int, int]] = []
    while (5, 0, 5) not in seen:
        assert len(seen) < 3, seen
        seen.append(count_statements(len(seen)))


def test_what_was_stored_and_claimed_unheard_is_answered_all_the_same(place: tuple[Place, PostgresProxy]) -> None:
    here, proxy = place
    assert here.send("s", "up").status == 200
    lost = proxy.swallow(ACCEPT)
    answer = here.send("s", "hello")
    assert (answer.status, answer.json["status"], lost.fired) == (200, "completed", 1)
    assert here.upstream.texts == ["up", "hello"]
    with psycopg.connect(here.database, autocommit=True) as connection:
        left = "SELECT count(*) FROM penstock.leases"
        wait_until(lambda: connection.execute(left).fetchone() == (0,), DEADLINE_S)


def test_what_may_not_be_stored_is_not_repeated_by_the_official_clients(place: tuple[Place, PostgresProxy]) -> None:
    here, proxy = place
    assert here.send("s", "up").status == 200
    proxy.cut_before(ACCEPT)
    unkeyed = here.send("s", "one")
    assert (unkeyed.status, unkeyed.headers["x-should-retry"]) == (503, "false")
    proxy.cut_before(ACCEPT)
    keyed = here.send("s", "two", idempotency_key="k")
    assert (keyed.status, "x-should-retry" in keyed.headers) == (503, False)
    assert here.send("s", "two", idempotency_key="k").status == 200
    assert here.upstream.texts == ["up", "two"]


def test_whoever_waits_in_a_session_that_is_deleted_hears_of_it(place: tuple[Place, PostgresProxy]) -> None:
    here, _ = place
    here.queue("s", "hold x")
    here.upstream.wait_called("hold x")
    behind = here.queue("s", "behind")
    with here.server.waiting(f"/v1/sessions/s/requests/{behind['id']}?wait=60") as waiting:
        assert here.server.ask("DELETE", "/v1/sessions/s").status == 200
        answer = waiting.answer()
    here.upstream.release("x")
    assert answer.status == 404 or answer.json["status"] == "cancelled"


def test_nothing_is_handed_to_a_worker_that_is_not_registered(database_18: str) -> None:
    async def run() -> None:
        async with pooled(database_18) as pool:
            loop = WorkerLoop(Config(), pool, POOL, CoroutineDispatcher(_never, 4, RetryLimits()), {})
            assert loop.issue_permit() is None
            working = asyncio.create_task(loop.run())
            async with asyncio.timeout(DEADLINE_S):
                while (permit := loop.issue_permit()) is None:
                    await asyncio.sleep(0.005)
            assert permit.room == 4
            assert loop.issue_permit() is None
            loop.return_permit(())
            loop.stop()
            assert loop.issue_permit() is None
            await working

    asyncio.run(run())


async def _never(items: Sequence[Item]) -> Sequence[Verdict]:
    raise AssertionError(f"{items} were called")
