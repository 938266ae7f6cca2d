"""The engine's SQL against a plain dict: any sequence of moves, time included, must agree."""

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

from penstock.batches.finish import finish_batch
from penstock.batches.read import get_batch, read_status
from penstock.batches.run_again import NotFailed, NotRetryable, retry_batch
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db import arrays, sql
from penstock.erase import erase, purge
from penstock.model import Again, BatchState, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.engine import claim_due, count_leased, make_batch, tidy
from tests.support.thorough import thorough

GRACE_S = 30.0
LIMITS = LivenessLimits(heartbeat_grace_s=GRACE_S, max_reclaims=4)
HEARTBEAT_SQL = sql.load("penstock.worker", "heartbeat.sql")
CLAIM_SQL = sql.load("penstock.claim", "claim.sql")
POOL = "test"
ROUTES = ["model-0", "model-1"]

_T = TypeVar("_T")


@dataclass
class Lane:
    batch: UUID
    route: str
    width: int | None
    state: dict[int, tuple[Any, ...]]
    """By ordinal: ('pending',), ('leased', lease, attempt), ('deferred', due, attempt, reclaims),
    ('settled', state, answer), or ('dropped',) with the file it came from."""

    def having(self, word: str) -> list[int]:
        return [ordinal for ordinal, state in self.state.items() if state[0] == word]


@dataclass
class Model:
    lanes: dict[int, Lane] = field(default_factory=dict)
    states: dict[UUID, BatchState] = field(default_factory=dict)
    frozen: dict[UUID, int] = field(default_factory=dict)
    leases: dict[int, tuple[Lease, UUID]] = field(default_factory=dict)
    live: set[int] = field(default_factory=set)
    heartbeats: dict[UUID, datetime] = field(default_factory=dict)
    settled_seen: dict[UUID, int] = field(default_factory=dict)
    files: dict[UUID, UUID] = field(default_factory=dict)
    """By batch, unless deleted."""
    deleted: set[UUID] = field(default_factory=set)
    """Batches of which nothing may be seen again."""

    def claimable(self, route: str, now: datetime) -> tuple[int, int]:
        """How many ordinals of a route could be claimed, and how many suspects besides."""
        due = fresh = suspects = 0
        for lane in self.lanes.values():
            if lane.route != route or self.states[lane.batch] is not BatchState.IN_PROGRESS:
                continue
            for state in lane.state.values():
                if state[0] == "deferred" and state[1] <= now:
                    due, suspects = due + (state[3] <= 1), suspects + (state[3] > 1)
            room = len(lane.having("pending"))
            if lane.width is not None:
                busy = len(lane.having("leased")) + len(lane.having("deferred"))
                room = min(room, lane.width - busy)
            fresh += room
        return due + fresh, suspects


