"""A statement that handles many rows handles each a few times: no loop within a loop, no pass per row."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from penstock.batches.upkeep import list_unfinished
from penstock.batches.validate import list_unvalidated
from penstock.claim import claim as claims
from penstock.db import sql
from penstock.db.pool import Connection
from penstock.model import Again, Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.plan.crowd import POOL, fresh_database, make_subject, sweep
from tests.support.plans import Mode, Plan, Session

SESSIONS = 400
ROUTE = "model-session"
WORKER = uuid4()

_CLAIM = sql.load("penstock.claim", "claim.sql")

_LANES = (
    "INSERT INTO penstock.lanes (batch_id, pool, route, endpoint, source_id, source_lane, total, width, tag, session)"
    " SELECT %(batch)s, %(pool)s, %(route)s, '/v1', 1, 0, 4, 2, 0, true FROM generate_series(1, %(count)s)"
)
_LEASES = (
    "WITH owner AS ("
    "  INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
    "  SELECT gen_random_uuid(), %(pool)s, 'h', 'm', 1, 0, now(), now() - %(silence)s"
    "    FROM generate_series(1, %(workers)s) RETURNING id)"
    " INSERT INTO penstock.leases"
    "   (lane_id, batch_id, pool, route, limited, worker_id, ordinals, attempt, claimed_at, progressed_at)"
    " SELECT 1, gen_random_uuid(), %(pool)s, 'r', false, id, '{[0,9)}', 1, now(), now()"
    "   FROM owner, generate_series(1, %(each)s)"
)

_ENDED = (
    "INSERT INTO penstock.batches (id, owner, pool, total, created_at, validated_at, completed_at, completed, failed,"
    "  not_found, skipped, retried, output_bytes, error_bytes, input_tokens, cached_tokens, output_tokens,"
    "  reasoning_tokens)"
    " SELECT gen_random_uuid(), 'local', %(pool)s, 1, now(), now(), now(), 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0"
    "   FROM generate_series(1, 20000)"
)


@pytest.fixture(scope="module", params=["analysed", "analysed-before"])
def crowded(request: pytest.FixtureRequest, any_server: str) -> Iterator[tuple[Session, list[Lease]]]:
    """Lanes of width two with both items leased to one worker, and as many lanes with nothing in flight."""
    with fresh_database(any_server) as session:
        subject = make_subject(session, 1)
        session.execute("ANALYZE")
        lanes = {"batch": subject.batch, "pool": POOL, "route": ROUTE, "count": SESSIONS}
        session.execute(_LANES, lanes)
        leases = session.run(lambda connection: _claim(connection, 2 * SESSIONS))
        session.execute(_LANES, lanes)
        if request.param == "analysed":
            session.execute("ANALYZE")
        yield session, leases


@pytest.fixture
def sessions(crowded: tuple[Session, list[Lease]]) -> Iterator[tuple[Session, list[Lease]]]:
    """The same for every test, in any order: nothing is left of those before."""
    yield crowded
    sweep(crowded[0])


@pytest.fixture(params=Mode, ids=str)
def mode(request: pytest.FixtureRequest) -> Mode:
    return Mode(request.param)


async def _claim(connection: Connection, want: int, wait: timedelta = timedelta()) -> list[Lease]:
    now = datetime.now(UTC) + wait
    options: dict[str, Any] = {"pool": POOL, "wants": {ROUTE: want}, "worker_id": WORKER, "look": want, "now": now}
    return (await claims.claim_in_line(connection, **options)).leases


async def _line_up(connection: Connection) -> None:
    now = datetime.now(UTC) + timedelta(minutes=1)
    await claims.line_up(connection, pool=POOL, routes=[ROUTE], now=now)


def _changes(leases: list[Lease], verdict: Outcome | Again, *, whole: bool) -> Changes:
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, 2 if whole else 1):
            changes.decide(Item(lease, ordinal, ordinal + 1, "id", b"{}"), verdict)
    return changes


_DONE = Outcome(OutcomeState.COMPLETED, b'"answer"', 200)
_FAILED = Outcome(OutcomeState.FAILED, error_code="bad", error_message="no")
_AGAIN = Again("busy", "try later", 1.0, True)


def _check(plan: Plan, ordinals: int) -> None:
    # A pass per row would be hundreds for each.
    assert plan.rows_handled <= 50 * ordinals, str(plan)
    assert plan.buffers <= 50 * ordinals, str(plan)


def test_claim_of_many_sessions(sessions: tuple[Session, list[Lease]], mode: Mode) -> None:
    session, _ = sessions
    plan = session.explain(lambda connection: _claim(connection, SESSIONS), mode)
    assert plan.rows == SESSIONS // 2
    _check(plan, SESSIONS)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in part"])
@pytest.mark.parametrize(
    "verdict",
    [
        pytest.param(_DONE, id="done"),
        pytest.param(_FAILED, id="failed", marks=pytest.mark.again),
        pytest.param(_AGAIN, id="again"),
    ],
)
def test_settle_of_many_sessions(
    sessions: tuple[Session, list[Lease]], mode: Mode, verdict: Outcome | Again, whole: bool
) -> None:
    session, leases = sessions
    changes = _changes(leases, verdict, whole=whole)
    plan = session.explain(lambda connection: settle(connection, WORKER, changes), mode)
    _check(plan, changes.ordinals())


def test_claim_of_many_retries(any_server: str) -> None:
    """Nobody has told the planner that there is anything in these tables."""
    with fresh_database(any_server) as session:
        subject = make_subject(session, 1)
        session.execute(_LANES, {"batch": subject.batch, "pool": POOL, "route": ROUTE, "count": SESSIONS})
        leases = session.run(lambda connection: _claim(connection, 2 * SESSIONS))
        changes = _changes(leases, _AGAIN, whole=True)
        session.run(lambda connection: settle(connection, WORKER, changes))
        for mode in Mode:
            _check(session.explain(_line_up, mode), 2 * SESSIONS)
        session.run(_line_up)
        for mode in Mode:
            plan = session.explain(lambda connection: _claim(connection, 2 * SESSIONS, timedelta(minutes=1)), mode)
            assert plan.rows == SESSIONS
            _check(plan, 2 * SESSIONS)


@pytest.mark.parametrize("analysed", [True, False], ids=["analysed", "analysed-before"])
def test_reclaim_looks_once_at_every_lease_and_worker(any_server: str, analysed: bool) -> None:
    alive = {"pool": POOL, "workers": 500, "each": 10, "silence": timedelta()}
    silent = {"pool": POOL, "workers": 10, "each": 1, "silence": timedelta(minutes=1)}
    parameters = {
        **{"grace_s": 30.0, "stuck_s": 150.0, "gone": [], "now": None, "limit": 1_000},
        **{"worker": uuid4(), "action": "requeue", "max_reclaims": 5},
    }
    with fresh_database(any_server) as session:
        session.execute("ANALYZE")
        session.execute(_LEASES, alive)
        session.execute(_LEASES, silent)
        if analysed:
            session.execute("ANALYZE")
        ((pages,),) = session.execute(
            "SELECT (pg_relation_size('penstock.leases') + pg_relation_size('penstock.workers')) / 8192"
        )
        for mode in Mode:
            for look in (True, False):
                every = parameters | {"look_for_stuck": look}
                plan = session.explain(lambda connection: connection.execute(_CLAIM["reclaim_if_lost"], every), mode)  # noqa: B023
                # Besides the tables: one probe for each holder, and some pages for each lease taken.
                assert plan.buffers <= look * 1.2 * pages + 4 * 510 + 30 * 10, f"{mode}\n{plan}"
                # What the living hold is read only when looking for what is stuck.
                assert plan.rows_handled <= look * 4 * 5_000 + 10 * 510, f"{mode}\n{plan}"


@pytest.mark.parametrize("analysed", [True, False], ids=["analysed", "analysed-before"])
def test_housekeeping_does_not_see_ended_batches(any_server: str, analysed: bool) -> None:
    with fresh_database(any_server) as session:
        batch = make_subject(session, 1).batch
        session.execute("ANALYZE")
        session.execute(_ENDED, {"pool": POOL})
        if analysed:
            session.execute("ANALYZE")

        async def unfinished(connection: Connection) -> None:
            assert await list_unfinished(connection) == [batch]

        async def unvalidated(connection: Connection) -> None:
            assert await list_unvalidated(connection) == []

        for mode in Mode:
            for look in (unfinished, unvalidated):
                plan = session.explain(look, mode)
                assert plan.buffers <= 10, f"{mode}\n{plan}"
