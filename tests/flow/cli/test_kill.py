"""`penstock run` killed and interrupted on the way: the same command again loses nothing and repeats little."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from penstock.db.embedded import postgres
from penstock.db.embedded.cluster import PGDATA
from penstock.db.embedded.keeper import find_postmaster
from tests.support.cli import (
    Finished,
    ask,
    call_count,
    calls_by_key,
    check_agreement,
    check_answers,
    finish,
    ids_of,
    interrupt,
    opened,
    run_cli,
    slow_down_intake,
    start_cli,
    worker_pids,
    write_requests,
)
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.prepared import Prepared
from tests.support.wait import wait_until

CONCURRENCY = 32
# Results that are answered and not yet recorded are bounded too: one flush on its way, and a buffer behind it.
FLUSH_ROWS = 16
LOST_PER_KILL = CONCURRENCY + 2 * FLUSH_ROWS
BOUNDS = (
    *("--concurrency", str(CONCURRENCY)),
    *("--set", f"concurrency_start={2 * CONCURRENCY}"),
    *("--set", f"settle_max_rows={FLUSH_ROWS}"),
    *("--set", f"settle_capacity_rows={FLUSH_ROWS}"),
)


@pytest.fixture
def data_dir(tmp_path: Path, prepared: Prepared) -> Path:
    """What the command finds when nothing is configured."""
    return prepared(tmp_path / ".penstock")


class Site:
    """A directory, an upstream, and the one command that is run again and again."""

    def __init__(self, data_dir: Path, lines: int, mock: MockProcess, *options: str) -> None:
        self.data_dir = data_dir
        self.directory = directory = data_dir.parent
        self.output = directory / "answers.jsonl"
        self.lines = lines
        self.mock = mock
        source = write_requests(directory / "requests.jsonl", lines, models=("small", "large"))
        self.command: tuple[str | Path, ...] = ("run", source, "--base-url", mock.base_url, "-o", self.output, *options)

    @contextmanager
    def started(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        with start_cli(*self.command, *options, cwd=self.directory) as process:
            yield process

    def run(self, *options: str) -> Finished:
        return run_cli(*self.command, *options, cwd=self.directory)

    def until_called(self, calls: int, process: subprocess.Popen[bytes]) -> None:
        def reached() -> bool:
            assert process.poll() is None, "ended before its time"
            return call_count(self.mock) >= calls

        wait_until(reached, 60)

    def check_answers(self) -> None:
        answers = check_answers(self.output, ids_of(self.lines))
        assert not answers.bad
        with opened(self.data_dir) as connection:
            check_agreement(connection)
            assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(30)


def unrecorded(site: Site) -> int:
    """Calls made so far of which the database knows nothing."""
    wait_until(lambda: site.mock.stats()["in_flight"] == 0, 30)
    with opened(site.data_dir) as connection:
        # A statement that was sent before the kill is still carried out, and workers of a killed parent still settle.
        clients = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'penstock %'"
        wait_until(lambda: ask(connection, clients) == 0, 30)
        retried = ask(connection, "SELECT count(*) FROM penstock.attempts WHERE not_before IS NOT NULL")
        return call_count(site.mock) - ask(connection, "SELECT count(*) FROM penstock.outcomes") - retried


def test_three_kills_on_the_way(data_dir: Path) -> None:
    lines, rng = 3_000, random.Random(1)
    with start_mock_process("--latency", "5ms..20ms", "--error-rate", "2%") as mock:
        site = Site(data_dir, lines, mock, *BOUNDS, "--set", "retry_base_s=0.01", "--set", "max_attempts=20")
        lost = 0
        for third in range(3):
            with site.started() as process:
                site.until_called(int(lines * (third + rng.uniform(0.1, 0.9)) / 3), process)
                kill(process)
            before, lost = lost, unrecorded(site)
            assert 0 <= lost - before <= LOST_PER_KILL
        ended = site.run("--json").expect(0)
        site.check_answers()
        assert unrecorded(site) == lost, "calls were repeated that no kill explains"
        assert call_count(mock) == lines + ended.summary["retried"] + lost
        assert len(calls_by_key(mock)) == lines


def test_a_kill_while_storing_leaves_nothing_behind(data_dir: Path) -> None:
    with start_mock_process() as mock:
        site = Site(data_dir, 3_000, mock)
        slow_down_intake(site.data_dir, 0.2)
        with opened(site.data_dir) as connection:
            with site.started("--set", "intake_max_rows=1") as process:
                wait_until(lambda: _rows_stored(connection) > 10, 60)
                kill(process)
            assert call_count(mock) == 0
            connection.execute("DROP FUNCTION penstock.wait CASCADE")
            site.run().expect(0)
            assert _rows_stored(connection) == 3_000
            assert ask(connection, "SELECT count(*) FROM penstock.files WHERE kind = 'input'") == 1
            assert ask(connection, "SELECT count(*) FROM penstock.workers") == 0
        site.check_answers()


def _rows_stored(connection: psycopg.Connection) -> int:
    known = ask(connection, "SELECT count(*) FROM pg_tables WHERE schemaname = 'penstock' AND tablename = 'templates'")
    return ask(connection, "SELECT count(*) FROM penstock.templates") if known else 0


def test_a_kill_while_writing_leaves_the_old_output_whole(tmp_path: Path, data_dir: Path) -> None:
    with start_mock_process() as mock:
        site = Site(data_dir, 3_000, mock)
        site.run().expect(0)
        written = site.output.read_bytes()
        with postgres.acquire(site.data_dir) as server:
            # Nobody reads outcomes while this lock is held: the export stands still, its drafts begun.
            with psycopg.connect(server.conninfo) as connection:
                connection.execute("LOCK TABLE penstock.outcomes")
                with site.started() as process:
                    wait_until(lambda: len(list(tmp_path.glob(".*.part"))) == 2, 60)
                    kill(process)
            assert site.output.read_bytes() == written
            site.output.unlink()
            site.run().expect(0)
        assert site.output.read_bytes() == written
        assert not list(tmp_path.glob(".*.part"))
        assert call_count(mock) == 3_000


def test_a_killed_worker_process_is_replaced(data_dir: Path) -> None:
    with start_mock_process("--latency", "20ms") as mock:
        site = Site(data_dir, 2_000, mock, *BOUNDS, "--workers", "3")
        with site.started("--json") as process:
            site.until_called(500, process)
            victim = worker_pids(process)[0]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: len(set(worker_pids(process)) - {victim}) == 3, 60)
            finish(process).expect(0)
        site.check_answers()
        assert len(calls_by_key(mock)) == 2_000
        assert call_count(mock) <= 2_000 + LOST_PER_KILL


def test_a_killed_parent_takes_its_workers_along(data_dir: Path) -> None:
    with start_mock_process("--latency", "20ms") as mock:
        site = Site(data_dir, 1_500, mock, *BOUNDS, "--workers", "2")
        with site.started() as process:
            site.until_called(500, process)
            kill(process)
        # They finish what they are at, record it and leave: nothing is lost, so nothing is repeated.
        assert unrecorded(site) == 0
        with opened(site.data_dir) as connection:
            assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0
            assert ask(connection, "SELECT count(*) FROM penstock.workers") == 0
        site.run().expect(0)
        site.check_answers()
        assert call_count(mock) == 1_500


def test_a_killed_database_comes_back_under_the_run(data_dir: Path) -> None:
    with start_mock_process("--latency", "20ms") as mock:
        site = Site(data_dir, 1_500, mock, *BOUNDS)
        with site.started("--json") as process:
            for calls in (200, 800):
                site.until_called(calls, process)
                postmaster = find_postmaster(str(site.data_dir / PGDATA))
                assert postmaster is not None
                os.kill(postmaster.pid, signal.SIGKILL)
            ended = finish(process).expect(0)
        assert ended.summary["completed"] == 1_500
        site.check_answers()


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.again), 2])
def test_an_interrupt_lets_calls_end_and_says_how_to_go_on(data_dir: Path, workers: int) -> None:
    with start_mock_process("--latency", "100ms") as mock:
        site = Site(data_dir, 400, mock, *BOUNDS, "--workers", str(workers))
        with site.started() as process:
            site.until_called(100, process)
            interrupt(process)
            ended = finish(process).expect(130)
        assert "calls in flight finish first" in ended.stderr
        said = ended.stdout.splitlines()
        assert str(site.output) in said[said.index("To go on:") + 1]
        assert not site.output.exists()
        assert unrecorded(site) == 0
        with opened(site.data_dir) as connection:
            assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0
            assert ask(connection, "SELECT count(*) FROM penstock.workers") == 0
            assert ask(connection, "SELECT count(*) FROM penstock.attempts") == 0
        site.run().expect(0)
        site.check_answers()
        assert call_count(mock) == 400


def test_a_second_interrupt_does_not_wait_for_calls(data_dir: Path) -> None:
    workers = 2
    with start_mock_process("--hang-rate", "100%") as mock:
        site = Site(data_dir, 200, mock, *BOUNDS, "--workers", str(workers))
        with site.started("--json") as process:
            site.until_called(CONCURRENCY * workers, process)
            interrupt(process)
            with opened(site.data_dir) as connection:
                waiting = "SELECT count(*) FROM penstock.deferrals WHERE reason = 'given_back'"
                wait_until(lambda: ask(connection, waiting) > 0, 60)
            interrupt(process)
            # The calls would hang for two minutes, and the drain wait for half of one.
            ended = finish(process, 25).expect(130)
        assert ended.summary["pending"] == 200
        with opened(site.data_dir) as connection:
            assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0
            assert ask(connection, "SELECT count(*) FROM penstock.attempts") == 0
            assert ask(connection, "SELECT max(attempt) FROM penstock.deferrals") == 1


_STUCK = """
import threading

