"""Four workers, one killed: how soon what it held runs elsewhere, and what the loss costs the others.

    python -m bench.lost_worker [--quick]

Worker processes with default settings call an upstream that takes half a second, so many at a time that the cores
are mostly idle: what is measured is bound by calls in flight. One is killed with SIGKILL. Its own machine tells the
others that a process is gone; that a machine is gone they learn from its silence, so there the dead worker's row is
made to name another machine. Counted are the answers that the upstream sends.

One cycle is three rounds: one in which the lost are found, one until every other worker has looked for what was taken
back, and one in which they call it, before what they hold themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from uuid import UUID

import psycopg

from bench.ground import options, print_table, scratch_database, server
from penstock.config import Config, knobs
from tests.support.history import Event, read_history
from tests.support.processes import Process
from tests.support.wait import wait_until
from tests.support.workbench import SETTINGS, Bench, calls_of, in_flight, leave, taking, workbench

CONCURRENCY = 32
CALL_S = 0.5
RATE = CONCURRENCY / CALL_S
"""Answers a second and worker, at best."""
DEADLINE_S = 300.0
ROUND_S = 1.25
"""The longest time between two rounds of a worker, in which it looks for the lost."""

# The workbench's own settings are for small tests: back to the defaults.
DEFAULTS = {knob.name: knob.default for knob in knobs() if knob.name in SETTINGS}


@dataclass(frozen=True, slots=True)
class Figures:
    rate: float
    """Answers a second in the time that was watched."""
    held: int = 0
    taken_s: float = 0.0
    """From the kill until what was held had been taken back."""
    again_s: float = 0.0
    """From the kill until the last of it had been called by another worker."""


def main() -> None:
    chosen = options(__doc__).parse_args()
    watch_s = 15.0 if chosen.quick else 60.0
    liveness = {"heartbeat_interval_s": 2, "heartbeat_grace_s": 5} if chosen.quick else {}
    grace_s = float(liveness.get("heartbeat_grace_s", Config().liveness.heartbeat_grace_s))
    cycle_s = 3 * ROUND_S
    with server() as conninfo:
        three = _measure(conninfo, watch_s, liveness, workers=3)
        process = _measure(conninfo, watch_s, liveness, workers=4, lost="process")
        machine = _measure(conninfo, watch_s, liveness, workers=4, lost="machine")
    print_table(
        ["lost of four workers", "items held", "taken back after, s", "bound", "all called again after, s", "bound"],
        [
            [
                *(f"a {name}", str(found.held)),
                *(f"{found.taken_s:.2f}", f"{silent_s + ROUND_S:.2f}"),
                *(f"{found.again_s:.2f}", f"{silent_s + cycle_s:.2f}"),
            ]
            for name, silent_s, found in (("process", 0.0, process), ("machine", grace_s, machine))
        ],
    )
    print_table(
        [f"in the {watch_s:.0f} s after", "answers/s", "ratio"],
        [
            [name, f"{found.rate:.1f}", f"{found.rate / three.rate:.2f}"]
            for name, found in (
                ("three workers from the start", three),
                ("four, a process lost", process),
                ("four, a machine lost", machine),
            )
        ],
    )


@dataclass(frozen=True, slots=True)
class Victim:
    process: Process
    worker_id: UUID
    held: frozenset[str]
    """What it will never finish, as the keys of its calls."""


def _measure(
    conninfo: str, watch_s: float, liveness: Mapping[str, object], *, workers: int, lost: str | None = None
) -> Figures:
    # Enough to keep everybody busy until the end of the watch, and little more.
    lines = int(RATE * (3 * watch_s + workers * 10))
    with (
        tempfile.TemporaryDirectory() as folder,
        scratch_database(conninfo) as database,
        workbench(Path(folder), database, lines=lines) as bench,
    ):
        upstream = bench.upstream("upstream", taking(CALL_S))
        settings = {**DEFAULTS, **liveness, "concurrency": CONCURRENCY}
        others = [bench.worker(f"worker-{number}", upstream, settings) for number in range(workers)]
        # Until everybody is at work, and claims have found their size.
        wait_until(lambda: in_flight(upstream) == workers * CONCURRENCY, DEADLINE_S)
        wait_until(lambda: calls_of(upstream) > workers * RATE * Config().claim.claim_slice_s, DEADLINE_S)
        victim = _freeze(bench, others.pop(), lost) if lost else None
        begun, begun_at = monotonic(), datetime.now(UTC)
        if victim is not None:
            victim.process.kill()
        bench.until("SELECT count(*) FROM penstock.batches WHERE state = 'completed'", DEADLINE_S)
        for worker in others:
            leave(worker)
        bench.check()
        calls = [event for event in read_history(Path(folder) / "history") if event.f == "dispatch"]
        rate = _rate(calls, begun, watch_s)
        if victim is None:
            return Figures(rate)
        taken_s = (_taken_at(bench, victim) - begun_at).total_seconds()
        return Figures(rate, len(victim.held), taken_s, _again_at(calls, victim, begun) - begun)


def _freeze(bench: Bench, worker: Process, lost: str) -> Victim:
    """Stop a worker, and wait until its last statement has ended: what it holds no longer changes."""
    (worker_id,) = bench.worker_ids(worker)
    worker.stop()
    active = f"application_name = '{worker.name}' AND state = 'active'"
    bench.until(f"SELECT (count(*) = 0)::int FROM pg_stat_activity WHERE {active}")
    with psycopg.connect(bench.conninfo, autocommit=True) as connection:
        if lost == "machine":
            connection.execute("UPDATE penstock.workers SET machine = 'another' WHERE id = %s", [worker_id])
        # A batch of one lane: its ordinals are its lines, from 0.
        rows = connection.execute(
            "SELECT 1 + generate_series(lower(piece), upper(piece) - 1) FROM"
            " (SELECT unnest(ordinals) AS piece FROM penstock.leases WHERE worker_id = %s) AS held",
            [worker_id],
        ).fetchall()
    return Victim(worker, worker_id, frozenset(f"{bench.batch_id.hex}-{line}" for (line,) in rows))


def _taken_at(bench: Bench, victim: Victim) -> datetime:
    with psycopg.connect(bench.conninfo) as connection:
        row = connection.execute(
            "SELECT max(reclaimed_at) FROM penstock.reclaims WHERE worker_id = %s", [victim.worker_id]
        ).fetchone()
    if row is None or row[0] is None:
        raise AssertionError("nothing was taken back")
    taken_at: datetime = row[0]
    return taken_at


def _rate(calls: list[Event], begun: float, watch_s: float) -> float:
    answers = [event.t for event in calls if event.type == "ok"]
    if answers[-1] < begun + watch_s:
        raise AssertionError("the work ended before the watch did")
    return sum(begun < t <= begun + watch_s for t in answers) / watch_s


def _again_at(calls: list[Event], victim: Victim, begun: float) -> float:
    """When the last of what was held was called for the first time since."""
    again: dict[str, float] = {}
    for event in calls:
        if event.type == "invoke" and event.t > begun and event.key in victim.held:
            again.setdefault(str(event.key), event.t)
    if again.keys() != victim.held:
        raise AssertionError(f"{len(victim.held - again.keys())} of {len(victim.held)} items were not called again")
    return max(again.values())


if __name__ == "__main__":
    main()
