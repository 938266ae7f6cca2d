"""S15, S17: secrets and other people's data stay out of logs, error answers and command lines; the database holds no
key.

Every secret and every piece of data in here carries a mark of its own, so that it is known again wherever it turns up.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.api import keys
from penstock.db.embedded.cluster import LOG
from tests.support.batch_api import ENDPOINT
from tests.support.cli import request_line
from tests.support.dump import dumped
from tests.support.server import Answered
from tests.support.tenants import TenantGround, form, tenant_ground
from tests.support.wait import wait_until

PROVIDER_KEY = "sk-CANARY-provider-0123456789abcdef"
PASSWORD = "CANARY-password-0123456789"
SINK_SECRET = "CANARY-sink-secret-0123456789abcdef"
KEY_CACHE_S = 1.0
SINK = """
[[sinks]]
name = "all"
url = "http://127.0.0.1:9/sink"
secret_env = "CANARY_SINK"
requests = "all"
"""


@dataclass(slots=True)
class Upstream:
    """Whatever it is asked, it quotes what it was told: the request's body, and the key if anything is wrong."""

    base_url: str = ""
    calls: list[str] = field(default_factory=list)

    def answer(self, model: str, key: str, body: bytes) -> tuple[int, bytes]:
        self.calls.append(model)
        said = f"CANARY-upstream-{model} got {body.decode()}"
        if model != "good":  # good answers are kept to the byte
            said += f" with {key}"
        error = {"error": {"message": said, "type": "error", "code": "told", "param": None}}
        match model:
            case "refused":
                return 400, json.dumps(error).encode()
            case "failing":
                return 500, json.dumps(error).encode()
            case "garbled":
                return 200, said.encode() + b"\x00\xff"
            case "locked":
                return 401, json.dumps(error).encode()
            case _:
                return 200, json.dumps({"id": "CANARY-answer", "choices": [], "echo": said}).encode()


@contextmanager
def indiscreet_upstream() -> Iterator[Upstream]:
    upstream = Upstream()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, content = upstream.answer(json.loads(body)["model"], self.headers["authorization"], body)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.send_header("x-request-id", "CANARY-upstream-request")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        upstream.base_url = f"http://127.0.0.1:{server.server_port}/v1"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield upstream
        finally:
            server.shutdown()
            serving.join()


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with indiscreet_upstream() as upstream:
        yield upstream


@pytest.fixture
def ground(tmp_path: Path, server_18: str, upstream: Upstream) -> Iterator[TenantGround]:
    settings = {"max_attempts": 2, "retry_base_s": 0.01, "retry_cap_s": 0.05, "key_cache_s": KEY_CACHE_S}
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    secret = make_conninfo(server_18, password=PASSWORD)
    # The last --base-url counts.
    told = ("--base-url", upstream.base_url, "--api-key-env", "CANARY_KEY")
    config = tmp_path / "penstock.toml"
    config.write_text(SINK)
    env = {"CANARY_KEY": PROVIDER_KEY, "CANARY_SINK": SINK_SECRET}
    with tenant_ground(tmp_path, secret, *options, *told, "--config", config, env=env) as ground:
        yield ground


def lines(*models: str) -> bytes:
    wanted = (request_line(f"CANARY-id-{model}", f"CANARY-prompt-{model}", model) for model in models)
    return "".join(json.dumps(line) + "\n" for line in wanted).encode()


def in_processes(ground: TenantGround) -> str:
    """What everybody on the machine can see of the server's processes, but for the options the test gave itself."""
    own = psutil.Process(ground.server.process.pid)
    return json.dumps([child.cmdline() for child in own.children(recursive=True)])


def log_of_database(conninfo: str) -> str:
    """Of the server that other tests use too."""
    place = Path(str(conninfo_to_dict(conninfo)["host"]))
    found = next(folder / LOG for folder in (place, *place.parents) if (folder / LOG).exists())
    return found.read_text(errors="backslashreplace")


