"""`GET /metrics` of a real server, read by a real Prometheus, against the figures of the batch it worked off."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import psycopg

from penstock.api import keys
from penstock.api.endpoint import Role
from tests.support.cli import write_requests
from tests.support.mock_process import start_mock_process
from tests.support.processes import Process, Processes
from tests.support.server import ServerProcess, served
from tests.support.tcp_server import bind
from tests.support.wait import wait_until

_METRICS = re.compile(r"^  metrics +http://127\.0\.0\.1:(\d+)/metrics$", re.MULTILINE)
_DEADLINE_S = 60.0


def configuration(directory: Path, base_url: str) -> Path:
    """A provider that names one model outright, and all others by a pattern."""
    path = directory / "penstock.toml"
    path.write_text(f'[[providers]]\nname = "mocked"\nbase_url = "{base_url}"\nmodels = ["small", "*"]\n')
    return path


def work_off(server: ServerProcess, path: Path) -> dict[str, int]:
    """The counts of a batch over the file, once it is completed."""
    kind = {"content-type": "text/plain"}
    file_id = server.ask("PUT", "/v1/files?purpose=batch&filename=in", path.read_bytes(), headers=kind).json["id"]
    asked = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    place = f"/v1/batches/{server.ask('POST', '/v1/batches', asked).json['id']}"
    wait_until(lambda: server.ask("GET", place).json["status"] == "completed", _DEADLINE_S)
    counts: dict[str, int] = server.ask("GET", place).json["request_counts"]
    return counts


class Prometheus:
    """A running Prometheus that scrapes one port."""

    def __init__(self, process: Process, port: int) -> None:
        self._process = process
        self._port = port

    def value(self, query: str) -> float | None:
        """The only number that a query answers now; None if there is none yet."""
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/api/v1/query?{urlencode({'query': query})}") as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
        except OSError:
            assert self._process.alive, self._process.tail()
            return None
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None


@contextmanager
def prometheus(directory: Path, scraped_port: int) -> Iterator[Prometheus]:
    config = directory / "prometheus.json"
    job = {"job_name": "penstock", "static_configs": [{"targets": [f"127.0.0.1:{scraped_port}"]}]}
    globally = {"scrape_interval": "200ms", "scrape_timeout": "200ms"}
    config.write_text(json.dumps({"global": globally, "scrape_configs": [job]}))  # JSON is YAML
    # The reserved socket never listens, and Prometheus shares its port: nobody else gets it.
    with Processes(directory) as processes, bind() as reserved:
        port = reserved.getsockname()[1]
        process = processes.start(
            "prometheus",
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'series'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
        )
        yield Prometheus(process, port)


def test_prometheus_reads_the_figures_of_a_batch(tmp_path: Path, database_18: str) -> None:
    requests = write_requests(tmp_path / "in.jsonl", 300, ("small", "of-a-tenant"))
    with (
        start_mock_process("--reject-rate", "10%", "--error-rate", "5%", "--seed", "3") as mock,
        served(
            *(tmp_path, "--config", configuration(tmp_path, mock.base_url)),
            *("--set", "metrics_cache_s=0.1", "--set", "retry_base_s=0.01"),
            database=database_18,
        ) as server,
        prometheus(tmp_path, server.port) as scraped,
    ):
        counts = work_off(server, requests)
        assert counts["total"] == 300
        assert 0 < counts["failed"] < 100

        def count(metric: str, **labels: str) -> float | None:
            where = ",".join(f'{name}="{value}"' for name, value in labels.items())
            return scraped.value(f"sum({metric}{{{where}}})")

        def arrived(want: float, metric: str, **labels: str) -> None:
            wait_until(lambda: count(metric, provider="mocked", pool="batch", **labels) == want, _DEADLINE_S)

        def is_counted(metric: str, want: float) -> bool:
            return count(metric) == want

        # A snapshot of the worker process comes each second, and a scrape takes it along.
        arrived(counts["completed"], "penstock_items_total", outcome="completed")
        arrived(counts["failed"], "penstock_items_total", outcome="failed")
        arrived(300, "penstock_items_total")
        arrived(150, "penstock_items_total", model="small")
        arrived(150, "penstock_items_total", model="other")
        calls = sum(int(number) for number in _by_status(mock.stats()).values())
        arrived(calls, "penstock_calls_total")
        arrived(calls, "penstock_call_duration_seconds_count")
        arrived(calls - 300, "penstock_retries_total", error="server")
        arrived(300, "penstock_settled_rows_total", result="outcome")
        arrived(0, "penstock_settled_rows_total", result="fenced")
        # A scrape that takes too long leaves nothing of these until the next.
        for metric, want in (("ingest_rows_total", 300), ("processes", 2), ("database_up", 1)):
            wait_until(partial(is_counted, f"penstock_{metric}", want), _DEADLINE_S)
        wait_until(lambda: count("penstock_workers", provider="mocked", state="alive") == 3, _DEADLINE_S)
        wait_until(lambda: count("penstock_queue_items") in (None, 0), _DEADLINE_S)

        page = server.ask("GET", "/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        checked = subprocess.run(["promtool", "check", "metrics"], input=page.content, capture_output=True, check=False)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
        secrets = rb"of-a-tenant|r-1\b|\b(?:batch_|file-)[0-9a-f]{8}|\blocal\b|127\.0\.0\.1|http:"
        assert not re.findall(secrets, page.content)


def _by_status(stats: dict[str, object]) -> dict[str, int]:
    found = stats["by_status"]
    assert isinstance(found, dict)
    return found


def test_what_a_killed_process_counted_is_kept(tmp_path: Path, database_18: str) -> None:
    requests = write_requests(tmp_path / "in.jsonl", 50)
    with (
        start_mock_process() as mock,
        served(tmp_path, "--base-url", mock.base_url, database=database_18) as server,
    ):
        work_off(server, requests)
        wait_until(lambda: total_of(server, "penstock_items_total") == 50, _DEADLINE_S)
        (killed,) = server.worker_pids
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: total_of(server, "penstock_process_restarts_total") == 1, _DEADLINE_S)
        assert total_of(server, "penstock_items_total") == 50
        work_off(server, requests)
        wait_until(lambda: total_of(server, "penstock_items_total") == 100, _DEADLINE_S)


def total_of(server: ServerProcess, metric: str) -> float:
    return total_in(server.ask("GET", "/metrics").content, metric)


def total_in(page: bytes, metric: str) -> float:
    lines = page.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{metric}[{{ ]", line))


def make_key(database: str, owner: str, role: Role) -> str:
    async def make() -> str:
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
            return (await keys.create_key(connection, owner=owner, name="", role=role, expires_after_s=None))[1]

    return asyncio.run(make())


def test_an_admins_key_is_needed_once_there_are_keys(tmp_path: Path, database_18: str) -> None:
    admin, user = make_key(database_18, "ops", "admin"), make_key(database_18, "acme", "user")
    nowhere = ("--base-url", "http://127.0.0.1:9/v1")
    with served(tmp_path, *nowhere, database=database_18, workers=0) as server:
        answers = [server.ask("GET", "/metrics", key=key).status for key in (None, "sk-penstock-no", user, admin)]
        assert answers == [401, 401, 403, 200]
    with served(tmp_path, *nowhere, "--set", "metrics_public=true", database=database_18, workers=0) as server:
        page = server.ask("GET", "/metrics")
        assert page.status == 200
        for word in (b"acme", b"ops", admin.encode(), user.encode()):
            assert word not in page.content


def test_workers_alone_have_a_port_of_their_own(tmp_path: Path, database_18: str) -> None:
    requests = write_requests(tmp_path / "in.jsonl", 40)
    with (
        start_mock_process() as mock,
        served(tmp_path, "--base-url", mock.base_url, database=database_18, workers=0) as server,
        Processes(tmp_path) as processes,
    ):
        worker = processes.penstock(
            "worker",
            *("worker", "--base-url", mock.base_url, "--database-url", database_18, "--metrics-port", "0"),
            *("--data-dir", tmp_path / "workers"),
            env={"PYTHONUNBUFFERED": "1"},
        )
        wait_until(lambda: _METRICS.search(worker.log.read_text()), _DEADLINE_S)
        (port,) = _METRICS.findall(worker.log.read_text())
        work_off(server, requests)

        def page() -> bytes:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                content: bytes = answer.read()
            return content

        wait_until(lambda: total_in(page(), "penstock_items_total") == 40, _DEADLINE_S)
        assert total_in(page(), "penstock_processes") == 2
        assert b"penstock_queue_items{" not in page()
        assert total_of(server, "penstock_items_total") == 0
        worker.terminate()
        assert worker.wait(_DEADLINE_S) == 0
