"""Events cost what is asked and what is due, whatever waits in the sessions and whatever came before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from uuid import uuid4

import pytest
from psycopg.types.json import Jsonb

from penstock.db import sql
from penstock.db.arrays import ByteaArray, TextArray
from penstock.db.pool import Connection
from penstock.deliver.sinks import announce_answered
from tests.plan.conftest import LARGE, SMALL
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Session

_DELIVER = sql.load("penstock.deliver", "deliver.sql")
_EVENTS = sql.load("penstock.sessions", "events.sql")
_PAGE = 20
_ANSWERED = 2 * _PAGE
_TABLES = ("sessions", "lanes", "session_requests", "outcomes", "incoming_events", "sink_deliveries")

_LARGE = ("session_requests", "outcomes", "incoming_events", "sink_deliveries")

# Five sessions, each with everything to be told, and a few answers in it; as many again whose answers were told.
_CROWD = (
    "INSERT INTO penstock.lanes (batch_id, session, pool, route, endpoint, source_id, source_lane, next, total, width)"
    " SELECT gen_random_uuid(), true, 'p', 'r', '/e', -n, 0, CASE WHEN n > 5 THEN %(count)s ELSE %(answered)s END,"
    "        %(count)s, 1 FROM generate_series(1, 10) AS n",
    "INSERT INTO penstock.sessions (id, owner, key, lane_id, created_at)"
    " SELECT batch_id, 'o', 'k' || id, id, now() FROM penstock.lanes",
    "INSERT INTO penstock.session_requests"
    " (lane_id, ordinal, id, session_id, owner, pool, route, endpoint, accepted_at, announce)"
    " SELECT l.id, n, gen_random_uuid(), l.batch_id, 'o', 'p', 'r', '/e', now(), l.id <= 5"
    "   FROM penstock.lanes l, generate_series(0, %(count)s / 10 - 1) AS n",
    "INSERT INTO penstock.outcomes (lane_id, ordinal, line, state, attempts, lease_id, finished_at, custom_id)"
    " SELECT lane_id, ordinal, ordinal + 1, 'completed', 1, 1, now(), '' FROM penstock.session_requests"
    "  WHERE NOT announce OR ordinal < %(answered)s",
    "INSERT INTO penstock.incoming_events"
    " (owner, digest, source, event_id, fingerprint, request_id, session_key, received_at)"
    " SELECT 'o', sha256(id::text::bytea), '/s', id::text, '\\x00', id, 'k', now() FROM penstock.session_requests",
    "INSERT INTO penstock.sink_deliveries"
    " (sink, event_id, lane_id, request_id, session_key, owner, event_at, attempts, due_at, delivered_at)"
    " SELECT CASE WHEN n %% 2 = 0 THEN 'a' ELSE 'b' END, gen_random_uuid(), 1, gen_random_uuid(), 'k', 'o', now(), 1,"
    "        now(), CASE WHEN n > 4 * %(answered)s THEN now() END FROM generate_series(1, %(count)s) AS n",
)

Operation = Callable[[Connection], Awaitable[None]]


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[Session, Session]]:
    with ExitStack() as stack:
        made = []
        for count in (SMALL, LARGE):
            session = stack.enter_context(fresh_database(any_server))
            for table in _TABLES:
                session.execute(f"ALTER TABLE penstock.{table} SET (autovacuum_enabled = false)")
            session.execute("ANALYZE")
            for statement in _CROWD:
                session.execute(statement, {"count": count, "answered": _ANSWERED})
            made.append(session)
        small, large = made
        yield small, large


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def sizes(request: pytest.FixtureRequest, built: tuple[Session, Session]) -> tuple[Session, Session]:
    for session in built:
        inform(session, request.param)
    return built


async def announce(connection: Connection) -> None:
    sinks = Jsonb([{"name": "a", "everything": False, "statuses": ["completed"], "owners": []}])
    found = await (
        await connection.execute(_DELIVER["list_to_announce"], {"after": 0, "lanes": 1_000, "most": _PAGE})
    ).fetchall()
    assert len(found) == 5 * _PAGE
    assert await announce_answered(connection, found, sinks) == 5 * _PAGE


async def take(connection: Connection) -> None:
    values = {"sinks": ["a", "b", "unknown"], "most": _PAGE, "hold_s": 60.0}
    cursor = await connection.execute(_DELIVER["take_sink_deliveries_if_due"], values)
    assert len(await cursor.fetchall()) == 2 * _PAGE


async def record(connection: Connection) -> None:
    values = {
        "id": 1,
        "attempt": 1,
        "delivered": True,
        "final": False,
        "status_code": 200,
        "error": None,
        "wait_s": 1.0,
        "give_up_s": 3600.0,
    }
    assert len(await (await connection.execute(_DELIVER["record_sink_delivery_if_held"], values)).fetchall()) == 1


async def put_back(connection: Connection) -> None:
    values = {"ids": list(range(1, _PAGE + 1)), "attempts": [1] * _PAGE, "wait_s": 1.0}
    assert (await connection.execute(_DELIVER["put_back_sink_deliveries_if_held"], values)).rowcount == _PAGE


async def forget(connection: Connection) -> None:
    values = {"limit": 100, "keep_s": 3600.0}
    await connection.execute(_DELIVER["forget_sink_deliveries_if_old"], values)


async def forget_events(connection: Connection) -> None:
    values = {"limit": 100, "keep_s": 3600.0}
    await connection.execute(_DELIVER["forget_events_if_old"], values)


async def forget_old_events(connection: Connection) -> None:
    values = {"limit": _PAGE, "keep_s": 0.0}
    assert (await connection.execute(_DELIVER["forget_events_if_old"], values)).rowcount == _PAGE


async def note(connection: Connection) -> None:
    marks = [uuid4().bytes * 2 for _ in range(_PAGE)]
    values = {
        "owner": "o",
        "digests": ByteaArray(marks),
        "sources": TextArray(["/s"] * _PAGE),
        "event_ids": TextArray([mark.hex() for mark in marks]),
        "fingerprints": ByteaArray(marks),
        "request_ids": [uuid4() for _ in marks],
        "session_keys": TextArray(["k"] * _PAGE),
        "now": None,
    }
    assert len(await (await connection.execute(_EVENTS["note_events_if_new"], values)).fetchall()) == _PAGE


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    "operation",
    [announce, take, record, put_back, forget, forget_events, forget_old_events, note],
    ids=lambda operation: operation.__name__,
)
def test_cost_follows_what_is_asked(sizes: tuple[Session, Session], operation: Operation, mode: Mode) -> None:
    small, large = (session.explain(operation, mode) for session in sizes)
    # Trees grow a level.
    assert large.buffers <= 2 * small.buffers + 10, f"{small}\n{large}"
    if operation not in (forget, forget_events, forget_old_events):  # which begin at the beginning, and stop
        assert not large.scanned_whole() & set(_LARGE), str(large)
