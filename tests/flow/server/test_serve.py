"""The server as a process: how it starts, what it refuses, how it holds out and how it stops."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.cli import Finished, ask, call_count, check_agreement, run_cli, write_requests
from tests.support.mock_process import start_mock_process
from tests.support.processes import Processes
from tests.support.server import ServerProcess, served
from tests.support.thorough import thorough
from tests.support.wait import wait_until

# Requests of the batch that a stop meets.
UNDER_LOAD = 2_000 if thorough() else 800
NOWHERE = ("--base-url", "http://127.0.0.1:9/v1")
GET_HEALTH = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST_HEAD = (
    b"POST /v1/keys HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n"
)


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    """A server with nothing behind it, for all tests that leave it as it was."""
    with served(tmp_path_factory.mktemp("idle"), *NOWHERE, database=shared_database_18, workers=0) as server:
        yield server


def upload(server: ServerProcess, path: Path) -> str:
    answer = server.ask(
        "PUT", "/v1/files?purpose=batch&filename=in.jsonl", path.read_bytes(), headers={"content-type": "text/plain"}
    )
    assert answer.status == 200, answer.content
    found: str = answer.json["id"]
    return found


def start_batch(server: ServerProcess, path: Path) -> str:
    body = {"input_file_id": upload(server, path), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = server.ask("POST", "/v1/batches", body)
    assert answer.status == 200, answer.content
    found: str = answer.json["id"]
    return found


def batch_of(server: ServerProcess, batch_id: str) -> Any:
    return server.ask("GET", f"/v1/batches/{batch_id}").json


def finished(server: ServerProcess, batch_id: str, deadline_s: float = 60) -> Any:
    wait_until(lambda: batch_of(server, batch_id)["status"] in ("completed", "failed", "expired"), deadline_s)
    return batch_of(server, batch_id)


# -- start and stop


def test_it_brings_its_own_database_and_says_what_it_is(tmp_path: Path) -> None:
    with served(tmp_path, *NOWHERE) as server:
        for words in ("address", "embedded, in", "default  http://127.0.0.1:9/v1  *", "one user", "Ctrl-C"):
            assert words in server.log
        ready = server.ask("GET", "/readyz").json
        checks = dict.fromkeys(("database", "connections", "migrations", "disk"), "ok")
        assert ready == {"status": "ready", "checks": checks, "reasons": []}
        assert server.stop() == 0
        assert server.log.rstrip().endswith("stopped")
        assert "Traceback" not in server.log
    assert not (tmp_path / "data" / "pg" / "postmaster.pid").exists() or _stops(tmp_path / "data")


def _stops(data_dir: Path) -> bool:
    wait_until(lambda: not (data_dir / "pg" / "postmaster.pid").exists(), 30)
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_stops_it(tmp_path: Path, database_18: str, number: signal.Signals) -> None:
    with served(tmp_path, *NOWHERE, database=database_18) as server:
        wait_until(lambda: len(server.worker_pids) == 1, 30)
        os.killpg(server.process.pid, number)
        assert server.process.wait(30) == 0, server.log
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), ("no provider is configured", "--base-url")),
        (("--base-url", "ftp://x"), ("not an http",)),
        ((*NOWHERE, "--api-key-env", "NOT_SET"), ("NOT_SET", "is not set")),
        (("--base-url", "https://x/v1", "--ca-file", "missing.pem"), ("missing.pem cannot be read", "(ca_file)")),
        ((*NOWHERE, "--ca-file", "ca.pem"), ("--ca-file without an https://",)),
        ((*NOWHERE, "--proxy", "http://u:secret@h:1"), ("--proxy must not carry credentials", "penstock.toml")),
        ((*NOWHERE, "--root-path", "penstock"), ("--root-path", "is not a path")),
        ((*NOWHERE, "--public-url", "batch.example.org"), ("--public-url",)),
        ((*NOWHERE, "--host", "no.such.host.invalid"), ("no such address",)),
        ((*NOWHERE, "--database-url", "nonsense"), ("not the address of a PostgreSQL",)),
    ],
)
def test_it_refuses_to_start_with_a_reason(
    tmp_path: Path, database_18: str, args: tuple[str, ...], words: tuple[str, ...]
) -> None:
    where = () if "--database-url" in args else ("--database-url", database_18)
    run_cli("serve", "--port", "0", *where, *args, cwd=tmp_path).refuses(2, *words)


def test_keys_that_cannot_seal_are_found_at_the_start(tmp_path: Path, database_18: str) -> None:
    def refused(*args: str | Path, **env: str) -> Finished:
        return run_cli("serve", "--port", "0", *NOWHERE, "--database-url", database_18, *args, cwd=tmp_path, env=env)

    refused(PENSTOCK_SECRETS_KEY="garbage").refuses(2, "PENSTOCK_SECRETS_KEY: key 1 is not 32 bytes", "openssl")
    config = tmp_path / "named.toml"
    config.write_text(f'secrets_key_file = "{tmp_path}/none"\n')
    refused("--config", config).refuses(2, "secrets_key_file", "none")
    own = tmp_path / "data" / "secrets.key"
    own.parent.mkdir()
    own.write_text("garbage")
    refused("--data-dir", own.parent).refuses(2, "secrets.key: key 1 is not 32 bytes")


def test_a_bad_provider_is_named_with_its_place(tmp_path: Path, database_18: str) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('[[providers]]\nname = "a"\nbase_url = "http://127.0.0.1:9/v1"\nmodels = "gpt"\n')
    for args in (("--config", path), ("--data-dir", tmp_path)):
        refused = run_cli("serve", *args, "--database-url", database_18, cwd=tmp_path)
        refused.refuses(2, "penstock.toml: providers: entry 1 (a): models")
    path.write_text('[[providers]]\nname = "a"\nbase_url = "https://x/v1"\nmodels = ["*"]\nca_file = "penstock.toml"\n')
    refused = run_cli("serve", "--config", path, "--database-url", database_18, cwd=tmp_path)
    refused.refuses(2, "provider 'a': penstock.toml holds no certificate (ca_file)", "PEM")


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_database_that_fails_at_the_start_is_said(tmp_path: Path, database_18: str, command: str) -> None:
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute("DROP TABLE penstock.gates")
    where = ("--port", "0") if command == "serve" else ()
    failed = run_cli(command, *where, *NOWHERE, "--database-url", database_18, cwd=tmp_path)
    failed.refuses(1, "the database failed", "once the database works again")


def test_a_taken_port_is_said(tmp_path: Path, idle: ServerProcess, database_18: str) -> None:
    again = run_cli("serve", *NOWHERE, "--port", str(idle.port), "--database-url", database_18, cwd=tmp_path)
    again.refuses(1, "cannot listen", "in use")


# -- what is wrong is said in shape


def test_errors_have_the_shape_clients_read(idle: ServerProcess) -> None:
    json_type = {"content-type": "application/json"}
    for method, path, body, headers, status in (
        ("GET", "/nowhere", None, {}, 404),
        ("GET", "/v1/files/file-%ff%00", None, {}, 400),
        ("GET", "/v1/files/file-%00", None, {}, 404),
        ("GET", "/v1//files", None, {}, 404),
        ("PATCH", "/v1/keys", None, {}, 405),
        ("TRACE", "/v1/keys", None, {}, 405),
        ("POST", "/v1/keys", b"{", json_type, 400),
        ("POST", "/v1/keys", b"", json_type, 400),
        ("POST", "/v1/keys", b"\xff\xfe", json_type, 400),
        ("POST", "/v1/keys", b"[" * 50_000, json_type, 400),
        ("POST", "/v1/keys", b'{"owner": "a", "tenant_id": 3}', json_type, 422),
        ("POST", "/v1/keys", b"owner=a", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/v1/keys", b'{"owner": "' + b"a" * 9_000_000 + b'"}', json_type, 413),
        ("GET", "/v1/keys?limit=many", None, {}, 400),
    ):
        answer = idle.ask(method, path, body, headers=headers)
        assert answer.status == status, (method, path, answer)
        assert list(answer.json["error"]) == ["message", "type", "param", "code"]
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"].startswith("req_")
    other = idle.ask("GET", "/v1/messages/nowhere")
    assert other.json["error"]["type"] == "not_found_error"


def test_head_and_options_are_answered(idle: ServerProcess) -> None:
    got, head = idle.ask("GET", "/v1/models"), idle.ask("HEAD", "/v1/models")
    assert (head.status, head.content) == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]
    options = idle.ask("OPTIONS", "/v1/models")
    assert (options.status, options.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    assert idle.ask("POST", "/v1/models").headers["allow"] == "GET, HEAD, OPTIONS"


def test_a_connection_serves_many_requests_also_after_refusals(idle: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", idle.port), 10) as client:
        stream = client.makefile("rb")
        for _ in range(3):
            client.sendall(b"POST /v1/keys HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n[]")
            assert _read_answer(stream) == 400
            client.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert _read_answer(stream) == 200


def _read_answer(stream: Any) -> int:
    status = int(stream.readline().split()[1])
    length = 0
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    stream.read(length)
    return status


# -- slow and greedy clients


def test_slow_clients_are_cut_off_and_others_served(tmp_path: Path, database_18: str) -> None:
    tight = ("head_timeout_s=1", "body_idle_timeout_s=1", "keep_alive_s=1", "max_head_bytes=8192")
    settings = [word for setting in tight for word in ("--set", setting)]
    with served(tmp_path, *NOWHERE, *settings, database=database_18, workers=0) as server:

        def opened(data: bytes) -> socket.socket:
            client = socket.create_connection(("127.0.0.1", server.port), 10)
            client.sendall(data)
            return client

        began = monotonic()
        idlers = [opened(b"") for _ in range(50)]
        slow_heads = [opened(b"GET /v1/models HTTP/1.1\r\nhost: loc") for _ in range(50)]
        slow_body = opened(POST_HEAD)
        assert server.ask("GET", "/v1/models").status == 200
        for client in (*idlers, *slow_heads):
            with client:
                assert client.recv(100) == b""
        with slow_body:
            assert b" 408 " in slow_body.recv(1000)
        kept = opened(GET_HEALTH)
        with kept, kept.makefile("rb") as stream:
            assert _read_answer(stream) == 200
            assert stream.read() == b""
        with opened(b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * 100_000) as large:
            assert b" 431 " in large.recv(1000)
        assert monotonic() - began < 30


def test_line_ends_do_not_keep_a_connection_open(tmp_path: Path, database_18: str) -> None:
    settings = ("--set", "head_timeout_s=1", "--set", "keep_alive_s=1")
    with (
        served(tmp_path, *NOWHERE, *settings, database=database_18, workers=0) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as client,
        client.makefile("rb") as stream,
    ):
        client.sendall(GET_HEALTH)
        assert _read_answer(stream) == 200
        client.sendall(b"\r\n")
        assert stream.read() == b""


def test_half_a_request_behind_another_does_not_cut_that_one_short(tmp_path: Path, database_18: str) -> None:
    settings = ("--set", "head_timeout_s=1")
    with served(tmp_path, *NOWHERE, *settings, database=database_18, workers=0) as server:
        asked = {"endpoint": "/v1/chat/completions", "body": {"model": "m", "messages": []}}
        prefer = {"prefer": "respond-async"}
        sent = server.ask("POST", "/v1/sessions/s/requests", asked, headers=prefer)
        assert sent.status == 202, sent.content
        path = f"/v1/sessions/s/requests/{sent.json['id']}?wait=3"
        with (
            socket.create_connection(("127.0.0.1", server.port), 10) as client,
            client.makefile("rb") as stream,
        ):
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\nGET /healthz HT".encode())
            assert _read_answer(stream) == 200
            assert stream.read() == b""


def test_a_body_is_not_counted_as_the_next_head(tmp_path: Path, database_18: str) -> None:
    settings = ("--set", "max_head_bytes=8192")
    with (
        served(tmp_path, *NOWHERE, *settings, database=database_18, workers=0) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as client,
        client.makefile("rb") as stream,
    ):
        body = b'{"model": "%b"}' % (b"x" * 50_000)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body + GET_HEALTH[:20])
        assert _read_answer(stream) == 400
        client.sendall(GET_HEALTH[20:])
        assert _read_answer(stream) == 200


def test_a_body_that_trickles_is_cut_off(tmp_path: Path, database_18: str) -> None:
    settings = ("--set", "body_idle_timeout_s=1", "--set", "body_min_bytes_per_s=1000")
    with (
        served(tmp_path, *NOWHERE, *settings, database=database_18, workers=0) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as client,
    ):
        client.sendall(POST_HEAD)
        client.settimeout(0.2)
        answer = b""
        end = monotonic() + 20
        while not answer and monotonic() < end:
            client.sendall(b" ")
            try:
                answer = client.recv(1000)
            except TimeoutError:
                continue
        assert b" 408 " in answer


def test_a_client_that_does_not_read_is_left(tmp_path: Path, database_18: str) -> None:
    settings = ("--set", "send_timeout_s=0.5")
    with served(tmp_path, *NOWHERE, *settings, database=database_18, workers=0) as server:
        stored = server.ask("PUT", "/v1/files?purpose=user_data&filename=large", os.urandom(32_000_000))
        assert stored.status == 200, stored.content
        path = f"/v1/files/{stored.json['id']}/content"
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            wait_until(lambda: f" 200- GET {path}" in server.log, 30)
        assert len(server.ask("GET", path).content) == 32_000_000


# -- the description


def test_the_description_is_sound_and_complete(idle: ServerProcess) -> None:
    import jsonschema_rs
    import schemathesis

    described = idle.ask("GET", "/openapi.json").json
    assert described["openapi"].startswith("3.1")
    schemathesis.openapi.from_dict(described).validate()
    names = [operation["operationId"] for path in described["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))
    for schema in described["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    for reference in _references(described):
        found: Any = described
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            variables = {part[1:-1] for part in path.split("/") if part.startswith("{")}
            told = {entry["name"] for entry in operation.get("parameters", []) if entry["in"] == "path"}
            assert variables == told, (method, path)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for entry in value.values():
            yield from _references(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _references(entry)


# -- behind a proxy


def test_it_can_live_below_a_path(tmp_path: Path, database_18: str) -> None:
    public = "https://batch.example.org/penstock"
    args = ("--root-path", "/penstock", "--public-url", public)
    with served(tmp_path, *NOWHERE, *args, database=database_18, workers=0) as server:
        assert server.url.endswith("/penstock")
        assert server.ask("GET", "/v1/models").status == 200
        described = server.ask("GET", "/openapi.json").json
        assert described["servers"] == [{"url": public}]
        stripped = ServerProcess(server.process)
        stripped.url = server.url.removesuffix("/penstock")
        assert stripped.ask("GET", "/v1/models").status == 200
        assert stripped.ask("GET", "/penstocks/v1/models").status == 404
        assert stripped.ask("GET", "/v1/models", headers={"host": "batch.example.org"}).status == 200
        assert stripped.ask("GET", "/other/v1/models", headers={"x-forwarded-prefix": "/other"}).status == 404


def test_a_proxys_prefix_counts_only_if_trusted(tmp_path: Path, database_18: str) -> None:
    with served(tmp_path, *NOWHERE, "--forwarded-prefix", database=database_18, workers=0) as server:
        assert server.ask("GET", "/a/b/v1/models", headers={"x-forwarded-prefix": "/a/b"}).status == 200
        described = server.ask("GET", "/openapi.json", headers={"x-forwarded-prefix": "/a/b"}).json
        assert described["servers"] == [{"url": "/a/b"}]
        for wrong in ("//evil.example", "/a?b", "https://evil.example", "/<script>"):
            described = server.ask("GET", "/openapi.json", headers={"x-forwarded-prefix": wrong}).json
            assert described["servers"] == [{"url": "/"}], wrong


# -- faults


def test_a_database_that_is_away_is_said_and_comes_back(tmp_path: Path, server_18: str, database_18: str) -> None:
    settings = ("--set", "connect_wait_s=1")
    with served(tmp_path, *NOWHERE, *settings, database=database_18, workers=0) as server:
        name = sql.Identifier(str(conninfo_to_dict(database_18)["dbname"]))
        with psycopg.connect(server_18, autocommit=True) as connection:
            connection.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS false").format(name))
            try:
                theirs = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                connection.execute(theirs, [conninfo_to_dict(database_18)["dbname"]])
                wait_until(lambda: server.ask("GET", "/readyz").status == 503, 30)
                answer = server.ask("GET", "/v1/keys")
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert server.ask("GET", "/healthz").status == 200
            finally:
                connection.execute(sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS true").format(name))
        wait_until(lambda: server.ask("GET", "/readyz").status == 200, 60)
        wait_until(lambda: server.ask("GET", "/v1/keys").status == 200, 30)
        assert "Traceback" not in server.log


def test_nothing_of_a_request_is_logged(tmp_path: Path, database_18: str) -> None:
    canary = "CANARY0123456789"
    json_type = {"content-type": "application/json"}
    with served(tmp_path, *NOWHERE, database=database_18, workers=0) as idle:
        idle.ask("GET", f"/v1/models?key={canary}", headers={"authorization": f"Bearer {canary}", "x-api-key": canary})
        idle.ask("GET", f"/v1/files?purpose={canary}&after={canary}", headers={"cookie": canary})
        idle.ask("POST", "/v1/keys", {"owner": f"{canary}\u0000"})
        idle.ask("POST", "/v1/batches", {"input_file_id": canary, "endpoint": canary, "metadata": {canary: canary}})
        idle.ask(
            "POST", "/v1/files", canary.encode(), headers={"content-type": f"multipart/form-data; boundary={canary}"}
        )
        idle.ask("POST", "/v1/messages/batches", canary.encode(), headers=json_type)
        idle.ask("PUT", f"/v1/files?filename={canary}&purpose=batch", f'{{"custom_id": "{canary}"}}'.encode())
        with socket.create_connection(("127.0.0.1", idle.port), 10) as client:
            client.sendall(f"GET /{canary}?{canary} HTTP/9.9\r\n{canary}\r\n\r\n".encode())
            client.recv(1000)
        idle.stop()
        assert canary not in idle.log
        assert "/v1/models" in idle.log


# -- work


def test_requests_go_to_the_provider_of_their_model(tmp_path: Path, database_18: str) -> None:
    with start_mock_process("--require-key", "key-of-one") as one, start_mock_process() as two:
        (tmp_path / "penstock.toml").write_text(
            f"""
