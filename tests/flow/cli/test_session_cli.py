"""`penstock session`, whole: the real program against a real server, and against the data itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.cli import Finished, finish, interrupt, run_cli, start_cli
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.server import ServerProcess, served
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with start_mock_process() as process:
        yield process


@pytest.fixture(scope="module")
def database(server_18: str) -> Iterator[str]:
    with psycopg.connect(server_18, autocommit=True) as connection:
        connection.execute("CREATE DATABASE session_cli TEMPLATE template_penstock")
        yield make_conninfo(server_18, dbname="session_cli")
        connection.execute("DROP DATABASE session_cli WITH (FORCE)")


@pytest.fixture(scope="module")
def server(database: str, mock: MockProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    place = tmp_path_factory.mktemp("session_cli")
    with served(place, "--base-url", mock.base_url, database=database) as running:
        yield running


@pytest.fixture
def idle(database_18: str, mock: MockProcess, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose requests wait: it has no workers."""
    with served(tmp_path / "idle", "--base-url", mock.base_url, database=database_18, workers=0) as running:
        yield running


def penstock(server: ServerProcess, tmp_path: Path, command: str, *args: str) -> Finished:
    return run_cli("session", command, *args, "--server", server.url, cwd=tmp_path)


def test_send_prints_the_answer_and_keeps_the_order(server: ServerProcess, tmp_path: Path) -> None:
    key = f"a chat {uuid4().hex}"
    first = penstock(server, tmp_path, "send", key, "hello there", "--model", "m").expect(0)
    assert first.stdout.strip()
    second = penstock(server, tmp_path, "send", key, "again", "--model", "m", "--json").expect(0).summary
    assert (second["status"], second["sequence"], second["session"]) == ("completed", 2, key)
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "m", "input": "words"}))
    third = penstock(
        server, tmp_path, "send", key, "--body", str(body), "--endpoint", "/v1/embeddings", "--json"
    ).expect(0)
    assert third.summary["response"]["body"]["object"] == "list"
    shown = penstock(server, tmp_path, "show", key, second["id"]).expect(0)
    assert "number 2" in shown.stdout
    assert penstock(server, tmp_path, "show", key, "2", "--json").expect(0).summary == second
    assert penstock(server, tmp_path, "show", key, second["id"][-6:], "--json").expect(0).summary == second
    listed = penstock(server, tmp_path, "ls").expect(0)
    assert key in listed.stdout


def test_the_same_key_sends_once(server: ServerProcess, tmp_path: Path) -> None:
    key = uuid4().hex
    sent = [
        penstock(server, tmp_path, "send", key, "once", "--model", "m", "--json", "--idempotency-key", "k").summary[
            "id"
        ]
        for _ in range(2)
    ]
    assert sent[0] == sent[1]
    changed = penstock(server, tmp_path, "send", key, "twice", "--model", "m", "--idempotency-key", "k")
    changed.refuses(1, "Idempotency-Key")


def test_a_failure_is_told_by_the_exit_code(server: ServerProcess, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "m", "messages": "not a list"}))
    key = uuid4().hex
    failed = penstock(server, tmp_path, "send", key, "--body", str(body))
    failed.expect(3)
    assert failed.stdout.startswith("failed: ")
    shown = penstock(server, tmp_path, "show", key, "--json").expect(0).summary
    assert [entry["status"] for entry in shown["failures"]] == ["failed"]


def test_a_blocked_session_is_resumed_and_erased(server: ServerProcess, tmp_path: Path) -> None:
    key = f"blocks {uuid4().hex}"
    path = f"/v1/sessions/{quote(key)}"
    assert server.ask("PUT", path, {"on_dead_head": "block"}).status == 200
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "m", "messages": "no list"}))
    penstock(server, tmp_path, "send", key, "--body", str(body)).expect(3)
    behind = penstock(server, tmp_path, "send", key, "behind", "--model", "m", "--async", "--json").expect(0).summary
    shown = penstock(server, tmp_path, "show", key).expect(0)
    assert "blocked" in shown.stdout
    assert f"penstock session resume '{key}'" in shown.stderr
    penstock(server, tmp_path, "resume", key, "--retry-head").expect(0)
    wait_until(lambda: server.ask("GET", path).json["status"] == "blocked", 30)
    assert penstock(server, tmp_path, "resume", key).expect(0).stdout.strip() == f"{key}  open"
    found = server.ask("GET", f"{path}/requests/{behind['id']}?wait=30").json
    assert found["status"] == "completed"
    assert "not blocked" in penstock(server, tmp_path, "resume", key).expect(1).stderr
    assert penstock(server, tmp_path, "delete", key).expect(0).stdout.strip() == f"{key}  deleted"
    assert "session ls" in penstock(server, tmp_path, "delete", key).expect(1).stderr


