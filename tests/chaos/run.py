"""One chaos run: real processes behind faulty connections, a seeded plan of faults, and the checker's word on it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

import psycopg

from penstock.db.embedded import postgres as embedded_postgres
from penstock.db.embedded.cluster import PGDATA
from penstock.db.embedded.keeper import find_postmaster
from penstock.db.migrate import migrate
from penstock.mock.behaviour import Behaviour, Latency
from tests.chaos.crew import Crew, Files
from tests.chaos.ending import Reader, note_logs, note_records, tracebacks
from tests.chaos.plan import BATCHES, Act, Action, Plan
from tests.chaos.watcher import Watcher
from tests.support.checker import Bounds, Report, check
from tests.support.cli import check_agreement
from tests.support.history import HistoryWriter, read_history
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Processes
from tests.support.proxy import TcpProxy
from tests.support.upstream import start_upstream
from tests.support.wait import wait_until

_SETTLE = r"INTO penstock\.outcomes"
_CLAIM = r"(?s)UPDATE penstock\.lanes.*INTO penstock\.leases"
_TICK_S = 0.05
_START_DEADLINE_S = 30.0
_SPARE_S = 30.0
"""Beyond the checker's own bound: it is the checker that should say what is late."""

REQUIRED = (
    *(act.value for act in BATCHES.acts),
    *("kill", "stop", "cut", "cut_before", "swallow", "stall_before", "pg_crash"),
    *("fence", "reclaim", "already_applied", "retry", "status", "export", "result"),
)
"""A run that has not seen all of these is void."""


@dataclass(frozen=True, slots=True)
class Settings:
    directory: Path
    plan: Plan
    workers: int = 3
    lines: int = 2_000
    finish_s: float = 30.0


@dataclass(slots=True)
class Outcome:
    plan: Plan
    report: Report
    problems: list[str]
    """What the history does not tell: a file stored twice, workers that do not end, tables that disagree."""
    figures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return self.report.clean and not self.problems


@dataclass(slots=True)
class _Rig:
    """Everything faults are done to."""

    data_dir: Path
    history: HistoryWriter
    postgres: PostgresProxy
    upstream: TcpProxy
    crew: Crew

    def perform(self, action: Action) -> None:
        seconds = action.for_ms / 1_000
        deeds: dict[Act, Callable[[], object]] = {
            Act.KILL_WORKER: lambda: self.crew.kill(action.worker),
            Act.FREEZE_WORKER: lambda: self.crew.freeze(action.worker, seconds),
            Act.STALL_SETTLE: lambda: self._stall(seconds),
            Act.CUT_DATABASE: self.postgres.cut,
            Act.CUT_CLAIM: lambda: self.postgres.cut_before(_CLAIM),
            Act.SWALLOW_SETTLE: lambda: self.postgres.swallow(_SETTLE),
            Act.CRASH_DATABASE: self._crash,
            Act.CUT_UPSTREAM: self.upstream.cut,
            Act.HEAL: self._heal,
        }
        deeds[action.act]()
        self.history.record("info", action.act.value)

    def _stall(self, seconds: float) -> None:
        self.postgres.stall_before(_SETTLE)
        timer = threading.Timer(seconds, self.postgres.heal)
        timer.daemon = True
        timer.start()

    def _crash(self) -> None:
        postmaster = find_postmaster(str(self.data_dir / PGDATA))
        if postmaster is not None:
            self.history.record("info", "pg_crash", "postgres")
            os.kill(postmaster.pid, signal.SIGQUIT)

    def _heal(self) -> None:
        self.postgres.heal()
        self.upstream.heal()
        self.crew.thaw()