[[providers]]
name = "one"
base_url = "{one.base_url}"
models = ["alpha-*", "mock-c*"]
api_key_env = "ONE_KEY"
max_concurrency = 3
[[providers]]
name = "two"
base_url = "{two.base_url}"
models = ["beta", "gamma"]
"""
        )
        path = write_requests(tmp_path / "in.jsonl", 30, ("alpha-1", "beta", "alpha-2"))
        config = ("--config", tmp_path / "penstock.toml")
        with served(tmp_path, *config, database=database_18, workers=2, env={"ONE_KEY": "key-of-one"}) as server:
            # Those that are named, and what a provider lists of those that a pattern allows.
            models = [model["id"] for model in server.ask("GET", "/v1/models").json["data"]]
            assert models == ["beta", "gamma", "mock-chat"]
            batch = finished(server, start_batch(server, path))
            assert batch["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
            assert (call_count(one), call_count(two)) == (20, 10)
            strange = write_requests(tmp_path / "strange.jsonl", 3, ("delta",))
            failed = finished(server, start_batch(server, strange))
            assert failed["status"] == "failed"
            assert {error["code"] for error in failed["errors"]["data"]} == {"model_not_found"}
            assert "key-of-one" not in server.log


def test_it_works_behind_a_pooler(tmp_path: Path, pooler: str, database_18: str) -> None:
    conninfo = make_conninfo(pooler, dbname=conninfo_to_dict(database_18)["dbname"])
    path = write_requests(tmp_path / "in.jsonl", 50)
    with (
        start_mock_process() as mock,
        served(tmp_path, "--base-url", mock.base_url, database=conninfo, workers=1) as server,
    ):
        assert finished(server, start_batch(server, path))["request_counts"]["completed"] == 50


def test_a_dead_worker_is_replaced_and_nothing_is_lost(tmp_path: Path, database_18: str) -> None:
    path = write_requests(tmp_path / "in.jsonl", 400)
    with (
        start_mock_process("--latency", "50ms") as mock,
        served(tmp_path, "--base-url", mock.base_url, "--set", "concurrency=8", database=database_18) as server,
    ):
        batch_id = start_batch(server, path)
        wait_until(lambda: call_count(mock) > 20, 30)
        (killed,) = server.worker_pids
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: server.worker_pids not in ([], [killed]), 30)
        assert finished(server, batch_id)["request_counts"] == {"total": 400, "completed": 400, "failed": 0}
    with psycopg.connect(database_18) as connection:
        check_agreement(connection)


def test_a_stop_under_load_finishes_what_is_under_way(tmp_path: Path, database_18: str) -> None:
    path = write_requests(tmp_path / "in.jsonl", UNDER_LOAD)
    with start_mock_process("--latency", "100ms..300ms") as mock:
        with served(tmp_path, "--base-url", mock.base_url, "--set", "concurrency=16", database=database_18) as server:
            batch_id = start_batch(server, path)
            wait_until(lambda: call_count(mock) > 50, 30)
            assert server.stop(20) == 0, server.log
        with psycopg.connect(database_18, autocommit=True) as connection:
            assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0
            assert ask(connection, "SELECT count(*) FROM penstock.reclaims") == 0
            assert ask(connection, "SELECT count(*) FROM penstock.workers") == 0
            settled = ask(connection, "SELECT count(*) FROM penstock.outcomes")
            check_agreement(connection)
        assert settled == call_count(mock), "a call was made whose answer nobody kept"
        with served(tmp_path, "--base-url", mock.base_url, "--set", "concurrency=200", database=database_18) as server:
            assert finished(server, batch_id)["request_counts"]["completed"] == UNDER_LOAD
        assert call_count(mock) == UNDER_LOAD


def test_a_second_signal_cuts_calls_short(tmp_path: Path, database_18: str) -> None:
    path = write_requests(tmp_path / "in.jsonl", 16)
    with (
        start_mock_process("--hang-rate", "1") as mock,
        served(tmp_path, "--base-url", mock.base_url, database=database_18) as server,
    ):
        start_batch(server, path)
        wait_until(lambda: call_count(mock) == 16, 30)
        server.process.terminate()
        wait_until(lambda: "finishes first (again" in server.log, 10)
        began = monotonic()
        assert server.stop(20) == 0
        assert monotonic() - began < 15
    with psycopg.connect(database_18) as connection:
        assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0


def test_workers_alone_serve_a_server_without(tmp_path: Path, database_18: str) -> None:
    path = write_requests(tmp_path / "in.jsonl", 40)
    with (
        start_mock_process() as mock,
        served(tmp_path, "--base-url", mock.base_url, database=database_18, workers=0) as server,
        Processes(tmp_path) as processes,
    ):
        batch_id = start_batch(server, path)
        wait_until(lambda: batch_of(server, batch_id)["status"] == "in_progress", 20)
        worker = processes.penstock(
            "worker", "worker", "--base-url", mock.base_url, "--workers", "2", "--database-url", database_18
        )
        assert finished(server, batch_id)["request_counts"]["completed"] == 40
        worker.terminate()
        assert worker.wait(30) == 0, worker.tail()
