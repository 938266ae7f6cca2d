"""Sessions against plain lists: any sequence of moves, time included, must agree."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db import arrays, sql
from penstock.erase import erase, purge
from penstock.model import Again, ClaimPermit, Item, Outcome, OutcomeState, SessionRequest
from penstock.sessions.accept import Accepted, Existing, Refused, accept_many
from penstock.sessions.answers import list_requests, read_answered
from penstock.sessions.sessions import cancel_request, get_session, put_session, resume_session
from penstock.settle.write import Changes, pass_over, settle
from tests.support.engine import claim_due
from tests.support.sessions import OWNER, POOL, wish
from tests.support.thorough import thorough

GRACE_S = 30.0
LIMITS = LivenessLimits(heartbeat_grace_s=GRACE_S, max_reclaims=3)
HEARTBEAT_SQL = sql.load("penstock.worker", "heartbeat.sql")
CLAIM_SQL = sql.load("penstock.claim", "claim.sql")
ROUTES = ["model-0", "model-1"]
KEYS = ["a", "b", "c"]
CAP = 6

_T = TypeVar("_T")


@dataclass
class Request:
    id: UUID
    route: str
    state: tuple[Any, ...] = ("pending",)
    """('pending',), ('leased', lease), ('deferred', due, attempt, reclaims) or ('settled', state)."""
    key: str | None = None
    cancelled: bool = False

    @property
    def status(self) -> str:
        if self.cancelled:
            return "cancelled"
        word = self.state[0]
        if word == "settled":
            return "completed" if self.state[1] == "completed" else "failed"
        return "processing" if word == "leased" else "pending"


@dataclass
class Session:
    id: UUID
    lane: int
    requests: list[Request] = field(default_factory=list)
    blocks: bool = False
    cap: int = CAP
    open: bool = True

    @property
    def next(self) -> int:
        return sum(request.state != ("pending",) for request in self.requests)

    def head(self) -> Request | None:
        """The first that is not decided."""
        return next((request for request in self.requests if request.state[0] != "settled"), None)


class SessionMachine(RuleBasedStateMachine):
    conninfo: ClassVar[str]

    items: Bundle[int] = Bundle("items")
    workers: Bundle[UUID] = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.db = self.wait(psycopg.AsyncConnection.connect(self.conninfo, autocommit=True))
        arrays.register(self.db)
        self.reclaimer = uuid4()
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.sessions: dict[str, Session] = {}
        self.held: dict[int, tuple[Item, UUID]] = {}
        """Everything ever claimed, by lease."""
        self.heartbeats: dict[UUID, datetime] = {}
        self.wait(
            self.db.execute(
                "TRUNCATE penstock.sessions, penstock.session_requests, penstock.templates, penstock.lanes,"
                " penstock.leases, penstock.deferrals, penstock.outcomes, penstock.attempts, penstock.reclaims,"
                " penstock.progress, penstock.workers, penstock.journal, penstock.erasures,"
                " penstock.erasure_pieces CASCADE"
            )
        )

    def teardown(self) -> None:
        self.wait(self.db.close())
        self.runner.close()

    def wait(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return self.runner.run(coroutine)

    # -- moves

    @initialize(target=workers)
    def first_workers(self) -> Any:
        return multiple(self.announce(), self.announce())

    @rule(target=workers)
    def register(self) -> UUID:
        return self.announce()

    def announce(self) -> UUID:
        worker = uuid4()
        self.wait(liveness.register(self.db, worker, POOL, now=self.now))
        self.heartbeats[worker] = self.now
        return worker

    @rule(
        target=items,
        asked=st.lists(
            st.tuples(
                st.sampled_from(KEYS), st.sampled_from(ROUTES), st.one_of(st.none(), st.sampled_from(["k1", "k2"]))
            ),
            min_size=1,
            max_size=6,
        ),
        taker=st.one_of(st.none(), workers),
        room=st.integers(0, 3),
    )
    def accept(self, asked: list[tuple[str, str, str | None]], taker: UUID | None, room: int) -> Any:
        """With a taker, what nothing is before is begun at once."""
        wishes = [wish(key, route=route, idempotency_key=once) for key, route, once in asked]
        permits = {POOL: ClaimPermit(taker, room)} if taker else None
        found = self.wait(accept_many(self.db, wishes, max_queued=CAP, permits=permits, now=self.now))
        begun: list[int] = []
        for (key, route, once), wanted, answer in zip(asked, wishes, found, strict=True):
            session = self.sessions.get(key)
            known = session and once and next((r for r in session.requests if r.key == once), None)
            if known:
                assert isinstance(answer, Existing)
                assert answer.request.id == known.id
                continue
            waiting = sum(r.state == ("pending",) and not r.cancelled for r in session.requests) if session else 0
            if session and waiting >= session.cap:
                assert answer == Refused("queue_full")
                continue
            assert isinstance(answer, Accepted)
            if session is None:
                session = self.sessions[key] = Session(answer.session_id, answer.lane_id)
            assert (answer.session_id, answer.ordinal) == (session.id, len(session.requests))
            request = Request(wanted.id, route, key=once)
            if taker and session.open and session.head() is None and len(begun) < room:
                assert answer.lease is not None
                request.state = ("leased", answer.lease.id)
                about = SessionRequest(wanted.id, wanted.endpoint, stream=False, waited=False, cancelled=False)
                item = Item(answer.lease, answer.ordinal, answer.sequence, "c", wanted.body, about)
                self.held[answer.lease.id] = (item, taker)
                begun.append(answer.lease.id)
            else:
                assert answer.lease is None
            session.requests.append(request)
        return multiple(*begun)

    @rule(target=items, worker=workers, want=st.integers(1, 4), routes=st.sets(st.sampled_from(ROUTES), min_size=1))
    def claim(self, worker: UUID, want: int, routes: set[str]) -> Any:
        wants = dict.fromkeys(sorted(routes), want)
        leases = self.wait(claim_due(self.db, pool=POOL, wants=wants, worker_id=worker, now=self.now))
        ready = {route: self.ready(route) for route in routes}
        found = self.wait(claims.read_heads(self.db, leases, max_bytes=1 << 20)) if leases else []
        assert len(found) == len(leases), "what was claimed can be read"
        taken = dict.fromkeys(routes, 0)
        for item in found:
            session = self.by_lane(item.lease.lane_id)
            assert session is not None
            assert session.open
            request = session.requests[item.ordinal]
            assert request is session.head(), "nothing of an item before the one ahead of it has its outcome"
            before = request.state
            assert before == ("pending",) or (before[0] == "deferred" and before[1] <= self.now)
            expected = (1, 0) if before == ("pending",) else before[2:]
            assert (item.attempt, item.lease.reclaims) == expected
            assert (item.session_request_id, item.cancelled) == (request.id, request.cancelled)
            assert item.lease.id not in self.held
            request.state = ("leased", item.lease.id)
            self.held[item.lease.id] = (item, worker)
            taken[request.route] += 1
        for route in routes:
            # One suspect at most comes with a claim.
            plain, suspects = ready[route]
            assert min(want, plain) <= taken[route] <= min(want, plain + suspects)
        return multiple(*(item.lease.id for item in found))

    def ready(self, route: str) -> tuple[int, int]:
        plain = suspects = 0
        for session in self.sessions.values():
            head = session.head() if session.open else None
            if head is None or head.route != route:
                continue
            if head.state[0] == "deferred" and head.state[1] <= self.now:
                plain, suspects = plain + (head.state[3] <= 1), suspects + (head.state[3] > 1)
            plain += head.state == ("pending",)
        return plain, suspects

    @rule(
        lease=items,
        verdict=st.sampled_from(["completed", "failed", "not_found", "retry", "throttled", "given back"]),
        as_worker=st.one_of(st.none(), workers),
    )
    def settle(self, lease: int, verdict: str, as_worker: UUID | None) -> None:
        """Any lease ever given, dead ones and other workers' included."""
        item, worker = self.held[lease]
        who = as_worker or worker
        changes = Changes()
        if verdict == "given back":
            changes.give_back(item.lease, item.lease.ranges)
        elif verdict in ("retry", "throttled"):
            changes.decide(item, Again(verdict, "m", 10.0, verdict == "retry"))
        elif item.cancelled:
            verdict = "skipped"
            changes.decide(item, Outcome(OutcomeState.SKIPPED, error_code="cancelled", error_message="m"))
        else:
            changes.decide(item, Outcome(OutcomeState(verdict), b"1", 200))
        settled = self.wait(settle(self.db, who, changes, now=self.now))
        found = self.holding(lease)
        if found is None or who != worker:
            assert settled.fenced == 1
            return
        assert settled.fenced == 0
        session, request = found
        if verdict in ("retry", "throttled", "given back"):
            due = self.now + timedelta(seconds=0 if verdict == "given back" else 10)
            request.state = ("deferred", due, item.attempt + (verdict == "retry"), item.lease.reclaims)
            return
        self.decided(session, request, verdict)

    def decided(self, session: Session, request: Request, state: str) -> None:
        request.state = ("settled", state)
        if session.blocks and state in ("failed", "not_found"):
            session.open = False

    @rule(seconds=st.sampled_from([1, 9, 11, 31]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(worker=workers)
    def heartbeat(self, worker: UUID) -> None:
        parameters = {"ids": [worker], "draining": [], "now": self.now}
        known = self.rows(HEARTBEAT_SQL["heartbeat_if_known"].decode(), parameters) != []
        assert known == (worker in self.heartbeats)
        if known:
            self.heartbeats[worker] = self.now

    @rule()
    def reclaim(self) -> None:
        limit = self.now - timedelta(seconds=GRACE_S)
        self.heartbeats = {worker: seen for worker, seen in self.heartbeats.items() if seen > limit}
        doomed = {}
        for lease, (item, worker) in self.held.items():
            found = self.holding(lease)
            if found is None or worker in self.heartbeats:
                continue
            found[1].state = ("deferred", self.now, item.attempt, item.lease.reclaims + 1)
            if item.lease.reclaims + 1 >= LIMITS.max_reclaims:
                doomed[item.lease.lane_id] = found
        lost = self.wait(liveness.reclaim(self.db, self.reclaimer, LIMITS, stuck_s=1e6, now=self.now))
        assert {lease.lane_id for lease in lost.given_up} == doomed.keys()
        assert all(lease.session for lease in lost.given_up)
        for condemned in lost.given_up:
            (item,) = self.wait(claims.read_heads(self.db, [condemned], max_bytes=1))
            self.give_up(item, doomed)

    def give_up(self, item: Item, doomed: dict[int, tuple[Session, Request]]) -> None:
        session, request = doomed[item.lease.lane_id]
        state = "skipped" if item.cancelled else "failed"
        code = "cancelled" if item.cancelled else "worker_lost"
        changes = Changes()
        changes.decide(item, Outcome(OutcomeState(state), error_code=code, error_message="m"))
        assert self.wait(settle(self.db, self.reclaimer, changes, now=self.now)).outcomes == 1
        self.decided(session, request, state)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sessions)), label="session")
        request = data.draw(st.sampled_from(self.sessions[key].requests), label="request")
        moved = self.wait(cancel_request(self.db, OWNER, key, request.id, now=self.now))
        assert moved == (not request.cancelled and request.state[0] in ("pending", "deferred"))
        if moved:
            request.cancelled = True
            if request.state[0] == "deferred":
                request.state = ("deferred", min(request.state[1], self.now), *request.state[2:])

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def pass_over(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sessions)), label="session")
        session = self.sessions[key]
        passed = self.wait(pass_over(self.db, [session.id], now=self.now))
        while (head := session.head()) is not None and head.cancelled and head.state[0] in ("pending", "deferred"):
            head.state = ("settled", "skipped")
            passed -= 1
        assert passed == 0

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), blocks=st.booleans(), cap=st.integers(1, CAP))
    def put(self, data: st.DataObject, blocks: bool, cap: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.sessions)), label="session")
        word = "block" if blocks else "continue"
        row = self.wait(put_session(self.db, OWNER, key, on_dead_head=word, max_queued=cap))
        session = self.sessions[key]
        assert row.id == session.id
        session.blocks, session.cap = blocks, cap

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), retry_head=st.booleans())
    def resume(self, data: st.DataObject, retry_head: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.sessions)), label="session")
        session = self.sessions[key]
        moved = self.wait(resume_session(self.db, OWNER, key, retry_head=retry_head, now=self.now))
        assert moved == (not session.open)
        if moved and retry_head:
            session.requests[session.next - 1].state = ("deferred", self.now, 1, 0)
        session.open = True

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sessions)), label="session")
        assert self.wait(erase.delete_session(self.db, OWNER, key, now=self.now))
        assert not self.wait(erase.delete_session(self.db, OWNER, key, now=self.now))
        gone = self.sessions.pop(key)
        told = self.wait(read_answered(self.db, [request.id for request in gone.requests]))
        assert len(told) == len(gone.requests), "nobody waits for what will never come"

    @rule(rows=st.integers(1, 20))
    def purge(self, rows: int) -> None:
        while self.wait(purge.purge_step(self.db, rows, now=self.now)):
            pass
        ids = [session.id for session in self.sessions.values()]
        lanes = [session.lane for session in self.sessions.values()]
        for table, column, known in (
            *(("sessions", "id", ids), ("leases", "batch_id", ids), ("deferrals", "batch_id", ids)),
            *(("lanes", "id", lanes), ("outcomes", "lane_id", lanes), ("attempts", "lane_id", lanes)),
            *(("session_requests", "lane_id", lanes), ("templates", "-source_id", lanes)),
        ):
            query = f"SELECT count(*) FROM penstock.{table} WHERE {column} <> ALL (%s)"
            assert self.rows(query, [known]) == [(0,)], table

    # -- what must hold after every move

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        for session in self.sessions.values():
            ((next_, total, busy, opened),) = self.rows(
                "SELECT next, total, busy, open FROM penstock.lanes WHERE id = %s", [session.lane]
            )
            assert (next_, total, opened) == (session.next, len(session.requests), session.open)
            places = [
                ("leased", self.spread("leases", session.lane)),
                ("deferred", self.spread("deferrals", session.lane)),
                ("settled", self.numbers_of("SELECT ordinal FROM penstock.outcomes WHERE lane_id = %s", session.lane)),
                ("pending", list(range(next_, total))),
            ]
            for word, ordinals in places:
                expected = [n for n, request in enumerate(session.requests) if request.state[0] == word]
                assert sorted(ordinals) == expected, (word, session)
            assert busy == sum(len(ordinals) for _, ordinals in places[:2]) <= 1, "one in flight"

    @invariant()
    def in_order(self) -> None:
        for session in self.sessions.values():
            words = [request.state[0] for request in session.requests]
            order = {"settled": 0, "leased": 1, "deferred": 1, "pending": 2}
            ranks = [order[word] for word in words]
            assert ranks == sorted(ranks)

    @invariant()
    def readers_agree(self) -> None:
        for key, session in self.sessions.items():
            listed = self.wait(list_requests(self.db, OWNER, key, limit=1000))
            assert [(row.id, row.sequence, row.status) for row in listed] == [
                (request.id, n, request.status) for n, request in enumerate(session.requests, 1)
            ]
            row = self.wait(get_session(self.db, OWNER, key))
            assert row is not None
            assert row.queued + row.in_flight + row.answered == row.total == len(session.requests)
            assert row.in_flight == sum(request.state[0] == "leased" for request in session.requests)

    def by_lane(self, lane: int) -> Session | None:
        return next((session for session in self.sessions.values() if session.lane == lane), None)

    def holding(self, lease: int) -> tuple[Session, Request] | None:
        """The request that this lease holds now."""
        item, _ = self.held[lease]
        session = self.by_lane(item.lease.lane_id)
        request = session.requests[item.ordinal] if session else None
        return (session, request) if session and request and request.state == ("leased", lease) else None

    def spread(self, table: str, lane: int) -> list[int]:
        query = f"SELECT generate_series(lower(r), upper(r) - 1) FROM penstock.{table}, unnest(ordinals) r"
        return self.numbers_of(query + " WHERE lane_id = %s", lane)

    def numbers_of(self, query: str, lane: int) -> list[int]:
        return [number for (number,) in self.rows(query, [lane])]

    def rows(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        async def fetch() -> list[tuple[Any, ...]]:
            return await (await self.db.execute(query.encode(), parameters)).fetchall()

        return self.wait(fetch())


@pytest.mark.slow
def test_sessions_agree_with_the_model(database: str) -> None:
    SessionMachine.conninfo = database
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=40 if thorough() else 20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
