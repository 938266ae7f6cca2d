"""The pieces of the fault rig together: a real run behind both proxies, a history, and the checker's word on it."""

from __future__ import annotations

from pathlib import Path

import psycopg

from penstock.mock.behaviour import Behaviour, Latency
from tests.support.checker import check
from tests.support.cli import write_requests
from tests.support.history import HistoryWriter, digest_of, read_history
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Process, Processes
from tests.support.proxy import TcpProxy
from tests.support.upstream import start_upstream
from tests.support.wait import wait_until

LINES = 600
DEADLINE_S = 60.0
SETTLE = r"INTO penstock\.outcomes"
CLAIM = r"INTO penstock\.leases"


def run(processes: Processes, source: Path, database: str, base_url: str) -> Process:
    target = ("--database-url", database, "--base-url", base_url, "-o", "answers.jsonl")
    bounds = ("--concurrency", "16", "--set", "settle_max_rows=16", "--set", "retry_base_s=0.01")
    return processes.penstock("run", "run", source, *target, *bounds, "--json")


def note_the_end(database: str, history: HistoryWriter) -> None:
    """What the database says in the end: the counts, the results, and every attempt that came to nothing."""
    with psycopg.connect(database) as connection:
        for batch, total, completed, failed in connection.execute(
            "SELECT id, total, completed, failed FROM penstock.batches"
        ).fetchall():
            unit = batch.hex
            history.record("invoke", "upload", unit, {"lines": total})
            history.record("ok", "upload", unit)
            history.record("ok", "status", unit, {"total": total, "completed": completed, "failed": failed})
            history.record("invoke", "export", unit, {"read": unit})
            for line, state, lease, response in connection.execute(
                "SELECT o.line, o.state, o.lease_id, o.response"
                "  FROM penstock.outcomes o JOIN penstock.lanes l ON l.id = o.lane_id WHERE l.batch_id = %s",
                [batch],
            ):
                row = {"read": unit, "state": state, "lease": lease, "digest": response and digest_of(response)}
                history.record("ok", "result", f"{unit}-{line}", row)
            history.record("ok", "export", unit, {"read": unit})
        for batch, line, lease in connection.execute(
            "SELECT l.batch_id, t.line, a.lease_id FROM penstock.attempts a JOIN penstock.lanes l ON l.id = a.lane_id"
            "  JOIN penstock.templates t USING (source_id, source_lane, ordinal)"
            " WHERE a.not_before IS NOT NULL ORDER BY a.id"
        ):
            history.record("info", "attempt", f"{batch.hex}-{line}", {"kind": "retry", "lease": lease})


def test_a_run_behind_faulty_connections_is_clean(tmp_path: Path, database_18: str) -> None:
    notes = tmp_path / "history"
    behaviour = Behaviour(latency=Latency.parse("5ms..20ms"), error_rate=0.02, seed=1)
    with (
        HistoryWriter(notes, "injector") as history,
        Processes(tmp_path, history=history) as processes,
        PostgresProxy(database_18, history=history) as postgres,
    ):
        upstream = start_upstream(processes, notes, behaviour)
        with TcpProxy(("127.0.0.1", upstream.port), history=history, name="upstream") as between:
            settles = postgres.swallow(SETTLE, times=3)
            claims = postgres.cut_before(CLAIM, times=2)
            source = write_requests(tmp_path / "requests.jsonl", LINES)
            base_url = f"http://127.0.0.1:{between.port}/v1"
            process = run(processes, source, postgres.proxied(database_18), base_url)
            settles.wait(DEADLINE_S)
            between.cut()
            claims.wait(DEADLINE_S)
            wait_until(lambda: not process.alive, DEADLINE_S)
            assert process.exit_code == 0, process.tail()
        note_the_end(database_18, history)
    report = check(
        read_history(notes),
        require=["swallow", "cut_before", "cut", "dispatch", "result", "retry", "status"],
    )
    assert report.clean, report
    assert report.seen["result"] == LINES
    assert set(report.skipped) == {"I5", "I8", "I9", "I10"}
