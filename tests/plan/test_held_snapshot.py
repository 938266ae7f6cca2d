"""A transaction left open elsewhere keeps every dead version of the hot rows. Claims and settles must not notice."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from penstock.claim import claim as claims
from penstock.claim.claim import LinePlace
from penstock.db.pool import Connection
from penstock.model import Again, Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.plan.crowd import POOL, ROUTE, Subject, check_in, claim, fresh_database, make_subject
from tests.support.engine import tidy
from tests.support.plans import Mode, Session
from tests.support.thorough import some, thorough

CLAIM = 4
CYCLES = 1_000 if thorough() else 400
FOLD_EVERY = 100


_DONE = Outcome(OutcomeState.COMPLETED, b'"answer"', 200)
_AGAIN = Again("busy", "try again", 0.0, True)


@pytest.mark.parametrize("server_name", some(["server_18", "server_15"], 1))
def test_nothing_hot_walks_past_the_dead(request: pytest.FixtureRequest, server_name: str) -> None:
    with fresh_database(request.getfixturevalue(server_name)) as session:
        worker = _Worker(session, make_subject(session, 4 * CYCLES * CLAIM))
        with psycopg.connect(session.conninfo) as dump:
            dump.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            dump.execute("SELECT count(*) FROM penstock.lanes")
            worker.work(FOLD_EVERY)
            before = worker.measure()
            worker.work(CYCLES)
            _compare(before, worker.measure())
            session.execute("ANALYZE")  # which finds one lane and no lease among all the dead
            _compare(before, worker.measure())


def _compare(before: dict[str, int], after: dict[str, int]) -> None:
    for name in ("settle", "settle in part", "heartbeat"):
        assert after[name] <= before[name] + 10, (name, before, after)
    # The lane's row is where claims are put in order: its versions are walked, many of them on each page.
    for name in ("claim", "claim of retries", "line up", "read bodies"):
        assert after[name] <= before[name] + CYCLES // 5, (name, before, after)


class _Worker:
    """Claims from where the line began the last time, as workers do."""

    def __init__(self, session: Session, subject: Subject) -> None:
        self.session = session
        self.subject = subject
        self.places: dict[str, LinePlace] = {}

    async def claim(self, connection: Connection) -> list[Lease]:
        return await claim(connection, self.subject, CLAIM, self.places)

    async def line_up(self, connection: Connection) -> None:
        due_from = datetime.now(UTC) - timedelta(seconds=1)
        await claims.line_up(connection, pool=POOL, routes=[ROUTE], places=self.places, due_from=due_from)

    async def settle(self, connection: Connection, changes: Changes) -> None:
        await settle(connection, self.subject.worker, changes)

    def settle_now(self, changes: Changes) -> None:
        self.session.run(lambda connection: self.settle(connection, changes))

    def work(self, cycles: int) -> None:
        """Claims of fresh lines and of retries in turn; half of what is fresh is to be had again."""
        for cycle in range(cycles):
            for part in _parts(self.session.run(self.claim)):
                self.settle_now(part)
            self.session.run(self.line_up)
            if cycle % FOLD_EVERY == 0:
                self.session.run(lambda connection: tidy(connection, self.subject.batch))
                self.session.run(lambda connection: check_in(connection, self.subject.worker))

    def measure(self) -> dict[str, int]:
        """Buffers by operation: the most that any mode of planning needs."""
        found = [self._measure_in(mode) for mode in Mode]
        return {name: max(figures[name] for figures in found) for name in found[0]}

    def _measure_in(self, mode: Mode) -> dict[str, int]:
        run, explain = self.session.run, self.session.explain
        found: dict[str, int] = {}
        leases = run(self.claim)
        while leases[0].attempt > 1:
            self.settle_now(_all(leases, _DONE))
            leases = run(self.claim)
        found["claim"] = explain(self.claim, mode).buffers
        found["read bodies"] = explain(
            lambda connection: claims.read_bodies(
                connection, leases[0], leases[0].ranges, max_rows=CLAIM, max_bytes=1_000
            ),
            mode,
        ).buffers
        first, _ = _parts(leases)
        found["settle in part"] = explain(lambda connection: self.settle(connection, first), mode).buffers
        found["settle"] = explain(lambda connection: self.settle(connection, _all(leases, _DONE)), mode).buffers
        found["heartbeat"] = explain(lambda connection: check_in(connection, self.subject.worker), mode).buffers
        self.settle_now(_all(leases, _AGAIN))
        found["line up"] = explain(self.line_up, mode).buffers
        run(self.line_up)
        found["claim of retries"] = explain(self.claim, mode).buffers
        retries = run(self.claim)
        assert retries[0].attempt > 1
        self.settle_now(_all(retries, _DONE))
        return found


def _all(leases: Sequence[Lease], verdict: Outcome | Again) -> Changes:
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, CLAIM):
            changes.decide(Item(lease, ordinal, ordinal + 1, "id", b"{}"), verdict)
    return changes


def _parts(leases: Sequence[Lease]) -> list[Changes]:
    """The leases' items as two settles: the first leaves something in every lease, the second nothing."""
    parts = [Changes(), Changes()]
    for lease in leases:
        ordinals = claims.first_ordinals(lease.ranges, CLAIM)
        for n, ordinal in enumerate(ordinals):
            part = parts[n >= len(ordinals) // 2]
            again = lease.attempt == 1 and n == len(ordinals) - 1
            part.decide(Item(lease, ordinal, ordinal + 1, "id", b"{}"), _AGAIN if again else _DONE)
    return parts