def test_what_waits_is_shown_and_cancelled(idle: ServerProcess, tmp_path: Path) -> None:
    ids = [
        penstock(idle, tmp_path, "send", "q", f"question {n}", "--model", "m", "--async", "--json")
        .expect(0)
        .summary["id"]
        for n in range(4)
    ]
    timed_out = penstock(idle, tmp_path, "send", "q", "another", "--model", "m", "--wait", "0.1")
    assert timed_out.expect(1).stderr.count("penstock session show q sreq_") == 1
    shown = penstock(idle, tmp_path, "show", "q", "--json").expect(0).summary
    assert shown["queued"] == 5
    assert [entry["id"] for entry in shown["next"]][:4] == ids
    assert "5 waiting" in penstock(idle, tmp_path, "show", "q").expect(0).stdout
    one = penstock(idle, tmp_path, "cancel", "q", ids[1], "3", "--json").expect(0).summary
    assert [entry["id"] for entry in one["cancelled"]] == [ids[1], ids[2]]
    rest = penstock(idle, tmp_path, "cancel", "q", "--all", "--json").expect(0).summary
    assert len(rest["cancelled"]) == 3
    assert penstock(idle, tmp_path, "cancel", "q", "--all").expect(0).stdout == ""
    listed = penstock(idle, tmp_path, "ls", "--json").expect(0).summary
    assert [entry["key"] for entry in listed["data"]] == ["q"]
    assert listed["has_more"] is False


def test_an_interrupted_send_loses_nothing(idle: ServerProcess, tmp_path: Path) -> None:
    with start_cli("session", "send", "kept", "hello", "--model", "m", "--server", idle.url, cwd=tmp_path) as process:
        wait_until(lambda: idle.ask("GET", "/v1/sessions/kept").status == 200, 30)
        interrupt(process)
        assert finish(process).code == 130
    assert idle.ask("GET", "/v1/sessions/kept").json["queued"] == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("send", "s"), "TEXT or --body"),
        (("send", "s", "text"), "--model"),
        (("send", "s", "text", "--model", "m", "--endpoint", "/v1/embeddings"), "--body"),
        (("cancel", "s"), "--all"),
    ],
)
def test_wrong_usage_is_explained(server: ServerProcess, tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    run_cli("session", *args, "--server", server.url, cwd=tmp_path).refuses(2, words)


def test_what_is_not_there_is_said_with_what_to_do(server: ServerProcess, tmp_path: Path) -> None:
    penstock(server, tmp_path, "show", "no such session").refuses(1, "no such session", "penstock session ls")
    penstock(server, tmp_path, "cancel", "no such session", "--all").refuses(1, "penstock session ls")


def test_the_data_itself_is_looked_at_without_a_server(database_18: str, mock: MockProcess, tmp_path: Path) -> None:
    toml = tmp_path / "penstock.toml"
    where = ("--database-url", database_18, "--config", str(toml))
    toml.write_text("")
    unknown = run_cli("session", "send", "local", "hello", "--model", "m", *where, cwd=tmp_path)
    unknown.refuses(1, "served by none", "[[providers]]")
    toml.write_text(f'[[providers]]\nname = "mock"\nbase_url = "{mock.base_url}"\nmodels = ["*"]\n')
    sent = run_cli("session", "send", "local", "hello", "--model", "m", "--async", "--json", *where, cwd=tmp_path)
    assert sent.expect(0).summary["status"] == "pending"
    listed = run_cli("session", "ls", *where, cwd=tmp_path).expect(0)
    assert "local" in listed.stdout
    with served(tmp_path / "serve", "--config", toml, database=database_18):
        answered = run_cli(
            "session", "send", "local", "and again", "--model", "m", "--json", *where, cwd=tmp_path
        ).expect(0)
    assert (answered.summary["status"], answered.summary["sequence"]) == ("completed", 2)
