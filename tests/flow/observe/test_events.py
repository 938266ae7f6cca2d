"""The log of a server for programs: what happened to batches, routes and leases, once each, and nothing of users."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.db.migrate import list_migrations
from tests.support.batch_api import ENDPOINT
from tests.support.cli import request_line, run_cli, write_requests
from tests.support.mock_process import start_mock_process
from tests.support.server import ServerProcess, served
from tests.support.tenants import form
from tests.support.wait import wait_until

DEADLINE_S = 60.0
RIGHT_KEY = "sk-CANARY-right-key"


def events(server: ServerProcess) -> list[dict[str, Any]]:
    """The lines of the log, each of which is an object; the start-up messages are none of it."""
    lines = [line for line in server.log.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines]


def named(server: ServerProcess, name: str) -> list[dict[str, Any]]:
    return [one["fields"] for one in events(server) if one["event"] == name]


def create(server: ServerProcess, count: int) -> str:
    lines = (request_line(f"CANARY-id-{number}", f"CANARY prompt {number}") for number in range(count))
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    body, content_type = form({"purpose": "batch", "file": data})
    file = server.ask("POST", "/v1/files", body, headers={"content-type": content_type}).json
    wish = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
    batch: str = server.ask("POST", "/v1/batches", wish).json["id"]
    return batch


@pytest.fixture
def empty_18(server_18: str) -> str:
    """A database that has never seen Penstock."""
    name = f"empty_{uuid4().hex}"
    with psycopg.connect(server_18, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    return make_conninfo(server_18, dbname=name)


@pytest.fixture
def server(tmp_path: Path, empty_18: str) -> Iterator[ServerProcess]:
    key, config = tmp_path / "key", tmp_path / "penstock.toml"
    key.write_text("sk-CANARY-wrong-key")
    with start_mock_process("--require-key", RIGHT_KEY, "--error-rate", "0.3") as mock:
        config.write_text(
            f'retry_base_s = 0.01\nretry_cap_s = 0.01\nmax_attempts = 20\n[[providers]]\nname = "main"\n'
            f'base_url = "{mock.base_url}"\nmodels = ["*"]\napi_key_file = "{key}"\n'
        )
        with served(tmp_path, "--config", config, "--log-format", "json", database=empty_18) as server:
            yield server


def test_the_life_of_batches_is_in_the_log(server: ServerProcess, tmp_path: Path) -> None:
    applied = [one["migration"] for one in named(server, "migration_applied")]
    assert applied == [migration.name for migration in list_migrations()]

    create(server, 40)
    wait_until(lambda: named(server, "gate_halted"), DEADLINE_S)
    (halted,) = named(server, "gate_halted")
    assert (halted["pool"], halted["route"], halted["status_code"]) == ("serve:main", "small", 401)
    (tmp_path / "key").write_text(RIGHT_KEY)
    run_cli("providers", "resume", "main", "--server", server.url, cwd=tmp_path).expect(0)
    wait_until(lambda: named(server, "batch_completed"), DEADLINE_S)
    (ended,) = named(server, "batch_completed")
    assert (ended["total"], ended["completed"], ended["failed"]) == (40, 40, 0)
    assert ended["retried"] > 0
    assert ended["duration_s"] > 0
    # At least one line at once; the others are told with their count.
    assert named(server, "retry")[0]["route"] == "small"
    assert len(named(server, "retry")) < ended["retried"]

    cancelled = create(server, 5000)
    wait_until(lambda: len(named(server, "batch_started")) == 2, DEADLINE_S)
    assert server.ask("POST", f"/v1/batches/{cancelled}/cancel", {}).status == 200
    wait_until(lambda: named(server, "batch_cancelled"), DEADLINE_S)
    times = Counter(one["event"] for one in events(server) if one["event"].startswith(("batch_", "gate_")))
    wanted = ("created", "started", "completed", "cancelling", "cancelled")
    assert [times[f"batch_{name}"] for name in wanted] == [2, 2, 1, 1, 1]
    assert times["gate_reopened"] == 1
    assert "CANARY" not in server.log


def test_the_log_of_a_run_holds_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text(
        "def work(item):\n    item.log.warning('key sk-CANARY-0123456789, password=CANARY')\n    return {}\n"
    )
    write_requests(tmp_path / "in.jsonl", 1)
    told = ("--processor", "talking:work", "-o", "out.jsonl", "--data-dir", "data")
    done = run_cli("run", "in.jsonl", *told, "--set", "log_format=json", cwd=tmp_path).expect(0)
    (line,) = (tmp_path / "data" / "penstock.log").read_text().splitlines()
    assert json.loads(line)["message"].endswith("key sk-[hidden], password=[hidden]")
    again = run_cli("run", "in.jsonl", *told, "--new", "-v", cwd=tmp_path).expect(0)
    assert "key sk-[hidden], password=[hidden]" in again.stderr
    assert "batch_completed" not in again.stderr  # a name for programs, in the text format there are words
    assert " completed after " in again.stderr
    assert "CANARY" not in done.stderr + again.stderr