def test_no_log_tells_what_was_sent_or_answered(ground: TenantGround, upstream: Upstream, server_18: str) -> None:
    refused: list[Answered] = []
    logged_before = len(log_of_database(server_18))

    def wrong(tenant: str | None, *args: Any, **options: Any) -> Answered:
        answer = ground.ask(tenant, *args, **options)
        assert answer.status >= 400
        refused.append(answer)
        return answer

    # Keys that are none, in every place where one may be.
    for name, value in (
        ("authorization", "Bearer sk-CANARY-bearer-0123456789"),
        ("authorization", f"Bearer {ground.keys['bob']}CANARY"),
        ("authorization", "Basic CANARY-basic"),
        ("authorization", "CANARY-scheme"),
        ("x-api-key", "CANARY-x-api-key"),
        ("api-key", "CANARY-api-key"),
    ):
        assert wrong(None, "GET", "/v1/files", headers={name: value}).status == 401
        assert wrong(None, "GET", "/v1/messages/batches", headers={name: value}).status == 401
    # Queries and bodies, good and bad.
    for query in ("api_key=sk-CANARY-query", "metadata[CANARY-key]=CANARY-value", "token=CANARY-token"):
        ground.ok("alice", "GET", f"/v1/batches?{query}")
    wrong("alice", "GET", "/v1/batches?limit=CANARY-limit")
    wrong("alice", "GET", "/v1/files?after=CANARY-cursor")
    for body in ({"CANARY-field": 1}, {"metadata": {"CANARY": 1}}, {"endpoint": "CANARY-endpoint"}, b"CANARY{"):
        wrong("alice", "POST", "/v1/batches", body)
    wrong("alice", "POST", "/v1/messages/batches", {"requests": [{"custom_id": "CANARY/", "params": "CANARY"}]})
    content, kind = form({"purpose": "CANARY-purpose", "file": b"CANARY"}, "CANARY-name")
    wrong("alice", "POST", "/v1/files", content, headers={"content-type": kind})
    wrong("alice", "POST", "/v1/files", b"CANARY", headers={"content-type": "multipart/form-data; boundary=x"})
    wrong("alice", "POST", "/v1/files", b"CANARY", headers={"content-type": "CANARY/type"})
    # A batch whose upstream quotes everything, in good answers and bad.
    models = ("good", "refused", "failing", "garbled")
    batch_id = ground.start("alice", lines(*models), metadata={"CANARY-key": "CANARY-value"})
    batch = ground.until("alice", f"/v1/batches/{batch_id}", "status", "completed")
    assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
    for which in ("output_file_id", "error_file_id"):
        told = ground.ask("alice", "GET", f"/v1/files/{batch[which]}/content").content
        assert b"CANARY-upstream" in told
        assert PROVIDER_KEY.encode() not in told
    attempts = ground.ask("alice", "GET", f"/v1/batches/{batch_id}/attempts").content
    assert b"CANARY-upstream-failing" in attempts
    assert PROVIDER_KEY.encode() not in attempts
    # A file that is no JSON.
    bad = ground.start("alice", b'{"CANARY-line": \n')
    ground.until("alice", f"/v1/batches/{bad}", "status", "failed")
    # A webhook with a token in its address, which nobody answers.
    hook = {"event_types": ["batch.failed"], "name": "CANARY-hook", "url": "http://127.0.0.1:9/h?token=CANARY-url"}
    made = ground.ok("alice", "POST", "/v1/webhook_endpoints", hook)
    secret = made["signing_secret"]
    wrong("alice", "POST", f"/v1/webhook_endpoints/{made['id']}/test", {"event_type": "batch.failed"})
    wrong("alice", "POST", "/v1/webhook_endpoints", {**hook, "url": "ftp://CANARY-user:CANARY-pass@host/?CANARY"})
    failed = ground.start("alice", b'{"CANARY-line": \n')
    ground.until("alice", f"/v1/batches/{failed}", "status", "failed")
    deliveries = f"/v1/webhook_endpoints/{made['id']}/deliveries"
    wait_until(lambda: any(one["error"] for one in ground.ok("alice", "GET", deliveries)["data"]), 30)
    # The upstream stops the route; an operator is told why, but not by the log.
    locked = ground.start("alice", lines("locked"))
    wait_until(lambda: ground.ok("root", "GET", "/v1/providers")["data"][0]["gates"], 30)
    told = ground.ask("root", "GET", "/v1/providers").content
    assert b"CANARY-upstream-locked" in told
    assert f"(in answer to {locked})".encode() in told
    assert PROVIDER_KEY.encode() not in told
    ground.ok("alice", "POST", f"/v1/batches/{locked}/cancel")
    # Failures of the server itself, whose words hold whole rows.
    with psycopg.connect(ground.database, autocommit=True) as connection:
        for table in ("batches", "webhook_endpoints", "api_keys"):
            connection.execute(f"ALTER TABLE penstock.{table} ADD CONSTRAINT broken CHECK (false) NOT VALID".encode())
    asked = {"endpoint": ENDPOINT, "completion_window": "24h", "metadata": {"a": "CANARY-row"}}
    file_id = ground.put("alice", lines("good"))
    for tenant, path, sent in (
        ("alice", "/v1/batches", {**asked, "input_file_id": file_id}),
        ("alice", "/v1/webhook_endpoints", hook),
        ("root", "/v1/keys", {"owner": "CANARY-owner", "name": "CANARY-name"}),
    ):
        failed_answer = wrong(tenant, "POST", path, sent)
        assert failed_answer.status == 500
        assert b"CANARY" not in failed_answer.content
        assert failed_answer.headers["x-request-id"] in ground.server.log
    assert set(upstream.calls) == {*models, "locked"}

    said = ground.server.log
    hits = [line for line in said.splitlines() if "CANARY" in line]
    assert hits == []
    for hidden in (secret, secret.removeprefix("whsec_"), *ground.keys.values(), PROVIDER_KEY, PASSWORD):
        assert hidden not in said
        assert all(hidden.encode() not in answer.content for answer in refused)
    for answer in refused:
        if answer.status in (401, 403) or answer.status >= 500:
            assert b"CANARY" not in answer.content
    assert "CANARY" not in in_processes(ground)
    assert "CANARY" not in log_of_database(server_18)[logged_before:]


