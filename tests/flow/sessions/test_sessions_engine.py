"""Sessions in the database: what is accepted, in which order it is worked on, and what can be done about it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import psycopg
import pytest

from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db.pool import Connection
from penstock.erase import erase, purge
from penstock.model import Again, Outcome, OutcomeState, parse_id
from penstock.sessions import answers
from penstock.sessions.accept import Existing, Refused, accept_many
from penstock.sessions.answers import RequestRow, get_request, list_requests
from penstock.sessions.sessions import cancel_request, get_session, list_sessions, put_session, resume_session
from penstock.settle.write import Changes, pass_over, settle
from tests.support.db import connected, one, with_connection
from tests.support.sessions import DEAD, DONE, ENDPOINT, OWNER, POOL, accepted, end, send, take, take_items, wish

WORKER = uuid4()
SKIPPED = Outcome(OutcomeState.SKIPPED, error_code="cancelled", error_message="m")
LATER = Again("busy", "later", 60.0, True, 500)


async def rows(connection: Connection, query: str) -> list[tuple[object, ...]]:
    return await (await connection.execute(query.encode())).fetchall()


# -- accepting


def test_requests_are_numbered_in_the_order_given(database: str) -> None:
    async def body(connection: Connection) -> None:
        first = await send(connection, "a", "b", "a", "a")
        assert [answer.sequence for answer in first] == [1, 1, 2, 3]
        second = await send(connection, "b", "c", "a")
        assert [answer.sequence for answer in second] == [2, 1, 4]
        assert len({answer.session_id for answer in first + second}) == 3
        listed = await list_requests(connection, OWNER, "a")
        asked = [answer.request_id for answer in first + second if answer.session_id == first[0].session_id]
        assert [row.id for row in listed] == asked

    with_connection(database, body)


def test_a_request_is_kept_as_it_came(database: str) -> None:
    async def body(connection: Connection) -> None:
        raw = b'{"model": "m",\t"text": "\xc3\xa9"}'
        (answer,) = [accepted(a) for a in await accept_many(connection, [wish("a", raw, stream=True, waited=True)])]
        (item,) = await take_items(connection, WORKER)
        assert (item.raw, item.url, item.line, item.attempt) == (raw, ENDPOINT, 1, 1)
        assert (item.stream, item.waited, item.cancelled) == (True, True, False)
        assert item.session_request_id == answer.request_id == parse_id("session_request", item.custom_id)
        assert item.idempotency_key == f"{answer.session_id.hex}-1"

    with_connection(database, body)


def test_a_key_stands_for_one_request(database: str) -> None:
    async def body(connection: Connection) -> None:
        (first,) = await send(connection, "a", idempotency_key="k", fingerprint=b"f")
        (again, other) = await accept_many(
            connection, [wish("a", idempotency_key="k", waited=True), wish("b", idempotency_key="k")]
        )
        assert isinstance(again, Existing)
        assert (again.request.id, again.request.status, again.request.fingerprint) == (
            first.request_id,
            "pending",
            b"f",
        )
        assert accepted(other).sequence == 1, "keys are a session's own"
        assert await one(connection, "SELECT waited FROM penstock.session_requests WHERE fingerprint = 'f'") == (True,)
        await end(connection, WORKER, await take_items(connection, WORKER))
        (answered,) = await accept_many(connection, [wish("a", idempotency_key="k")])
        assert isinstance(answered, Existing)
        assert (answered.request.status, answered.request.response) == ("completed", b'"done"')
        assert await one(connection, "SELECT count(*) FROM penstock.templates") == (2,)

    with_connection(database, body)


def test_the_same_key_twice_in_one_call_is_one_request(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, second, third = await accept_many(
            connection, [wish("a", idempotency_key="k"), wish("a"), wish("a", idempotency_key="k")]
        )
        assert (accepted(first).sequence, accepted(second).sequence) == (1, 2)
        assert isinstance(third, Existing)
        assert third.request.id == accepted(first).request_id

    with_connection(database, body)


def test_a_session_has_room_for_so_many(database: str) -> None:
    async def body(connection: Connection) -> None:
        found = await accept_many(connection, [wish(key) for key in "aabaa"], max_queued=3)
        assert [isinstance(answer, Refused) for answer in found] == [False, False, False, False, True]
        await take(connection, WORKER)
        found = await accept_many(connection, [wish("a"), wish("a")], max_queued=3)
        assert (accepted(found[0]).sequence, found[1]) == (4, Refused("queue_full"))
        await put_session(connection, OWNER, "b", max_queued=1)
        found = await accept_many(connection, [wish("b"), wish("b")], max_queued=99)
        assert (accepted(found[0]).sequence, found[1]) == (2, Refused("queue_full"))

    with_connection(database, body)


def test_what_was_refused_leaves_no_gap(database: str) -> None:
    async def body(connection: Connection) -> None:
        await accept_many(connection, [wish("a"), wish("a")], max_queued=1)
        assert await one(connection, "SELECT next, total FROM penstock.lanes") == (0, 1)
        assert await one(connection, "SELECT count(*) FROM penstock.session_requests") == (1,)

    with_connection(database, body)


def test_many_sessions_in_one_call(database: str) -> None:
    async def body(connection: Connection) -> None:
        keys = [f"k{number % 300}" for number in range(900)]
        for turn in range(2):
            found = await send(connection, *keys)
            assert [answer.sequence for answer in found] == [3 * turn + 1 + number // 300 for number in range(900)]
        assert await one(connection, "SELECT count(*), min(total), max(total) FROM penstock.lanes") == (300, 6, 6)

    with_connection(database, body)


# -- order


def test_one_at_a_time_and_in_order(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a", "a", "a", "b")
        for expected in (1, 2, 3):
            items = [item for item in await take_items(connection, WORKER) if item.line == expected]
            assert items, expected
            assert await take(connection, WORKER) == []
            await end(connection, WORKER, items)

    with_connection(database, body)


def test_each_request_is_claimed_for_what_it_asks_for(database: str) -> None:
    """Its pool, its model and its endpoint, on the first try and on every other."""

    async def body(connection: Connection) -> None:
        kinds = [("p1", "m1", "/v1/e1"), ("p2", "m2", "/v1/e2"), ("p1", "m3", "/v1/e3")]
        await accept_many(
            connection, [wish("a", pool=pool, route=route, endpoint=endpoint) for pool, route, endpoint in kinds]
        )
        for pool, route, endpoint in kinds:
            others = [kind for kind in kinds if kind[:2] != (pool, route)]
            for delay in (0.0, None):
                for other_pool, other_route, _ in others:
                    assert await take(connection, WORKER, pool=other_pool, route=other_route) == []
                (item,) = await take_items(connection, WORKER, pool=pool, route=route)
                assert (item.route, item.url) == (route, endpoint)
                verdict = DONE if delay is None else Again("busy", "m", delay, True)
                await end(connection, WORKER, [item], verdict)

    with_connection(database, body)


def test_an_empty_queue_takes_on_what_comes_next(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a")
        (item,) = await take_items(connection, WORKER)
        await send(connection, "a", route="model-1", endpoint="/v1/embeddings")
        await end(connection, WORKER, [item])
        assert await take(connection, WORKER) == []
        (item,) = await take_items(connection, WORKER, route="model-1")
        assert item.url == "/v1/embeddings"
        await end(connection, WORKER, [item])
        await send(connection, "a")
        assert len(await take(connection, WORKER)) == 1

    with_connection(database, body)


def test_sessions_are_served_in_the_order_in_which_they_became_ready(database: str) -> None:
    async def body(connection: Connection) -> None:
        now = datetime(2030, 1, 1, tzinfo=UTC)
        for number, key in enumerate("cab"):
            await send(connection, key, key, now=now + timedelta(seconds=number))
        keys = {row.lane_id: row.key for row in await list_sessions(connection, OWNER)}
        served = []
        for number in range(6):
            later = now + timedelta(minutes=1, seconds=number)
            (item,) = await take_items(connection, WORKER, 1, now=later)
            served.append(keys[item.lease.lane_id])
            await end(connection, WORKER, [item], now=later)
        assert "".join(served) == "cabcab"

    with_connection(database, body)


def test_priority_chooses_among_sessions(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a", "a", "b", "b")
        urgent = await put_session(connection, OWNER, "b", priority=5)
        (first,) = await take_items(connection, WORKER, 1)
        assert (first.lease.lane_id, first.line) == (urgent.lane_id, 1)
        await end(connection, WORKER, [first])
        (second,) = await take_items(connection, WORKER, 1)
        assert (second.lease.lane_id, second.line) == (urgent.lane_id, 2)

    with_connection(database, body)


def test_what_a_dead_worker_held_comes_first(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a", "a")
        (lost,) = await take_items(connection, uuid4())
        await liveness.reclaim(connection, WORKER, LivenessLimits(), stuck_s=1e6)
        (item,) = await take_items(connection, WORKER)
        assert (item.line, item.url, item.lease.reclaims) == (1, ENDPOINT, 1)
        assert item.lease.id > lost.lease.id
        assert (await end(connection, lost.lease.batch_id, [lost])).fenced == 1
        await end(connection, WORKER, [item])
        (item,) = await take_items(connection, WORKER)
        assert item.line == 2

    with_connection(database, body)


def test_sessions_keep_no_figures(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a", "a")
        await end(connection, WORKER, await take_items(connection, WORKER), Again("busy", "m", 0.0, True))
        for verdict in (DONE, DEAD):
            await end(connection, WORKER, await take_items(connection, WORKER), verdict)
        assert await one(connection, "SELECT count(*) FROM penstock.outcomes") == (2,)
        for table in ("progress", "journal", "leases", "deferrals"):
            assert await one(connection, f"SELECT count(*) FROM penstock.{table}") == (0,), table

    with_connection(database, body)


# -- reading


def test_a_request_shows_how_far_it_is(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, second = await send(connection, "a", "a")

        async def look(expected: str, attempts: int) -> RequestRow:
            row = await get_request(connection, OWNER, "a", first.request_id)
            assert row is not None
            assert (row.status, row.attempts, row.sequence) == (expected, attempts, 1)
            return row

        await look("pending", 0)
        (item,) = await take_items(connection, WORKER)
        assert (await look("processing", 1)).lease_nonce == item.lease.nonce
        await end(connection, WORKER, [item], LATER)
        await look("pending", 1)
        assert await answers.read_answered(connection, [first.request_id, second.request_id]) == []
        await connection.execute("UPDATE penstock.deferrals SET due_at = now()")
        (item,) = await take_items(connection, WORKER)
        await end(connection, WORKER, [item], DEAD)
        row = await look("failed", 2)
        assert (row.status_code, row.response, row.error_code, row.error_message) == (400, b'"no"', "bad_request", "no")
        assert row.completed_at is not None
        assert await answers.read_answered(connection, [first.request_id, second.request_id]) == [row]

    with_connection(database, body)


def test_others_cannot_see_it(database: str) -> None:
    async def body(connection: Connection) -> None:
        (answer,) = await send(connection, "a")
        await send(connection, "b")
        for owner, key in (("other", "a"), (OWNER, "b")):
            assert await get_request(connection, owner, key, answer.request_id) is None
            assert not await cancel_request(connection, owner, key, answer.request_id)
        assert await get_request(connection, None, "a", answer.request_id) is not None
        assert await get_session(connection, "other", "a") is None
        assert await list_sessions(connection, "other") == []
        assert not await erase.delete_session(connection, "other", "a")

    with_connection(database, body)


def test_requests_by_status_and_by_page(database: str) -> None:
    async def body(connection: Connection) -> None:
        sent = await send(connection, *"aaaaaaa")
        for verdict in (DONE, DEAD, DONE):
            await end(connection, WORKER, await take_items(connection, WORKER), verdict)
        await take(connection, WORKER)
        assert await cancel_request(connection, OWNER, "a", sent[5].request_id)
        expected = {"completed": [1, 3], "failed": [2], "processing": [4], "pending": [5, 7], "cancelled": [6]}
        for status, sequences in expected.items():
            listed = await list_requests(connection, OWNER, "a", status=status)
            assert [row.sequence for row in listed] == sequences
            assert {row.status for row in listed} == {status}
            after = await list_requests(connection, OWNER, "a", status=status, after_sequence=sequences[0], limit=1)
            assert [row.sequence for row in after] == sequences[1:2]
            newest = await list_requests(connection, OWNER, "a", status=status, newest_first=True)
            assert newest == listed[::-1]
        page = await list_requests(connection, OWNER, "a", after_sequence=2, limit=3)
        assert [row.sequence for row in page] == [3, 4, 5]
        walked: list[RequestRow] = []
        while page := await list_requests(
            connection, OWNER, "a", after_sequence=walked[-1].sequence if walked else 0, limit=3, newest_first=True
        ):
            walked += page
        assert walked == (await list_requests(connection, OWNER, "a"))[::-1]

    with_connection(database, body)


def test_sessions_newest_first(database: str) -> None:
    async def body(connection: Connection) -> None:
        for key in "abcd":
            await send(connection, key)
        first = await list_sessions(connection, OWNER, limit=3)
        assert [row.key for row in first] == ["d", "c", "b"]
        rest = await list_sessions(connection, OWNER, after=first[-1].id)
        assert [row.key for row in rest] == ["a"]

    with_connection(database, body)


def test_figures_of_a_session_add_up(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a", "a", "a")

        async def look() -> tuple[int, int, int, int]:
            row = await get_session(connection, OWNER, "a")
            assert row is not None
            return row.total, row.queued, row.in_flight, row.answered

        assert await look() == (3, 3, 0, 0)
        items = await take_items(connection, WORKER)
        assert await look() == (3, 2, 1, 0)
        await end(connection, WORKER, items, Again("busy", "m", 0.0, True))
        assert await look() == (3, 3, 0, 0)
        await end(connection, WORKER, await take_items(connection, WORKER))
        assert await look() == (3, 2, 0, 1)

    with_connection(database, body)


def test_settings_can_be_made_before_the_first_request(database: str) -> None:
    async def body(connection: Connection) -> None:
        made = await put_session(
            connection, OWNER, "a", on_dead_head="block", max_queued=7, wait_timeout_s=1.5, priority=3
        )
        assert (made.on_dead_head, made.max_queued, made.wait_timeout_s, made.priority) == ("block", 7, 1.5, 3)
        assert (made.total, made.open) == (0, True)
        (answer,) = await send(connection, "a")
        assert (answer.session_id, answer.wait_timeout_s) == (made.id, 1.5)
        assert len(await take(connection, WORKER)) == 1
        changed = await put_session(connection, OWNER, "a")
        assert (changed.id, changed.on_dead_head, changed.max_queued) == (made.id, "continue", None)

    with_connection(database, body)


# -- cancelling


def test_a_queued_request_is_cancelled_at_once_and_passed_over(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, second, third = await send(connection, "a", "a", "a")
        assert await cancel_request(connection, OWNER, "a", second.request_id)
        assert not await cancel_request(connection, OWNER, "a", second.request_id)
        (row,) = await answers.read_answered(connection, [first.request_id, second.request_id, third.request_id])
        assert (row.id, row.status, row.error_code, row.attempts) == (second.request_id, "cancelled", "cancelled", 0)
        (item,) = await take_items(connection, WORKER)
        assert not await cancel_request(connection, OWNER, "a", first.request_id), "it is being worked on"
        await end(connection, WORKER, [item])
        assert not await cancel_request(connection, OWNER, "a", first.request_id), "it is decided"
        (item,) = await take_items(connection, WORKER)
        assert item.cancelled
        await end(connection, WORKER, [item], SKIPPED)
        row = (await answers.read_answered(connection, [second.request_id]))[0]
        assert (row.status, row.error_code, row.attempts) == ("cancelled", "cancelled", 0)
        assert await one(connection, "SELECT count(*) FROM penstock.attempts") == (0,)
        (item,) = await take_items(connection, WORKER)
        assert (item.line, item.cancelled) == (3, False)

    with_connection(database, body)


def test_a_request_that_waits_for_another_try_can_be_cancelled(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, _ = await send(connection, "a", "a")
        await end(connection, WORKER, await take_items(connection, WORKER), LATER)
        assert await take(connection, WORKER) == []
        assert await cancel_request(connection, OWNER, "a", first.request_id)
        (item,) = await take_items(connection, WORKER)
        assert (item.line, item.cancelled) == (1, True), "at once, so that the session can go on"
        await end(connection, WORKER, [item], SKIPPED)
        row = await get_request(connection, OWNER, "a", first.request_id)
        assert row is not None
        assert (row.status, row.attempts) == ("cancelled", 1)

    with_connection(database, body)


# -- dead heads


def test_a_failed_request_blocks_nobody_by_default(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a", "a")
        await end(connection, WORKER, await take_items(connection, WORKER), DEAD)
        assert [item.line for item in await take_items(connection, WORKER)] == [2]

    with_connection(database, body)


@pytest.mark.parametrize("retry_head", [False, True])
def test_a_dead_head_can_block_its_session_until_somebody_decides(database: str, retry_head: bool) -> None:
    async def body(connection: Connection) -> None:
        await put_session(connection, OWNER, "a", on_dead_head="block")
        first, *_ = await send(connection, "a", "a", "b")
        items = await take_items(connection, WORKER)
        await end(connection, WORKER, items, DEAD)
        assert await take(connection, WORKER) == [], "and b has nothing left"
        blocked = await get_session(connection, OWNER, "a")
        assert blocked is not None
        assert (blocked.open, blocked.queued) == (False, 1)
        await send(connection, "a")
        assert not await resume_session(connection, OWNER, "b")
        assert await resume_session(connection, OWNER, "a", retry_head=retry_head)
        assert not await resume_session(connection, OWNER, "a")
        (item,) = await take_items(connection, WORKER)
        assert item.line == (1 if retry_head else 2)
        if retry_head:
            row = await get_request(connection, OWNER, "a", first.request_id)
            assert row is not None
            assert (row.status, row.attempts) == ("processing", 1)
            await end(connection, WORKER, [item])
            (item,) = await take_items(connection, WORKER)
        await end(connection, WORKER, [item])
        assert [item.line for item in await take_items(connection, WORKER)] == [3]

    with_connection(database, body)


def test_a_dead_head_is_found_behind_what_was_cancelled_after_it(database: str) -> None:
    async def body(connection: Connection) -> None:
        await put_session(connection, OWNER, "a", on_dead_head="block")
        _, second, third, _ = await send(connection, "a", "a", "a", "a")
        await end(connection, WORKER, await take_items(connection, WORKER), DEAD)
        for cancelled in (second, third):
            assert await cancel_request(connection, OWNER, "a", cancelled.request_id)
        await pass_over(connection, [second.session_id])
        assert await resume_session(connection, OWNER, "a", retry_head=True)
        lines = []
        while items := await take_items(connection, WORKER):
            lines += [item.line for item in items]
            await end(connection, WORKER, items)
        assert lines == [1, 4]

    with_connection(database, body)


def test_a_cancelled_head_does_not_block(database: str) -> None:
    async def body(connection: Connection) -> None:
        await put_session(connection, OWNER, "a", on_dead_head="block")
        first, _ = await send(connection, "a", "a")
        assert await cancel_request(connection, OWNER, "a", first.request_id)
        await end(connection, WORKER, await take_items(connection, WORKER), SKIPPED)
        assert [item.line for item in await take_items(connection, WORKER)] == [2]

    with_connection(database, body)


# -- deleting


def test_a_deleted_session_is_gone_for_everybody(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, second = await send(connection, "a", "a", idempotency_key=None)
        await end(connection, WORKER, await take_items(connection, WORKER), Again("busy", "m", 0.0, True))
        (item,) = await take_items(connection, WORKER)
        assert await erase.delete_session(connection, OWNER, "a")
        assert not await erase.delete_session(connection, OWNER, "a")
        assert (await end(connection, WORKER, [item])).fenced == 1
        assert await take(connection, WORKER) == []
        assert await get_session(connection, OWNER, "a") is None
        assert await list_requests(connection, OWNER, "a") == []
        assert await get_request(connection, OWNER, "a", first.request_id) is None
        told = await answers.read_answered(connection, [first.request_id, second.request_id])
        assert [(row.status, row.error_code) for row in told] == [("cancelled", "session_deleted")] * 2
        (fresh,) = await send(connection, "a")
        assert (fresh.sequence, fresh.session_id == first.session_id) == (1, False)

    with_connection(database, body)


def test_nothing_of_a_deleted_session_is_left(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, *"aaaa")
        for verdict in (DONE, DEAD, Again("busy", "m", 0.0, True)):
            await end(connection, WORKER, await take_items(connection, WORKER), verdict)
        await take(connection, uuid4())
        await liveness.reclaim(connection, WORKER, LivenessLimits(), stuck_s=1e6)
        await connection.execute(
            "INSERT INTO penstock.session_stream SELECT id, 1, 1, 'x' FROM penstock.session_requests"
        )
        assert await erase.delete_session(connection, OWNER, "a")
        while await purge.purge_step(connection, 3):
            pass
        tables = ("sessions", "session_requests", "session_stream", "templates", "outcomes", "attempts", "reclaims")
        for table in (*tables, "lanes", "leases", "deferrals", "erasure_pieces"):
            assert await one(connection, f"SELECT count(*) FROM penstock.{table}") == (0,), table
        (report,) = await purge.list_erasures(connection, OWNER)
        assert report.finished_at is not None
        assert (report.kind, report.templates, report.outcomes, report.attempts) == ("session", 4, 2, 2)

    with_connection(database, body)


# -- telling


def test_those_who_wait_are_rung_once_a_flush(database_18: str) -> None:
    async def body(connection: Connection, listener: Connection) -> None:
        await listener.execute("LISTEN penstock_answers")

        async def heard() -> list[str]:
            await connection.execute("SELECT pg_notify('penstock_answers', 'end')")
            payloads = []
            async with asyncio.timeout(30):
                async for notice in listener.notifies():
                    if notice.payload == "end":
                        break
                    payloads.append(notice.payload)
            return payloads

        await send(connection, "a", "b", "c")
        await end(connection, WORKER, await take_items(connection, WORKER))
        assert await heard() == [], "nobody waits"
        sent = await send(connection, "a", "b", waited=True)
        await send(connection, "c")
        await end(connection, WORKER, await take_items(connection, WORKER), DEAD)
        assert await heard() == [",".join(str(answer.lane_id) for answer in sent)]
        await send(connection, *(f"k{number}" for number in range(3000)), waited=True)
        await end(connection, WORKER, await take_items(connection, WORKER, 5000))
        assert await heard() == ["*"]
        (answer,) = await send(connection, "a", waited=True)
        assert await cancel_request(connection, OWNER, "a", answer.request_id)
        assert await erase.delete_session(connection, OWNER, "a")
        assert await heard() == [str(answer.lane_id)] * 2

    async def run() -> None:
        async with connected(database_18) as connection, connected(database_18) as listener:
            await body(connection, listener)

    asyncio.run(run())


def test_workers_hear_of_what_they_can_begin(database_18: str) -> None:
    async def run() -> None:
        async with connected(database_18) as connection, connected(database_18) as listener:
            await listener.execute("LISTEN penstock_work")
            await send(connection, "a", "b", "a")
            await take(connection, WORKER)
            await send(connection, "a", "b")
            await connection.execute("SELECT pg_notify('penstock_work', 'end')")
            heard = []
            async with asyncio.timeout(30):
                async for notice in listener.notifies():
                    if notice.payload == "end":
                        break
                    heard.append(notice.payload)
            assert heard == [POOL], "once, and not for what has to wait its turn"

    asyncio.run(run())


def test_a_settle_of_many_sessions_moves_each_on(database: str) -> None:
    async def body(connection: Connection) -> None:
        keys = [f"k{number}" for number in range(200)]
        await accept_many(connection, [wish(key, route=f"model-{len(key) % 2}") for key in keys for _ in range(2)])
        for line in (1, 2):
            changes = Changes()
            for route in ("model-0", "model-1"):
                for item in await take_items(connection, WORKER, 999, route=route):
                    assert item.line == line
                    changes.decide(item, DONE)
            assert (await settle(connection, WORKER, changes)).outcomes == 200

    with_connection(database, body)


def test_the_schema_refuses_what_makes_no_sense(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        for options in ({"on_dead_head": "perhaps"}, {"max_queued": 0}, {"wait_timeout_s": 0.0}):
            with pytest.raises(psycopg.errors.CheckViolation):
                await send(connection, "a", **options)
        assert await rows(connection, "SELECT id FROM penstock.lanes") == []

    with_connection(database_18, body)


# -- retention


def test_a_session_that_nobody_uses_is_deleted(database: str) -> None:
    """Not one that was used since, or in which anything waits or is under way."""
    day = timedelta(days=1)

    async def body(connection: Connection) -> None:
        start = datetime.now(UTC)
        await send(connection, "old", "used", "waits", "held", now=start)
        await end(connection, WORKER, await take_items(connection, WORKER, now=start), now=start)
        await send(connection, "held", now=start)
        assert len(await take(connection, WORKER, now=start)) == 1
        await send(connection, "waits", route="model-1", now=start)
        late = start + 20 * day
        await send(connection, "used", route="model-2", now=late)
        await end(connection, WORKER, await take_items(connection, WORKER, route="model-2", now=late), now=late)

        async def expire(days: int, limit: int = 100) -> int:
            place: UUID | None = UUID(int=0)
            deleted = 0
            while place is not None:
                now = start + days * day
                place, some = await erase.expire_sessions(connection, 30 * 86_400, place, limit, now=now)
                deleted += some
            return deleted

        assert await expire(29) == 0
        assert await expire(31, limit=1) == 1
        assert await get_session(connection, OWNER, "old") is None
        assert await expire(49) == 0
        assert await expire(51) == 1
        left = {key for (key,) in await rows(connection, "SELECT key FROM penstock.sessions WHERE deleted_at IS NULL")}
        assert left == {"waits", "held"}

    with_connection(database, body)


def test_a_session_used_at_the_last_moment_stays(database: str) -> None:
    async def body(connection: Connection) -> None:
        start = datetime.now(UTC)
        await send(connection, "a", now=start)
        assert not await erase.delete_session(connection, OWNER, "a", unused_s=60, now=start + timedelta(days=1))
        assert await one(connection, "SELECT open FROM penstock.lanes") == (True,), "nothing was closed on the way"
        assert len(await take(connection, WORKER)) == 1

    with_connection(database, body)


# -- what was cancelled is passed over, whoever serves it


def test_what_was_cancelled_holds_up_nobody(database: str) -> None:
    """Not even where nobody serves what it asked for."""

    async def body(connection: Connection) -> None:
        gone = await send(connection, "a", "a", route="model-1", pool="session:gone")
        (behind,) = await send(connection, "a")
        assert await take(connection, WORKER) == []
        for request in gone:
            assert await cancel_request(connection, OWNER, "a", request.request_id)
        assert await pass_over(connection, [gone[0].session_id]) == 2
        (item,) = await take_items(connection, WORKER)
        assert item.session_request_id == behind.request_id
        # In the middle: whoever answers what comes before learns of it.
        (middle,) = await send(connection, "a", route="model-1", pool="session:gone")
        (last,) = await send(connection, "a")
        assert await cancel_request(connection, OWNER, "a", middle.request_id)
        settled = await end(connection, WORKER, [item])
        assert list(settled.cancelled_next) == [behind.session_id]
        assert await pass_over(connection, settled.cancelled_next) == 1
        (item,) = await take_items(connection, WORKER)
        assert item.session_request_id == last.request_id
        row = await get_request(connection, OWNER, "a", middle.request_id)
        assert row is not None
        assert (row.status, row.attempts, row.error_code) == ("cancelled", 0, "cancelled")
        assert list((await end(connection, WORKER, [item])).cancelled_next) == []

    with_connection(database, body)


def test_a_cancelled_retry_holds_up_nobody(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, second = await send(connection, "a", "a")
        await end(connection, WORKER, await take_items(connection, WORKER), LATER)
        assert await pass_over(connection, [first.session_id]) == 0
        assert await cancel_request(connection, OWNER, "a", first.request_id)
        assert await pass_over(connection, [first.session_id]) == 1
        assert await one(connection, "SELECT count(*) FROM penstock.deferrals") == (0,)
        (item,) = await take_items(connection, WORKER)
        assert item.session_request_id == second.request_id

    with_connection(database, body)


def test_what_was_cancelled_takes_no_room(database: str) -> None:
    async def body(connection: Connection) -> None:
        await send(connection, "a")
        held = await take_items(connection, WORKER)
        queued = [accepted(each) for each in await accept_many(connection, [wish("a"), wish("a")], max_queued=2)]
        assert await accept_many(connection, [wish("a")], max_queued=2) == [Refused("queue_full")]
        assert await cancel_request(connection, OWNER, "a", queued[0].request_id)
        found = await accept_many(connection, [wish("a"), wish("a")], max_queued=2)
        assert accepted(found[0]).sequence == 4
        assert found[1] == Refused("queue_full")
        await end(connection, WORKER, held)

    with_connection(database, body)
