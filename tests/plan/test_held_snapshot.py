"""A transaction left open elsewhere keeps every dead version of the hot rows. Settling must not notice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise

import psycopg

from penstock.claim import claim as claims
from penstock.db.pool import Connection
from penstock.model import Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.plan.crowd import Subject, check_in, claim, fresh_database, make_subject
from tests.support.engine import tidy
from tests.support.plans import Mode, Session

CLAIM = 4
CYCLES = 1_000
FOLD_EVERY = 100


def test_settle_does_not_walk_past_the_dead(any_server: str) -> None:
    with fresh_database(any_server) as session:
        subject = make_subject(session, 4 * CYCLES * CLAIM)
        with psycopg.connect(session.conninfo) as dump:
            dump.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            dump.execute("SELECT count(*) FROM penstock.lanes")
            _work(session, subject, FOLD_EVERY)
            before = _measure(session, subject)
            _work(session, subject, CYCLES)
            _compare(before, _measure(session, subject))
            session.execute("ANALYZE")  # which finds one lane and no lease among all the dead
            _compare(before, _measure(session, subject))


def _compare(before: dict[str, int], after: dict[str, int]) -> None:
    for name in ("settle", "settle in part", "heartbeat"):
        assert after[name] <= before[name] + 10, (before, after)
    # The lane's row is where claims are put in order: its versions are walked, many of them on each page.
    for name in ("claim", "read bodies"):
        assert after[name] <= before[name] + CYCLES // 10, (before, after)


def _work(session: Session, subject: Subject, cycles: int) -> None:
    for cycle in range(cycles):
        for part in _halves(session.run(lambda connection: claim(connection, subject, CLAIM))):
            _settle(session, subject, part)
        if cycle % FOLD_EVERY == 0:
            session.run(lambda connection: tidy(connection, subject.batch))
            session.run(lambda connection: check_in(connection, subject.worker))


def _settle(session: Session, subject: Subject, changes: Changes) -> None:
    session.run(lambda connection: settle(connection, subject.worker, changes))


def _measure(session: Session, subject: Subject) -> dict[str, int]:
    """Buffers by operation: the most that any mode of planning needs."""
    found = [_measure_in(mode, session, subject) for mode in Mode]
    return {name: max(figures[name] for figures in found) for name in found[0]}


def _measure_in(mode: Mode, session: Session, subject: Subject) -> dict[str, int]:
    leases = session.run(lambda connection: claim(connection, subject, CLAIM))
    first, rest = _halves(leases)
    whole = Changes([*first.outcomes, *rest.outcomes])
    operations: dict[str, Callable[[Connection], Awaitable[object]]] = {
        "claim": lambda connection: claim(connection, subject, CLAIM),
        "read bodies": lambda connection: claims.read_bodies(
            connection, leases[0], leases[0].ranges, max_rows=CLAIM, max_bytes=1_000
        ),
        "settle in part": lambda connection: settle(connection, subject.worker, first),
        "settle": lambda connection: settle(connection, subject.worker, whole),
        "heartbeat": lambda connection: check_in(connection, subject.worker),
    }
    found = {name: session.explain(operation, mode).buffers for name, operation in operations.items()}
    _settle(session, subject, whole)
    return found


def _halves(leases: list[Lease]) -> list[Changes]:
    """The leases' items as two settles: the first leaves something in every lease, the second nothing."""
    parts = [Changes(), Changes()]
    for lease in leases:
        ordinals = claims.first_ordinals(lease.ranges, CLAIM)
        cuts = [0, len(ordinals) // 2, len(ordinals)]
        for part, (start, stop) in zip(parts, pairwise(cuts), strict=True):
            for ordinal in ordinals[start:stop]:
                item = Item(lease, ordinal, ordinal + 1, "id", b"{}")
                part.decide(item, Outcome(OutcomeState.COMPLETED, b'"answer"', 200))
    return parts
