"""R8: disks run full under a server at work, and under intake. Work waits, goes on by itself, and nothing is charged.

What a whole run says about a full disk is in `tests/flow/cli/test_run_errors.py`, what a server answers in
`test_api_faults.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from penstock.batches.steer import pause_batch, resume_batch
from penstock.db.embedded import postgres
from penstock.db.embedded.cluster import LOG, PGDATA, RESERVE
from penstock.db.embedded.keeper import KEEPER_LOCK, try_lock
from penstock.db.embedded.reserve import keep_reserve
from penstock.db.migrate import migrate
from penstock.db.pool import Connection
from penstock.intake.sweep import purge_failed
from penstock.mock.behaviour import Behaviour, Latency
from tests.support.cli import ask, check_answers, ids_of, opened, run_cli, write_requests
from tests.support.db import with_connection
from tests.support.disks import MIB, Disk, disk, mounting
from tests.support.processes import Process
from tests.support.upstream import UpstreamProcess
from tests.support.wait import wait_until
from tests.support.workbench import (
    CONCURRENCY,
    DEADLINE_S,
    SETTINGS,
    Bench,
    calls_of,
    in_flight,
    leave,
    until_said,
    workbench,
)

LINES = 800
ANSWERS = Behaviour(latency=Latency(0.1, 0.1), response_bytes=2_000)
FULL = "No space left on device"
WORKERS = ("first", "second")
# Of each worker: its calls, the answers that wait, and those of the flush that fails.
UNWRITTEN_AT_MOST = len(WORKERS) * (CONCURRENCY + int(str(SETTINGS["settle_capacity_rows"])) + 8)


@dataclass(frozen=True, slots=True)
class Server:
    """PostgreSQL with its tables on one disk and its log of changes (WAL) on another."""

    conninfo: str
    data_dir: Path
    data: Disk
    wal: Disk

    def said(self) -> str:
        return (self.data_dir / LOG).read_text(errors="replace")


@contextmanager
def served(directory: Path) -> Iterator[Server]:
    data, wal = disk(directory / "data", 256 * MIB), disk(directory / "wal", 96 * MIB)
    data_dir = data.path / "data"
    with postgres.acquire(data_dir):
        pass
    wait_until(lambda: _is_free(data_dir / KEEPER_LOCK), DEADLINE_S)
    place = data_dir / PGDATA / "pg_wal"
    subprocess.run(["mv", place, wal.path], check=True)
    place.symlink_to(wal.path / "pg_wal")
    with postgres.acquire(data_dir, settings={"min_wal_size": "32MB", "max_wal_size": "64MB"}) as server:
        migrate(server.conninfo)
        yield Server(server.conninfo, data_dir, data, wal)


def _is_free(lock: Path) -> bool:
    held = try_lock(str(lock))
    if held is not None:
        os.close(held)
    return held is not None


def finish(bench: Bench, workers: list[Process]) -> None:
    """The batch ends by itself. Nobody died, so no call is repeated, and no input has paid for the disk."""
    bench.until_completed()
    for told in [leave(worker) for worker in workers]:
        assert (told["lost"], told["fenced"], told["retries"]) == (0, 0, 0)
    bench.check()
    assert bench.calls() == bench.lines
    assert bench.ask("SELECT max(attempts) FROM penstock.outcomes") == 1
    for table in ("attempts", "reclaims", "deferrals"):
        assert bench.ask(f"SELECT count(*) FROM penstock.{table}") == 0, table


def until_everybody_calls(bench: Bench, upstream: UpstreamProcess) -> None:
    """Until some answers are written and each worker waits for others: the upstream stands still, or the batch might be
    over before the disk is full."""
    bench.until("SELECT (count(*) > 0)::int FROM penstock.outcomes")
    bench.until(f"SELECT (count(DISTINCT worker_id) = {len(WORKERS)})::int FROM penstock.leases")
    upstream.process.stop()
    bench.until(f"SELECT (count(DISTINCT worker_id) = {len(WORKERS)})::int FROM penstock.leases")


def until_calls_stop(bench: Bench, workers: list[Process]) -> None:
    """Until no call has begun or ended while each worker met the full disk twice more."""

    def stopped() -> bool:
        before = bench.calls()
        for worker in workers:
            until_said(worker, "failed, trying again", worker.log.read_text().count("failed, trying again") + 2)
        return bench.calls() == before and sum(map(in_flight, bench.upstreams)) == 0

    wait_until(stopped, DEADLINE_S)


@mounting
def test_tables_cannot_grow_while_results_are_written(tmp_path: Path) -> None:
    with served(tmp_path) as server, workbench(tmp_path, server.conninfo, lines=LINES) as bench:
        upstream = bench.upstream("upstream", ANSWERS)
        # Small claims, so that everybody has work.
        workers = [bench.worker(name, upstream, {"claim_max": 32}) for name in WORKERS]
        until_everybody_calls(bench, upstream)
        with psycopg.connect(server.conninfo, autocommit=True) as looking:  # a new one may find no room to begin
            server.data.fill()
            upstream.process.cont()
            for worker in workers:
                until_said(worker, FULL)
                until_said(worker, "nothing is begun")
            until_calls_stop(bench, workers)
            assert bench.calls() < LINES
            before = bench.outcomes(looking)
        assert 0 < bench.calls() - len(before) <= UNWRITTEN_AT_MOST
        server.data.make_room()
        finish(bench, workers)
        assert before.items() <= bench.outcomes().items()
        assert "PANIC" not in server.said()


@mounting
def test_tables_cannot_grow_while_work_is_claimed(tmp_path: Path) -> None:
    with served(tmp_path) as server, workbench(tmp_path, server.conninfo, lines=LINES) as bench:
        assert with_connection(server.conninfo, lambda connection: pause_batch(connection, bench.batch_id))
        upstream = bench.upstream("upstream", ANSWERS)
        workers = [bench.worker(name, upstream) for name in WORKERS]
        # Past their start: a server process that begins or ends meanwhile may give back a page of the full disk.
        beating = "SELECT (count(*) = {})::int FROM penstock.workers WHERE heartbeat_at > started_at"
        bench.until(beating.format(len(WORKERS)))
        vacuuming = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'autovacuum worker'"

        async def resume_on_a_full_disk(connection: Connection) -> None:
            server.data.fill()
            wait_until(lambda: ask(looking, vacuuming) == 0, DEADLINE_S)
            server.data.fill()
            assert await resume_batch(connection, bench.batch_id)
            for worker in workers:
                until_said(worker, "claim failed, trying again", 3)
                assert FULL in worker.log.read_text()
            assert bench.calls() == ask(looking, "SELECT count(*) FROM penstock.leases") == 0

        # Both are there before the disk is full: a new connection may find no room to begin.
        with psycopg.connect(server.conninfo, autocommit=True) as looking:
            with_connection(server.conninfo, resume_on_a_full_disk)
        server.data.make_room()
        finish(bench, workers)


@mounting
def test_the_log_of_changes_cannot_grow(tmp_path: Path) -> None:
    """PostgreSQL gives up at once, and again each time it is started, until there is room."""
    with served(tmp_path) as server, workbench(tmp_path, server.conninfo, lines=LINES) as bench:
        upstream = bench.upstream("upstream", ANSWERS)
        workers = [bench.worker(name, upstream) for name in WORKERS]
        until_everybody_calls(bench, upstream)
        server.wal.fill()
        upstream.process.cont()

        def everybody_has_noticed() -> bool:
            # Started again, it goes on for as long as the file it writes to has room; somebody may have missed that.
            return _falls_over(server) and all("failed, trying again" in worker.log.read_text() for worker in workers)

        wait_until(everybody_has_noticed, DEADLINE_S)
        assert all(worker.alive for worker in workers)
        assert re.search(rf"PANIC: .*{FULL}", server.said())
        assert calls_of(upstream) < LINES
        server.wal.make_room()
        wait_until(lambda: _answers(server.conninfo), DEADLINE_S)
        finish(bench, workers)


def _falls_over(server: Server) -> bool:
    """Have the next file of the log begun, which has to be made; whether the server is down for it."""
    _begin_next_log_file(server.conninfo)
    return "the server is gone while in use" in server.said()


def _begin_next_log_file(conninfo: str) -> None:
    with suppress(psycopg.Error), psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("SELECT pg_switch_wal()")


@mounting
def test_the_server_has_the_room_for_deletions_when_it_cannot_start(tmp_path: Path) -> None:
    """PostgreSQL ends on a disk that is full to the last page, and starts again without anybody making room."""
    data = disk(tmp_path / "disk", 256 * MIB)
    data_dir = data.path / "data"
    with postgres.acquire(data_dir) as server:
        migrate(server.conninfo)
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            assert connection.execute("SHOW max_wal_size").fetchone() == ("64MB",)
        keep_reserve(data_dir, 0)
        assert (data_dir / RESERVE).exists()

        data.fill()

        def room_is_given() -> bool:
            _begin_next_log_file(server.conninfo)
            return not (data_dir / RESERVE).exists()

        wait_until(room_is_given, DEADLINE_S)
        wait_until(lambda: _answers(server.conninfo), DEADLINE_S)
        said = (data_dir / LOG).read_text(errors="replace")
        assert re.search(rf"(PANIC|FATAL): .*{FULL}", said)
        assert "the server has the room that was kept for deletions" in said
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            connection.execute("DELETE FROM penstock.workers")


def _answers(conninfo: str) -> bool:
    try:
        psycopg.connect(conninfo).close()
    except psycopg.OperationalError:
        return False
    return True


@mounting
def test_no_room_for_the_ids_of_an_input(tmp_path: Path) -> None:
    """Intake keeps the ids of a large file beside it until it knows that none occurs twice."""
    lines = 100_000
    source = write_requests(tmp_path / "requests.jsonl", lines)
    (tmp_path / "rows.py").write_text("async def work(item):\n    return 1\n")
    spill = disk(tmp_path / "spill", MIB // 4)
    data_dir = tmp_path / "data"
    command = ("run", source, "--processor", "rows:work", "-o", "answers.jsonl", "--data-dir", data_dir)
    refused = run_cli(*command, cwd=tmp_path, env={"TMPDIR": str(spill.path)})
    refused.refuses(1, f"{spill.path}: cannot keep the file's custom_ids there", FULL, "TMPDIR")
    assert not (tmp_path / "answers.jsonl").exists()
    assert list(spill.path.iterdir()) == []
    with opened(data_dir) as connection:
        assert ask(connection, "SELECT count(*) FROM penstock.files WHERE state <> 'failed'") == 0
        purge_failed(connection)  # rows that take longer than a moment to delete are left to this sweep
        for table in ("files", "templates", "batches"):
            assert ask(connection, f"SELECT count(*) FROM penstock.{table}") == 0, table
    run_cli(*command, cwd=tmp_path).expect(0)
    check_answers(tmp_path / "answers.jsonl", ids_of(lines))
