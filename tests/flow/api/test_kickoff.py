"""Kickoff: a slice of a job inside the request, from several tabs, with and without worker processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.cli import ask, check_agreement
from tests.support.gauge import CONFIG, PROCESSOR, counting_calls
from tests.support.jobs import items_of, job_of, jobs_server, start_job, table, until_state
from tests.support.mock_process import start_mock_process
from tests.support.server import ServerProcess
from tests.support.thorough import some


def kick_off(server: ServerProcess, name: str, duration_ms: int = 500) -> Any:
    answer = server.ask("POST", f"/api/jobs/{name}/kickoff?durationMs={duration_ms}", timeout_s=60)
    assert answer.status == 200, answer.content
    return answer.json


def until_done(server: ServerProcess, name: str, duration_ms: int = 500) -> int:
    """As a tab does: again and again, until there is nothing left. Returns the rows that it was told of."""
    processed: int = 0
    while True:
        told = kick_off(server, name, duration_ms)
        processed += told["processed"]
        if told["retryAfterMs"] is None:
            assert told["remaining"] == 0
            return processed


@pytest.mark.parametrize("limit", some([3, None], 1))
def test_two_tabs_do_not_double_the_load(tmp_path: Path, database_18: str, limit: int | None) -> None:
    """Without workers: nothing is called twice, and no more at once than one worker or the job allows."""
    rows = 100
    with (
        counting_calls() as gauge,
        psycopg.connect(database_18, autocommit=True) as connection,
        jobs_server(
            tmp_path,
            database=database_18,
            workers=0,
            processors=PROCESSOR % gauge.port,
            config_text=CONFIG,
        ) as server,
        ThreadPoolExecutor(2) as tabs,
    ):
        gauge.mended = True
        spec = {"processor": "call"} | ({"maxConcurrency": limit} if limit else {})
        name = start_job(server, table(rows), spec)
        until_state(server, name, "QUEUED")
        told = [tab.result() for tab in [tabs.submit(until_done, server, name) for _ in range(2)]]
        assert sum(told) >= rows
        assert job_of(server, name)["state"] == "DONE"
        assert gauge.calls == {sku: 1 if sku % 7 else 2 for sku in range(1, rows + 1)}
        assert 1 < gauge.peak <= (limit or 8)
        assert ask(connection, "SELECT sum(busy) FROM penstock.lanes") == 0
        check_agreement(connection)


def test_rows_put_back_are_worked_off_without_workers(tmp_path: Path, database_18: str) -> None:
    """A tab asks before the operation has put back anything: it is told to come again, and all rows are run."""
    with (
        counting_calls() as gauge,
        psycopg.connect(database_18) as other,
        jobs_server(
            tmp_path, database=database_18, workers=0, processors=PROCESSOR % gauge.port, config_text=CONFIG
        ) as server,
    ):
        name = start_job(server, table(50), {"processor": "call", "maxConcurrency": 2})
        until_state(server, name, "QUEUED")
        until_done(server, name)
        assert job_of(server, name)["failed"] == 5
        gauge.mended = True
        other.execute("SELECT FROM penstock.batches FOR UPDATE")
        again = {"scope": "job", "resetAttempts": True}
        assert server.ask("POST", f"/api/jobs/{name}/reprocess", again).status == 202
        assert kick_off(server, name, 1) == {"processed": 0, "remaining": 0, "retryAfterMs": 1_000}
        other.rollback()
        until_done(server, name)
        assert (job_of(server, name)["state"], job_of(server, name)["failed"]) == ("DONE", 0)


def test_a_prompt_for_each_row_without_workers(tmp_path: Path, database_18: str) -> None:
    with (
        start_mock_process() as mock,
        jobs_server(tmp_path, "--base-url", mock.base_url, database=database_18, workers=0) as server,
    ):
        prompt = {"type": "chat", "provider": "default", "model": "small", "prompt": "What is {{ product_title }}?"}
        first, second = (start_job(server, table(20), {"processor": prompt}) for _ in range(2))
        for name in (first, second):
            until_state(server, name, "QUEUED")
        # It works for the one job alone.
        until_done(server, first)
        assert job_of(server, first)["state"] == "DONE"
        assert job_of(server, second)["processed"] == 0
        assert kick_off(server, first) == {"processed": 0, "remaining": 0, "retryAfterMs": None}

        assert server.ask("POST", f"/api/jobs/{second}/pause").status == 200
        refused = server.ask("POST", f"/api/jobs/{second}/kickoff")
        assert (refused.status, refused.json["error"]["message"]) == (409, "Cannot kick off a job that is paused.")
        assert server.ask("POST", f"/api/jobs/{second}/resume").status == 200
        with ThreadPoolExecutor(2) as tabs:
            assert sum(tabs.map(lambda _: until_done(server, second), range(2))) >= 20
        assert {item["status"] for item in items_of(server, second)} == {"DONE"}
        assert server.ask("POST", f"/api/jobs/{second}/kickoff?durationMs=0").status == 400


def test_worker_processes_do_the_work_where_there_are_any(tmp_path: Path, database_18: str) -> None:
    with jobs_server(tmp_path, database=database_18) as server:
        name = start_job(server, table(30), {"processor": "price"})
        until_done(server, name, 5_000)
        assert job_of(server, name)["processed"] == 30
