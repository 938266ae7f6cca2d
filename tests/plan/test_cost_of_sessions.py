"""A session with any number of requests behind it and before it costs nobody anything: not the others, not itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from penstock.claim import claim as claims
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.model import ClaimPermit, Item, Lease
from penstock.sessions import answers, sessions
from penstock.sessions.accept import accept_many
from penstock.sessions.answers import list_requests
from penstock.sessions.sessions import cancel_request
from penstock.settle.write import Changes, settle
from tests.plan.conftest import LARGE, SMALL
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Plan, Session
from tests.support.sessions import DONE, OWNER, POOL, ROUTE, accepted, wish

ACTIVE = 500
WANT = 20
WORKER = uuid4()
SHALLOW, DEEP = SMALL, LARGE
_LARGE = {"sessions", "session_requests", "templates", "outcomes", "lanes"}

_REQUESTS = (
    "INSERT INTO penstock.session_requests (lane_id, ordinal, id, session_id, owner, pool, route, endpoint,"
    "  accepted_at, cancelled_at)"
    " SELECT l.id, n, gen_random_uuid(), l.batch_id, %(owner)s, l.pool, l.route, l.endpoint, now(),"
    "        CASE n %% 50 WHEN 7 THEN now() END"
    "   FROM penstock.lanes l, generate_series(1, 2 * %(depth)s) AS n WHERE l.id = %(lane)s",
    "INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, body)"
    " SELECT -%(lane)s, 0, n, n + 1, n, '{}' FROM generate_series(1, 2 * %(depth)s) AS n",
    "INSERT INTO penstock.outcomes (lane_id, ordinal, line, state, attempts, lease_id, finished_at, custom_id,"
    "  response)"
    " SELECT %(lane)s, n, n + 1,"
    "        CASE n %% 50 WHEN 3 THEN 'failed' ELSE 'completed' END::penstock.outcome_state, 1, 0, now(), n, '1'"
    "   FROM generate_series(0, %(depth)s - 1) AS n",
    "UPDATE penstock.lanes SET next = %(depth)s, total = 2 * %(depth)s + 1, tag = 0 WHERE id = %(lane)s",
)


@dataclass(frozen=True, slots=True)
class World:
    """Some sessions with a request or two each, and one with many."""

    session: Session
    deep: Lease
    """The request of the deep one that is being worked on."""
    leases: list[Lease]
    """Of others."""
    ids: list[UUID]
    """Of requests, answered and not."""


@contextmanager
def _world(server: str, depth: int) -> Iterator[World]:
    with fresh_database(server) as session:
        session.execute("ANALYZE")
        keys = ["deep", *(f"key-{number}" for number in range(ACTIVE))]
        found = session.run(lambda connection: accept_many(connection, [wish(key) for key in [*keys, *keys[1:]]]))
        lane = accepted(found[0]).lane_id
        session.execute(
            "DELETE FROM penstock.session_requests WHERE lane_id = %(lane)s AND ordinal > 0", {"lane": lane}
        )
        session.execute("DELETE FROM penstock.templates WHERE source_id = -%(lane)s AND ordinal > 0", {"lane": lane})
        for statement in _REQUESTS:
            session.execute(statement, {"lane": lane, "depth": depth, "owner": OWNER})
        leases = session.run(_claim)
        (deep,) = [lease for lease in leases if lease.lane_id == lane]
        ids = session.execute(
            "SELECT id FROM penstock.session_requests WHERE lane_id = %(lane)s"
            " AND ordinal >= %(depth)s - 25 AND ordinal < %(depth)s + 25",
            {"lane": lane, "depth": depth},
        )
        others = [lease for lease in leases if lease is not deep]
        yield World(session, deep, others, [request_id for (request_id,) in ids])


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[World, World]]:
    with ExitStack() as stack:
        small, large = (stack.enter_context(_world(any_server, depth)) for depth in (SHALLOW, DEEP))
        yield small, large


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def worlds(request: pytest.FixtureRequest, built: tuple[World, World]) -> tuple[World, World]:
    for world in built:
        inform(world.session, request.param)
    return built


async def _claim(connection: Connection) -> list[Lease]:
    return (await claims.claim_in_line(connection, pool=POOL, wants={ROUTE: WANT}, worker_id=WORKER, look=WANT)).leases


# -- each one statement


async def claim(_: World, connection: Connection) -> None:
    assert len(await _claim(connection)) == WANT


async def read_heads(world: World, connection: Connection) -> None:
    leases = [world.deep, *world.leases]
    assert len(await claims.read_heads(connection, leases, max_bytes=1 << 20)) == WANT


async def settle_heads(world: World, connection: Connection) -> None:
    changes = Changes()
    for lease in (world.deep, *world.leases):
        ordinal = lease.ranges[0][0]
        changes.decide(Item(lease, ordinal, ordinal + 1, "id", b"{}"), DONE)
    assert (await settle(connection, WORKER, changes)).outcomes == WANT


async def accept(_: World, connection: Connection) -> None:
    keys = ["deep", *(f"key-{number}" for number in range(9)), *(f"new-{number}" for number in range(5))]
    found = await accept_many(connection, [wish(key) for key in keys for _ in range(2)])
    assert all(map(accepted, found))


async def accept_and_begin(_: World, connection: Connection) -> None:
    keys = ["deep", *(f"key-{number}" for number in range(9)), *(f"fresh-{number}" for number in range(5))]
    found = await accept_many(connection, [wish(key) for key in keys], permits={POOL: ClaimPermit(WORKER, 9)})
    assert sum(accepted(each).lease is not None for each in found) >= 5


async def list_old(_: World, connection: Connection) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    place, deleted = await erase.expire_sessions(connection, 60, UUID(int=0), 20, now=later)
    assert place is not None
    assert deleted == 0


async def accept_keyed(_: World, connection: Connection) -> None:
    wishes = [wish("deep", idempotency_key=f"k{number}") for number in range(10)]
    assert all(map(accepted, await accept_many(connection, wishes)))


async def answered(world: World, connection: Connection) -> None:
    assert 20 < len(await answers.read_answered(connection, world.ids)) < 30


async def get_request(world: World, connection: Connection) -> None:
    assert await answers.get_request(connection, OWNER, "deep", world.ids[0]) is not None


async def get_request_and_body(world: World, connection: Connection) -> None:
    found = await answers.get_request_and_body(connection, OWNER, "deep", world.ids[0])
    assert found is not None
    assert found[1] == b"{}"


async def get_session(_: World, connection: Connection) -> None:
    row = await sessions.get_session(connection, OWNER, "deep")
    assert row is not None
    assert row.in_flight == 1


async def list_sessions(_: World, connection: Connection) -> None:
    assert len(await sessions.list_sessions(connection, OWNER, limit=20)) == 20


async def cancel(world: World, connection: Connection) -> None:
    await cancel_request(connection, OWNER, "deep", world.ids[-2])


def _listing(
    status: str | None, middle: bool = False, newest: bool = False
) -> Callable[[World, Connection], Awaitable[None]]:
    async def listed(world: World, connection: Connection) -> None:
        place = world.deep.ranges[0][0] // 2 if middle else 0
        rows = await list_requests(
            *(connection, OWNER, "deep"),
            limit=1,
            status=status,
            after_sequence=place if middle else 0,
            newest_first=newest,
        )
        assert len(rows) == 1

    listed.__name__ = f"list_{status or 'all'}{'_from_the_middle' if middle else ''}{'_newest' if newest else ''}"
    return listed


_STATUSES = (None, "pending", "processing", "completed", "failed", "cancelled")
_HOT = [claim, read_heads, settle_heads, accept, accept_and_begin, accept_keyed, answered]
_OTHERS = [
    *(get_request, get_request_and_body, get_session, list_sessions, list_old, cancel),
    *(_listing(status, middle) for status in _STATUSES for middle in (False, True)),
    *(_listing(status, newest=True) for status in _STATUSES),
]

Operation = Callable[[World, Connection], Awaitable[None]]


@pytest.mark.parametrize("mode", Mode, ids=str)
@pytest.mark.parametrize("operation", _HOT, ids=lambda operation: operation.__name__)
def test_hot_statements(worlds: tuple[World, World], operation: Operation, mode: Mode) -> None:
    _check(worlds, operation, mode)


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.CHOSEN], ids=str)
@pytest.mark.parametrize("operation", _OTHERS, ids=lambda operation: operation.__name__)
def test_the_others(worlds: tuple[World, World], operation: Operation, mode: Mode) -> None:
    _check(worlds, operation, mode)


def _check(worlds: tuple[World, World], operation: Operation, mode: Mode) -> None:
    small, large = (_explain(world, operation, mode) for world in worlds)
    # A hundred times the rows make every index a level or two deeper, and no more.
    assert large.buffers <= 2 * small.buffers + 20, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert not large.scanned_whole() & _LARGE, f"{large}"


def _explain(world: World, operation: Operation, mode: Mode) -> Plan:
    return world.session.explain(lambda connection: operation(world, connection), mode)


def test_claims_of_others_do_not_notice_a_deep_session(worlds: tuple[World, World]) -> None:
    small, large = (_explain(world, claim, Mode.CUSTOM) for world in worlds)
    assert large.buffers <= 1.2 * small.buffers + 2, f"{small.buffers} buffers became {large.buffers}:\n{large}"


@pytest.mark.parametrize("fresh", [True, False], ids=["new", "known"])
@pytest.mark.parametrize("mode", Mode, ids=str)
def test_accepting_into_many_sessions_handles_each_a_few_times(any_server: str, mode: Mode, fresh: bool) -> None:
    count = 400
    with fresh_database(any_server) as session:
        session.execute("ANALYZE")
        wishes = [wish(f"key-{number}", idempotency_key="k") for number in range(count)]
        if not fresh:
            session.run(lambda connection: accept_many(connection, wishes))
        again = [wish(f"key-{number}", idempotency_key="l") for number in range(count)]

        async def accept_again(connection: Connection) -> None:
            await accept_many(connection, again)

        plan = session.explain(accept_again, mode)
        assert plan.rows_handled <= 60 * count, str(plan)
        assert plan.buffers <= 80 * count, str(plan)
