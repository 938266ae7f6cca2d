"""One chaos run over sessions: replicas behind faulty connections, callers who wait, and the checker's word on it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from penstock.db.embedded import postgres
from penstock.db.embedded.cluster import PGDATA
from penstock.db.embedded.keeper import find_postmaster
from penstock.db.migrate import migrate
from penstock.mock.behaviour import Behaviour, Latency
from tests.chaos.callers import CUT, Order, start_callers
from tests.chaos.ending import note_logs, tracebacks
from tests.chaos.plan import SESSIONS, Act, Action, Plan
from tests.chaos.replicas import Replicas
from tests.chaos.run import Outcome
from tests.chaos.session_ending import SessionReader
from tests.chaos.table import Sections
from tests.support.checker import Bounds, Report, check
from tests.support.history import HistoryWriter, read_history
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Process, Processes
from tests.support.proxy import TcpProxy
from tests.support.upstream import start_upstream
from tests.support.wait import wait_until

_SETTLE = r"INTO penstock\.outcomes"
_ACCEPT = r"INTO penstock\.session_requests"
# Not the insert into leases: a reclaim has one too.
_CLAIM = r"\blane_takes\b"
_TICK_S = 0.05
_START_DEADLINE_S = 120.0
_SPARE_S = 30.0
"""Beyond the checker's own bound: it is the checker that should say what is late."""

REQUIRED = (
    *(act.value for act in SESSIONS.acts),
    *("kill", "stop", "cut", "cut_before", "swallow", "stall_before", "pg_crash"),
    *("fence", "reclaim", "lost_identity", "already_applied", "retry"),
    *("cut_off", "wait_timeout", "left", "asked", "result"),
)
"""A run that has not seen all of these is void."""

SECTIONS: Sections = (
    ("dealt", tuple(act.value for act in SESSIONS.acts)),
    ("happened", ("kill", "stop", "stall_before", "cut", "cut_before", "swallow", "pg_crash")),
    ("effects", ("fence", "already_applied", "reclaim", "lost_identity", "overlap", "retry", "final")),
    ("callers", ("ask", "asked", "left", "turned_away", "cut_off", "no_answer", "wait_timeout", "unavailable")),
    ("seen", ("session", "dispatch", "answer", "result", "surprise")),
)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    directory: Path
    plan: Plan
    replicas: int = 3
    sessions: int = 500
    requests: int = 20
    finish_s: float = 240.0
    concurrency: int = 12
    """Of each replica. What it can do in a second should be a small part of all there is to do."""
    wait_s: float = 20.0
    """After which callers are sent away, to come again."""


def _behaviour(settings: SessionSettings) -> Behaviour:
    """Some calls fail, and some outlast any freeze: a zombie's call goes on while another worker repeats it."""
    return Behaviour(
        latency=Latency.parse("100ms..300ms"),
        error_rate=0.03,
        slow_rate=0.04,
        slow_latency=Latency.parse("6s..8s"),
        seed=settings.plan.seed,
    )


@dataclass(slots=True)
class _Rig:
    """Everything faults are done to. What the plan leaves open hits the replicas in turn."""

    data_dir: Path
    history: HistoryWriter
    upstream: TcpProxy
    replicas: Replicas
    callers: Process
    turn: int = 0

    def perform(self, action: Action) -> None:
        seconds, named = action.for_ms / 1_000, action.worker
        self.turn += 1
        database = self.replicas.database(self.turn)
        deeds: dict[Act, Callable[[], object]] = {
            Act.KILL_REPLICA: lambda: self.replicas.kill(named),
            Act.KILL_WORKER: lambda: self.replicas.kill(named, server=False),
            Act.KILL_SERVER: lambda: self.replicas.kill(named, worker=False),
            Act.FREEZE_REPLICA: lambda: self.replicas.freeze(named, seconds),
            Act.STALL_SETTLE: lambda: self._stall(database, seconds),
            Act.CUT_DATABASE: database.cut,
            Act.CUT_CLAIM: lambda: database.cut_before(_CLAIM),
            Act.SWALLOW_ACCEPT: lambda: database.swallow(_ACCEPT),
            Act.SWALLOW_SETTLE: lambda: database.swallow(_SETTLE),
            Act.CRASH_DATABASE: self._crash,
            Act.CUT_UPSTREAM: self.upstream.cut,
            Act.CUT_CALLERS: self._cut_callers,
            Act.HEAL: self._heal,
        }
        deeds[action.act]()
        self.history.record("info", action.act.value)

    def _stall(self, database: PostgresProxy, seconds: float) -> None:
        database.stall_before(_SETTLE)
        timer = threading.Timer(seconds, database.heal)
        timer.daemon = True
        timer.start()

    def _cut_callers(self) -> None:
        self.history.record("info", "cut", self.callers.name)
        if self.callers.alive:
            os.kill(self.callers.pid, CUT)

    def _crash(self) -> None:
        postmaster = find_postmaster(str(self.data_dir / PGDATA))
        if postmaster is not None:
            self.history.record("info", "pg_crash", "postgres")
            os.kill(postmaster.pid, signal.SIGQUIT)

    def _heal(self) -> None:
        self.upstream.heal()
        self.replicas.heal()