class EngineMachine(RuleBasedStateMachine):
    conninfo: ClassVar[str]

    leases: Bundle[int] = Bundle("leases")
    workers: Bundle[UUID] = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.db = self.wait(psycopg.AsyncConnection.connect(self.conninfo, autocommit=True))
        arrays.register(self.db)
        self.model = Model()
        self.reclaimer = uuid4()
        self.now = datetime(2030, 1, 1, tzinfo=UTC)
        self.wait(
            self.db.execute(
                "TRUNCATE penstock.files, penstock.file_lanes, penstock.templates, penstock.batches,"
                " penstock.lanes, penstock.leases, penstock.deferrals, penstock.outcomes, penstock.attempts,"
                " penstock.reclaims, penstock.progress, penstock.workers, penstock.gates, penstock.journal,"
                " penstock.erasures, penstock.erasure_pieces, penstock.webhook_deliveries CASCADE"
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
        self.model.heartbeats[worker] = self.now
        return worker

    @rule(
        totals=st.lists(st.integers(1, 12), min_size=1, max_size=2),
        width=st.one_of(st.none(), st.integers(1, 3)),
    )
    def create(self, totals: list[int], width: int | None) -> None:
        batch = self.wait(make_batch(self.db, totals, pool=POOL, width=width, now=self.now))
        self.model.states[batch] = BatchState.IN_PROGRESS
        ((self.model.files[batch],),) = self.rows("SELECT file_id FROM penstock.batches WHERE id = %s", [batch])
        for lane_id, route, total in self.rows(
            "SELECT id, route, total FROM penstock.lanes WHERE batch_id = %s", [batch]
        ):
            pending = dict.fromkeys(range(total), ("pending",))
            self.model.lanes[lane_id] = Lane(batch, route, width, dict(pending))

    @rule(
        target=leases,
        worker=workers,
        want=st.integers(1, 8),
        routes=st.sets(st.sampled_from(ROUTES), min_size=1),
        suspect_ok=st.booleans(),
    )
    def claim(self, worker: UUID, want: int, routes: set[str], suspect_ok: bool) -> Any:
        found = self.wait(
            claim_due(
                self.db,
                pool=POOL,
                wants=dict.fromkeys(sorted(routes), want),
                worker_id=worker,
                taper_floor=99,
                suspect_ok=suspect_ok,
                now=self.now,
            )
        )
        found.sort(key=lambda lease: lease.id)
        suspects = [lease for lease in found if lease.suspect]
        open_to_all = {route: self.model.claimable(route, self.now) for route in sorted(routes)}
        assert len(suspects) == (1 if suspect_ok and any(count for _, count in open_to_all.values()) else 0)
        taken = dict.fromkeys(routes, 0)
        for lease in found:
            lane = self.model.lanes[lease.lane_id]
            assert self.model.states[lane.batch] is BatchState.IN_PROGRESS
            assert lease.id not in self.model.leases
            self.model.leases[lease.id] = (lease, worker)
            self.model.live.add(lease.id)
            for ordinal in claims.first_ordinals(lease.ranges, 10_000):
                before = lane.state[ordinal]
                assert before == ("pending",) or (before[0] == "deferred" and before[1] <= self.now)
                assert (lease.attempt, lease.reclaims) == ((1, 0) if before == ("pending",) else before[2:])
                lane.state[ordinal] = ("leased", lease.id, lease.attempt)
                taken[lease.route] += 1
        for route, (plain, _) in open_to_all.items():
            alone = count_leased(lease for lease in suspects if lease.route == route)
            assert taken[route] == min(want, plain + alone)
        return multiple(*(lease.id for lease in found))

    @rule(lease=leases, data=st.data(), as_worker=st.one_of(st.none(), workers))
    def settle(self, lease: int, data: st.DataObject, as_worker: UUID | None) -> None:
        """Settle some ordinals of any lease ever given, dead ones and other workers' included."""
        held, worker = self.model.leases[lease]
        every = claims.first_ordinals(held.ranges, 10_000)
        chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True), label="ordinals")
        verdicts = {
            ordinal: data.draw(st.sampled_from(["completed", "failed", "not_found", "skipped", "retry", "throttled"]))
            for ordinal in chosen
        }
        changes = Changes()
        for ordinal, verdict in verdicts.items():
            if verdict in ("retry", "throttled"):
                changes.agains.append((held, ordinal, Again(verdict, "m", 10.0, verdict == "retry")))
            else:
                body = f'"{lease}"'.encode()
                changes.outcomes.append((held, ordinal, 1, "c", Outcome(OutcomeState(verdict), body, 200)))
        who = as_worker or worker
        settled = self.wait(settle(self.db, who, changes, now=self.now))
        accepted = [o for o in chosen if who == worker and self.holds(held, o)]
        assert settled.outcomes + settled.retries == len(accepted)
        assert settled.fenced == len(chosen) - len(accepted)
        if not accepted:
            return
        lane = self.model.lanes[held.lane_id]
        for ordinal in accepted:
            verdict = verdicts[ordinal]
            if verdict in ("retry", "throttled"):
                due = self.now + timedelta(seconds=10)
                lane.state[ordinal] = ("deferred", due, held.attempt + (verdict == "retry"), held.reclaims)
            else:
                lane.state[ordinal] = ("settled", verdict, f'"{lease}"'.encode())

    @rule(lease=leases, data=st.data())
    def give_back(self, lease: int, data: st.DataObject) -> None:
        held, worker = self.model.leases[lease]
        every = claims.first_ordinals(held.ranges, 10_000)
        chosen = data.draw(st.lists(st.sampled_from(every), min_size=1, unique=True), label="ordinals")
        changes = Changes()
        changes.give_back(held, [(ordinal, ordinal + 1) for ordinal in chosen])
        settled = self.wait(settle(self.db, worker, changes, now=self.now))
        accepted = [ordinal for ordinal in chosen if self.holds(held, ordinal)]
        assert settled.given_back == len(accepted)
        for ordinal in accepted:
            self.model.lanes[held.lane_id].state[ordinal] = ("deferred", self.now, held.attempt, held.reclaims)

    @rule(seconds=st.sampled_from([1, 9, 11, 31]))
    def time_passes(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(worker=workers)
    def heartbeat(self, worker: UUID) -> None:
        parameters = {"ids": [worker], "draining": [], "now": self.now}
        known = self.rows(HEARTBEAT_SQL["heartbeat_if_known"].decode(), parameters) != []
        assert known == (worker in self.model.heartbeats)
        if known:
            self.model.heartbeats[worker] = self.now

    @rule()
    def reclaim(self) -> None:
        """The lost are split and run again, until they are lost alone and too often: then they fail."""
        limit = self.now - timedelta(seconds=GRACE_S)
        self.model.heartbeats = {worker: seen for worker, seen in self.model.heartbeats.items() if seen > limit}
        doomed: dict[tuple[int, int], int] = {}
        for lease_id in sorted(self.model.live):
            held, worker = self.model.leases[lease_id]
            if worker in self.model.heartbeats:
                continue
            self.model.live.discard(lease_id)
            lane = self.model.lanes[held.lane_id]
            left = [ordinal for ordinal in lane.state if self.holds(held, ordinal)]
            for ordinal in left:
                lane.state[ordinal] = ("deferred", self.now, held.attempt, held.reclaims + 1)
                if len(left) == 1 and held.reclaims + 1 >= LIMITS.max_reclaims:
                    doomed[held.lane_id, ordinal] = held.attempt
        lost = self.wait(liveness.reclaim(self.db, self.reclaimer, LIMITS, stuck_s=1e6, now=self.now))
        condemned = {(lease.lane_id, lease.ranges[0][0]): lease for lease in lost.given_up}
        assert {place: lease.attempt for place, lease in condemned.items()} == doomed
        for (lane_id, ordinal), lease in condemned.items():
            changes = Changes(outcomes=[(lease, ordinal, 1, "c", Outcome(OutcomeState.FAILED, b"0"))])
            assert self.wait(settle(self.db, self.reclaimer, changes, now=self.now)).outcomes == 1
            self.model.lanes[lane_id].state[ordinal] = ("settled", "failed", b"0")

    @precondition(lambda self: self.model.states)
    @rule(data=st.data(), move=st.sampled_from(["pause", "resume", "cancel", "finish", "tidy"]))
    def steer(self, data: st.DataObject, move: str) -> None:
        batch = data.draw(st.sampled_from(list(self.model.states)), label="batch")
        before = self.model.states[batch]
        getattr(self, f"_{move}")(batch, before)

    def _pause(self, batch: UUID, before: BatchState) -> None:
        moved = self.wait(pause_batch(self.db, batch, now=self.now))
        assert moved == (before is BatchState.IN_PROGRESS)
        if moved:
            self.model.states[batch] = BatchState.PAUSED

    def _resume(self, batch: UUID, before: BatchState) -> None:
        moved = self.wait(resume_batch(self.db, batch, now=self.now))
        assert moved == (before is BatchState.PAUSED)
        if moved:
            self.model.states[batch] = BatchState.IN_PROGRESS

    def _cancel(self, batch: UUID, before: BatchState) -> None:
        moved = self.wait(cancel_batch(self.db, batch, now=self.now))
        assert moved == (before in (BatchState.IN_PROGRESS, BatchState.PAUSED))
        if moved:
            self.model.states[batch] = BatchState.CANCELLING

    def _finish(self, batch: UUID, before: BatchState) -> None:
        lanes = [lane for lane in self.model.lanes.values() if lane.batch == batch]
        settled = sum(len(lane.having("settled")) for lane in lanes)
        whole = settled == sum(len(lane.state) for lane in lanes)
        drained = before is BatchState.CANCELLING and not any(lane.having("leased") for lane in lanes)
        moved = self.wait(finish_batch(self.db, batch, now=self.now))
        assert moved == (not before.terminal and (whole or drained))
        if moved:
            self.model.states[batch] = BatchState.COMPLETED if whole else BatchState.CANCELLED

    def _tidy(self, batch: UUID, before: BatchState) -> None:
        self.wait(tidy(self.db, batch))
        assert self.wait(read_status(self.db, batch)).state is before

    @precondition(lambda self: self.model.states)
    @rule(data=st.data(), custom=st.booleans())
    def retry(self, data: st.DataObject, custom: bool) -> None:
        """Failures run again, and of an ended batch what was never run; completed ones never."""
        batch = data.draw(st.sampled_from(list(self.model.states)), label="batch")
        before = self.model.states[batch]
        lanes = [lane for lane in self.model.lanes.values() if lane.batch == batch]
        failed = [(lane, o) for lane in lanes for o in lane.having("settled") if lane.state[o][1] != "completed"]
        unrun = sum(len(lane.having("pending")) + len(lane.having("deferred")) for lane in lanes)
        possible = (
            before in (BatchState.IN_PROGRESS, BatchState.PAUSED, BatchState.COMPLETED, BatchState.CANCELLED)
            and batch in self.model.files
            and lanes[0].width is None
            and not (custom and before is BatchState.CANCELLED and unrun)
        )
        try:
            custom_ids = ["c"] if custom else None  # what everything in this machine goes by
            retried = self.wait(retry_batch(self.db, batch, None, custom_ids=custom_ids, now=self.now))
        except NotRetryable:
            assert not possible
            return
        except NotFailed:
            assert possible
            assert custom
            assert not failed
            return
        assert possible
        opened = before.terminal and bool(failed or unrun)
        assert (retried.requests, retried.reopened) == (len(failed) + (unrun if opened else 0), opened)
        for lane, ordinal in failed:
            lane.state[ordinal] = ("deferred", self.now, 1, 0)
        if opened:
            self.model.states[batch] = BatchState.IN_PROGRESS
        if opened or failed:
            # The one case in which terminal counts fall: somebody asked for it.
            self.model.settled_seen.pop(batch, None)

    @precondition(lambda self: self.model.files)
    @rule(data=st.data())
    def delete_file(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(list(self.model.files)), label="batch")
        assert self.wait(erase.delete_file(self.db, self.model.files[batch], None, now=self.now))
        assert not self.wait(erase.delete_file(self.db, self.model.files.pop(batch), None, now=self.now))
        before = self.model.states[batch]
        if before.terminal:
            return
        lanes = [lane for lane in self.model.lanes.values() if lane.batch == batch]
        whole = all(len(lane.having("settled")) == len(lane.state) for lane in lanes)
        self.model.states[batch] = BatchState.COMPLETED if whole else BatchState.CANCELLED
        for lane in lanes:
            for ordinal in lane.having("leased"):
                self.model.live.discard(lane.state[ordinal][1])
                lane.state[ordinal] = ("dropped",)

    @precondition(lambda self: self.model.states)
    @rule(data=st.data())
    def delete_batch(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(list(self.model.states)), label="batch")
        assert self.wait(erase.delete_batch(self.db, batch, None, now=self.now))
        assert not self.wait(erase.delete_batch(self.db, batch, None, now=self.now))
        del self.model.states[batch]
        self.model.files.pop(batch, None)
        self.model.deleted.add(batch)
        gone = {lane_id for lane_id, lane in self.model.lanes.items() if lane.batch == batch}
        self.model.live = {lease for lease in self.model.live if self.model.leases[lease][0].lane_id not in gone}
        for lane_id in gone:
            del self.model.lanes[lane_id]

    @rule(rows=st.integers(1, 20))
    def purge(self, rows: int) -> None:
        while self.wait(purge.purge_step(self.db, rows, now=self.now)):
            pass
        assert self.rows("SELECT count(*) FROM penstock.erasures WHERE finished_at IS NULL") == [(0,)]
        assert self.rows("SELECT count(*) FROM penstock.erasure_pieces") == [(0,)]
        for lane in self.model.lanes.values():
            if lane.batch not in self.model.files:
                # What waited to be run goes with the input.
                lane.state.update(dict.fromkeys(lane.having("deferred"), ("dropped",)))
        inputs = sum(len(lane.state) for lane in self.model.lanes.values() if lane.batch in self.model.files)
        orphans = self.rows(
            "SELECT count(*) FROM penstock.templates t JOIN penstock.files f USING (source_id)"
            " WHERE NOT EXISTS (SELECT FROM penstock.batches b WHERE b.file_id = f.id)"
        )
        ((templates,),) = self.rows("SELECT count(*) FROM penstock.templates")
        assert templates - orphans[0][0] == inputs
        known = list(self.model.states)
        for table in ("batches", "lanes", "leases", "deferrals", "journal", "progress"):
            column = "id" if table == "batches" else "batch_id"
            query = f"SELECT count(*) FROM penstock.{table} WHERE {column} <> ALL (%s)"
            assert self.rows(query, [known]) == [(0,)], table
        for table in ("outcomes", "attempts", "reclaims"):
            query = f"SELECT count(*) FROM penstock.{table} WHERE lane_id <> ALL (%s)"
            assert self.rows(query, [list(self.model.lanes)]) == [(0,)], table

    # -- what must hold after every move

    @invariant()
    def deleted_batches_are_not_seen(self) -> None:
        for batch in self.model.deleted:
            assert self.wait(get_batch(self.db, batch, None)) is None

    @invariant()
    def every_ordinal_is_in_one_place(self) -> None:
        for lane_id, lane in self.model.lanes.items():
            ((next_, total, busy),) = self.rows("SELECT next, total, busy FROM penstock.lanes WHERE id = %s", [lane_id])
            places = [
                ("leased", self.spread("leases", lane_id)),
                ("deferred", self.spread("deferrals", lane_id)),
                (
                    "settled",
                    [o for (o,) in self.rows("SELECT ordinal FROM penstock.outcomes WHERE lane_id = %s", [lane_id])],
                ),
                ("pending", list(range(next_, total))),
            ]
            for word, ordinals in places:
                assert sorted(ordinals) == sorted(lane.having(word)), (word, lane_id)
            if lane.width is not None and not lane.having("dropped"):
                assert busy == len(lane.having("leased")) + len(lane.having("deferred")) <= lane.width

    @invariant()
    def outcomes_never_change(self) -> None:
        for lane_id, ordinal, state, response in self.rows(
            "SELECT lane_id, ordinal, state::text, response FROM penstock.outcomes"
        ):
            if lane_id not in self.model.lanes:
                continue  # deleted, and not purged yet
            assert self.model.lanes[lane_id].state[ordinal] == ("settled", state, bytes(response))

    @invariant()
    def figures_add_up(self) -> None:
        for batch, state in self.model.states.items():
            status = self.wait(read_status(self.db, batch))
            counts = status.counts
            lanes = [lane for lane in self.model.lanes.values() if lane.batch == batch]
            assert status.state is state
            assert counts.settled == sum(len(lane.having("settled")) for lane in lanes)
            assert counts.in_flight == sum(len(lane.having("leased")) for lane in lanes)
            assert counts.settled + counts.in_flight + counts.pending + counts.cancelled == counts.total
            assert min(counts.pending, counts.cancelled) == 0
            assert counts.settled >= self.model.settled_seen.get(batch, 0)
            self.model.settled_seen[batch] = counts.settled

    @invariant()
    def a_lane_of_width_one_is_in_order(self) -> None:
        for lane in self.model.lanes.values():
            if lane.width == 1:
                started = [o for o, state in lane.state.items() if state[0] in ("leased", "deferred", "dropped")]
                assert all(lane.state[earlier][0] == "settled" for o in started for earlier in range(o))

    def holds(self, lease: Lease, ordinal: int) -> bool:
        lane = self.model.lanes.get(lease.lane_id)
        return lane is not None and lane.state[ordinal][:2] == ("leased", lease.id)

    def spread(self, table: str, lane_id: int) -> list[int]:
        return [
            ordinal
            for (ordinal,) in self.rows(
                f"SELECT generate_series(lower(r), upper(r) - 1) FROM penstock.{table}, unnest(ordinals) r"
                " WHERE lane_id = %s",
                [lane_id],
            )
        ]

    def rows(self, query: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        async def fetch() -> list[tuple[Any, ...]]:
            return await (await self.db.execute(query.encode(), parameters)).fetchall()

        return self.wait(fetch())


@pytest.mark.slow
def test_engine_agrees_with_the_model(database: str) -> None:
    EngineMachine.conninfo = database
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=40 if thorough() else 20,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