def test_quiet_servers_and_their_debts(ground: TenantGround) -> None:
    """What is refused at the door is not even worth its path's contents: a path is shown short and in ASCII."""
    ground.ask("alice", "GET", "/v1/files/" + "%0a%1b[31m" + "A" * 5_000)
    wait_until(lambda: "\\n" in ground.server.log, 10)
    assert "\x1b" not in ground.server.log
    assert "A" * 300 not in ground.server.log


# -- S15


def test_a_dump_of_the_database_opens_nothing(ground: TenantGround) -> None:
    made = ground.ok("root", "POST", "/v1/keys", {"owner": "carol", "expires_after_s": 3600})
    secrets = [*ground.keys.values(), made["key"]]
    for secret in secrets:
        assert ground.server.ask("GET", "/v1/files", key=secret).status == 200
    hook = {"event_types": ["batch.failed"], "name": "hook", "url": "http://127.0.0.1:9/h"}
    endpoint = ground.ok("alice", "POST", "/v1/webhook_endpoints", hook)
    rotated = {"keep_old_secret_active_for_24_hours": True}
    path = f"/v1/webhook_endpoints/{endpoint['id']}/rotate_secret"
    signing = [endpoint["signing_secret"], ground.ok("alice", "POST", path, rotated)["signing_secret"]]
    ground.ok("alice", "POST", ENDPOINT, {"model": "good", "messages": []}, headers={"x-session-id": "s"})
    dump = dumped(ground.database)
    assert b"sk-penstock-" in dump  # what is visible of them
    for text in signing:
        secret = base64.b64decode(text.removeprefix("whsec_"))
        for shape in (secret.hex(), text.removeprefix("whsec_")):
            assert shape.encode() not in dump
    for hidden in (PROVIDER_KEY, SINK_SECRET):
        for shape in (hidden, hidden.encode().hex()):
            assert shape.encode() not in dump
    for secret in secrets:
        visible = secret.rpartition("-")[0] if secret.count("-") == 3 else secret[:24]
        hidden = secret.removeprefix(visible)
        assert secret.encode() not in dump
        assert hidden.encode() not in dump
        digest = hashlib.sha256(secret.encode()).hexdigest()
        assert digest.encode() in dump
        # Not even the hash is a key.
        for value in (digest, f"{visible}-{digest}", visible, f"{visible}-"):
            assert ground.server.ask("GET", "/v1/files", key=value).status == 401


def test_a_revoked_key_is_refused_in_time(ground: TenantGround) -> None:
    made = ground.ok("root", "POST", "/v1/keys", {"owner": "carol"})

    def let_in() -> bool:
        return ground.server.ask("GET", "/v1/files", key=made["key"]).status == 200

    assert let_in()
    ground.ok("root", "POST", f"/v1/keys/{made['id']}/revoke")
    revoked_at = monotonic()

    def refused() -> bool:
        asked_at = monotonic()
        if let_in():
            assert asked_at - revoked_at <= KEY_CACHE_S
            return False
        return True

    wait_until(refused, 30)
    assert not let_in()


def test_keys_are_found_and_compared_by_their_hashes(ground: TenantGround) -> None:
    """A stored hash that belongs to another key, as a broken index would find it, opens nothing."""
    bob = ground.keys["bob"]
    with psycopg.connect(ground.database, autocommit=True) as connection:
        found = connection.execute("SELECT hash FROM penstock.api_keys WHERE owner = 'bob'").fetchall()
    assert found == [(keys.hash_of(bob),)]
    assert keys.hash_of(bob) != keys.hash_of(ground.keys["alice"])
    # All that a guesser sees of a key that is nearly right is that it is wrong.
    answers = [
        ground.server.ask("GET", "/v1/files", key=guess)
        for guess in (bob[:-1] + ("A" if bob[-1] != "A" else "B"), "sk-penstock-" + "A" * 12 + "-" + "B" * 32)
    ]
    assert len({(answer.status, answer.content) for answer in answers}) == 1
    assert asyncio.run(_named(ground.database)) == {"id", "owner", "name", "role", "prefix", "created_at"}


async def _named(database: str) -> set[str]:
    """The fields by which anybody could look at a key, once it has been made."""
    async with await psycopg.AsyncConnection.connect(database) as connection:
        (key,) = [key for key in await keys.list_keys(connection, None, 100) if key.owner == "bob"]
    return {name for name in key.__slots__ if getattr(key, name) is not None}