def run_sessions(settings: SessionSettings) -> Outcome:
    """Play the plan to its end, wait for every caller, and judge."""
    began = monotonic()
    notes = settings.directory / "history"
    outcome = Outcome(settings.plan, Report(), [])
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(postgres.acquire(settings.directory / "data"))
        migrate(server.conninfo)
        history = stack.enter_context(HistoryWriter(notes, "injector"))
        processes = stack.enter_context(Processes(settings.directory, history=history))
        upstream = start_upstream(processes, notes, _behaviour(settings))
        between = stack.enter_context(TcpProxy(("127.0.0.1", upstream.port), history=history, name="upstream"))
        numbers = range(1, settings.replicas + 1)
        databases = [
            stack.enter_context(PostgresProxy(server.conninfo, history=history, name=f"postgres-{n}")) for n in numbers
        ]
        base_url = f"http://127.0.0.1:{between.port}/v1"
        limits = {"concurrency": settings.concurrency, "session_wait_timeout_s": settings.wait_s}
        replicas = Replicas(processes, history, databases, server.conninfo, base_url, limits)
        stack.callback(replicas.end)
        reader = SessionReader(server.conninfo, stack.enter_context(HistoryWriter(notes, "reader")))
        wait_until(lambda: replicas.all_listen, _START_DEADLINE_S)
        plan = settings.plan
        order = Order(replicas.urls, str(notes), plan.seed, settings.sessions, settings.requests)
        callers = start_callers(processes, order)
        _play(settings, _Rig(server.data_dir, history, between, replicas, callers), outcome)
        # Requests whose callers have left go on without them, and their records with them.
        over_by = monotonic() + settings.finish_s
        while reader.disagreements() and monotonic() < over_by:
            replicas.tend()
            sleep(_TICK_S)
        stored = reader.read_stored()
        wait_until(lambda: replicas.all_listen, _START_DEADLINE_S)
        reader.read_again(replicas.urls, stored)
        outcome.problems += [f"the tables disagree: {said}" for said in reader.disagreements()]
        outcome.figures["requests stored"] = sum(map(len, stored.values()))
        outcome.figures["leases taken back"] = reader.reclaims()
        logs = sorted(settings.directory.glob("replica-*.log"))
        note_logs(logs, history)
        outcome.figures["tracebacks"] = tracebacks([*logs, callers.log])
        outcome.figures["replica starts"] = replicas.starts
        outcome.figures["replicas that gave up"] = replicas.lost
    outcome.report = check(read_history(notes), bounds=Bounds(finish_s=settings.finish_s), require=REQUIRED)
    outcome.seconds = monotonic() - began
    return outcome


def _play(settings: SessionSettings, rig: _Rig, outcome: Outcome) -> None:
    """Fault by fault, and then until everybody has been answered."""
    start = monotonic()
    actions, callers = settings.plan.actions, rig.callers

    def answered_by(end: float) -> bool:
        while callers.alive and monotonic() < end:
            rig.replicas.tend()
            sleep(_TICK_S)
        return not callers.alive

    played = 0
    for action in actions:
        if answered_by(start + action.at_ms / 1_000):
            # Nobody is left to be disturbed.
            rig.perform(actions[-1])
            break
        rig.perform(action)
        played += 1
    if not answered_by(start + settings.plan.last_heal_s + settings.finish_s + _SPARE_S):
        outcome.problems.append(f"callers do not end\n{callers.tail()}\n{rig.replicas.where()}")
    elif callers.exit_code:
        outcome.problems.append(f"callers ended with {callers.exit_code}\n{callers.tail()}")
    outcome.figures["actions played"] = played
    outcome.figures["seconds"] = round(monotonic() - start)