def run(settings: Settings) -> Outcome:
    """Play the plan to its end, let the work finish, and judge."""
    began = monotonic()
    notes = settings.directory / "history"
    outcome = Outcome(settings.plan, Report(), [])
    with contextlib.ExitStack() as stack:
        data_dir = settings.directory / "data"
        server = stack.enter_context(embedded_postgres.acquire(data_dir))
        migrate(server.conninfo)
        history = stack.enter_context(HistoryWriter(notes, "injector"))
        processes = stack.enter_context(Processes(settings.directory, history=history))
        postgres = stack.enter_context(PostgresProxy(server.conninfo, history=history))
        upstream = start_upstream(processes, notes, _behaviour(settings.plan.seed))
        between = stack.enter_context(TcpProxy(("127.0.0.1", upstream.port), history=history, name="upstream"))
        files = Files(settings.directory, settings.lines)
        base_url = f"http://127.0.0.1:{between.port}/v1"
        crew = Crew(processes, files, settings.workers, postgres.proxied(server.conninfo), base_url)
        reader = Reader(server.conninfo, stack.enter_context(HistoryWriter(notes, "reader")))
        watching = stack.enter_context(HistoryWriter(notes, "watcher"))
        with Watcher(server.conninfo, watching, settings.lines) as watcher:
            rig = _Rig(server.data_dir, history, postgres, between, crew)
            _Course(settings, rig, files, reader, watcher, outcome).run()
        _note_the_end(server.conninfo, settings, history, outcome)
    outcome.figures["worker starts"] = crew.starts
    outcome.figures["workers that gave up"] = crew.lost
    outcome.report = check(read_history(notes), bounds=Bounds(finish_s=settings.finish_s), require=REQUIRED)
    outcome.seconds = monotonic() - began
    return outcome


def _behaviour(seed: int) -> Behaviour:
    return Behaviour(latency=Latency.parse("50ms..150ms"), error_rate=0.05, drop_rate=0.005, seed=seed)


def _note_the_end(database: str, settings: Settings, history: HistoryWriter, outcome: Outcome) -> None:
    logs = sorted(settings.directory.glob("worker-*.log"))
    outcome.figures["leases taken back"] = note_records(database, history)
    note_logs(logs, history)
    outcome.figures["tracebacks"] = tracebacks(logs)
    try:
        with psycopg.connect(database) as connection:
            check_agreement(connection)
    except AssertionError as error:
        outcome.problems.append(f"the tables disagree: {error}")


@dataclass(slots=True)
class _Course:
    """The course of one run: start, storm and calm, finish, read everything again."""

    settings: Settings
    rig: _Rig
    files: Files
    reader: Reader
    watcher: Watcher
    outcome: Outcome
    unread: set[int] = field(default_factory=set)
    read: dict[int, list[str]] = field(default_factory=dict)

    def run(self) -> None:
        self.rig.crew.tend()
        wait_until(lambda: self.watcher.settled, _START_DEADLINE_S)
        start = monotonic()
        self._play(start)
        last = self.rig.crew.no_more_files()
        give_up_at = start + self.settings.plan.last_heal_s + self.settings.finish_s + _SPARE_S
        while (not self.rig.crew.ended or self.unread) and monotonic() < give_up_at:
            self._tick()
            sleep(_TICK_S)
        if not self.rig.crew.ended:
            self.outcome.problems.append(f"workers do not end\n{self.rig.crew.where()}")
        if not self.watcher.alive:
            self.outcome.problems.append("the watcher has ended")
        self._read_again(last)

    def _play(self, start: float) -> None:
        for action in self.settings.plan.actions:
            while monotonic() < start + action.at_ms / 1_000:
                self._tick()
                sleep(_TICK_S)
            self.rig.perform(action)

    def _tick(self) -> None:
        self.unread |= self.rig.crew.tend() - self.read.keys()
        for number in sorted(self.unread):
            # While the database is away, nothing is read; later is as good.
            with contextlib.suppress(psycopg.OperationalError):
                self._read(number)
                self.unread.discard(number)

    def _read(self, number: int) -> None:
        found = self.reader.batches_of(self.files.source(number))
        self.read[number] = [batch.hex for batch in found]
        if len(found) != 1:
            self.outcome.problems.append(f"file {number} was stored {len(found)} times")
        for batch in found[:1]:
            self.reader.read(batch, self.files.output(number), "output")

    def _read_again(self, last: int) -> None:
        for number in range(1, last + 1):
            if number not in self.read:
                self.outcome.problems.append(f"file {number} was never finished")
                continue
            for batch in self.reader.batches_of(self.files.source(number))[:1]:
                self.reader.export_again(batch, self.files.directory / f"again-{number}.jsonl")