def work(item):
    threading.Event().wait()
"""


def test_a_function_that_never_returns_does_not_hold_up_the_end(tmp_path: Path, database_18: str) -> None:
    (tmp_path / "stuck.py").write_text(_STUCK)
    source = write_requests(tmp_path / "requests.jsonl", 100)
    options = ("--processor", "stuck:work", "-o", "answers.jsonl", "--database-url", database_18, *BOUNDS)
    with (
        psycopg.connect(database_18, autocommit=True) as connection,
        start_cli("run", source, *options, cwd=tmp_path) as process,
    ):
        wait_until(lambda: ask(connection, "SELECT count(*) FROM penstock.leases") > 0, 60)
        interrupt(process)
        wait_until(lambda: ask(connection, "SELECT count(*) FROM penstock.deferrals") > 0, 60)
        interrupt(process)
        finish(process, 25).expect(130)
        assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0


def test_a_third_interrupt_leaves_at_once(tmp_path: Path, database_18: str) -> None:
    source = write_requests(tmp_path / "requests.jsonl", 100)
    with (
        start_mock_process("--hang-rate", "100%") as mock,
        psycopg.connect(database_18) as connection,
        start_cli(
            *("run", source, "--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", database_18),
            cwd=tmp_path,
        ) as process,
    ):
        wait_until(lambda: call_count(mock) >= 16, 60)
        # With this lock held nothing can be given back, and giving back is all that is left to do.
        connection.execute("LOCK TABLE penstock.leases")
        for _ in range(3):
            interrupt(process)
            wait_until(lambda: process.poll() is not None or not _pending(process, signal.SIGINT), 30)
        finish(process, 25).expect(130)


def _pending(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether the process has yet to receive a signal that was sent to it: two alike would become one."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(("SigPnd:", "ShdPnd:")) and int(line.split()[1], 16) >> (number - 1) & 1:
            return True
    return False
