"""A job's maxConcurrency: so many of its rows in flight at once over all workers, whatever dies or is run again."""

from __future__ import annotations

from pathlib import Path

import psutil
import psycopg

from tests.support.cli import ask, check_agreement
from tests.support.gauge import CONFIG, PROCESSOR, counting_calls
from tests.support.jobs import items_of, job_of, jobs_server, start_job, table, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

ROWS, MOST = 120, 3


def kill_worker(server: ServerProcess, connection: psycopg.Connection) -> None:
    """Kill a worker process that has rows in flight."""
    # All of them: one that was killed before has its rows until its grace is over.
    holders = "SELECT w.pid FROM penstock.leases l JOIN penstock.workers w ON w.id = l.worker_id"
    found: list[int] = []

    def held() -> bool:
        found[:] = [pid for (pid,) in connection.execute(holders) if pid in server.worker_pids]
        return bool(found)

    wait_until(held, 60)
    psutil.Process(found[0]).kill()


def test_never_more_in_flight_than_the_job_allows(tmp_path: Path, database_18: str) -> None:
    with (
        counting_calls() as gauge,
        psycopg.connect(database_18, autocommit=True) as connection,
        jobs_server(
            *(tmp_path, "--set", "heartbeat_interval_s=0.3", "--set", "heartbeat_grace_s=2"),
            database=database_18,
            workers=2,
            processors=PROCESSOR % gauge.port,
            config_text=CONFIG,
        ) as server,
    ):
        name = start_job(server, table(ROWS), {"processor": "call", "maxConcurrency": MOST})
        for done in (10, 40):
            wait_until(lambda done=done: job_of(server, name)["processed"] >= done and gauge.now, 60)  # type: ignore[misc]
            kill_worker(server, connection)
        # Failures run again while the rest is worked off, and once more when the job has ended.
        wait_until(lambda: job_of(server, name)["failed"] >= 5, 60)
        answer = server.ask("POST", f"/api/jobs/{name}/reprocess", {"scope": "job", "resetAttempts": True})
        assert answer.status == 202, answer.content
        until_state(server, name, "DONE")
        operations = f"/api/jobs/{name}/operations"
        wait_until(lambda: server.ask("GET", operations).json["operations"][0]["state"] == "DONE", 60)
        until_state(server, name, "DONE")
        assert job_of(server, name)["failed"] == ROWS // 10
        gauge.mended = True
        again = {"scope": "job", "statuses": ["DONE", "ERROR"], "resetAttempts": True}
        assert server.ask("POST", f"/api/jobs/{name}/reprocess", again).status == 202
        wait_until(lambda: job_of(server, name)["inFlight"] and gauge.now, 60)
        kill_worker(server, connection)
        wait_until(lambda: server.ask("GET", operations).json["operations"][0]["state"] == "DONE", 60)
        until_state(server, name, "DONE")

        assert {item["status"] for item in items_of(server, name)} == {"DONE"}
        assert 1 < gauge.peak <= MOST
        assert min(gauge.calls.values()) >= 2
        assert ask(connection, "SELECT busy FROM penstock.lanes") == 0
        check_agreement(connection)
