"""S20 and S27: what slow senders, stalled readers and idle connections hold is bounded over all of them, and those with
a key are served beside them."""

from __future__ import annotations

import json
import resource
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.support.batch_api import jsonl
from tests.support.cli import PENSTOCK, slow_down_rows
from tests.support.jobs import post_job
from tests.support.jobs import table as table_of
from tests.support.server import Answered
from tests.support.tenants import TenantGround, form, tenant_ground
from tests.support.wait import wait_until

MIB = 1024 * 1024
CLIENTS = 60
BUDGET_MIB = 48
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[TenantGround]:
    settings = (f"max_connections={CLIENTS}", f"request_memory_bytes={BUDGET_MIB * MIB}", "linger_s=1")
    options = [part for setting in settings for part in ("--set", setting)]
    with tenant_ground(tmp_path_factory.mktemp("held"), server_18, *options, mock=(), workers=0) as ground:
        yield ground


def connect(ground: TenantGround) -> socket.socket:
    return socket.create_connection(("127.0.0.1", ground.server.port), timeout=30)


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the answer that comes next: head and body may come apart."""
    with HTTPResponse(connection) as response:
        response.begin()
        return response.status, response.read()


def large_body(ground: TenantGround, tenant: str, size: int) -> Answered:
    body = json.dumps({"model": "nobody's", "messages": ["x" * size]}).encode()
    return ground.ask(tenant, "POST", "/v1/chat/completions", body, headers={"content-type": "application/json"})


def test_slow_bodies_share_a_budget(ground: TenantGround) -> None:
    process = psutil.Process(ground.server.process.pid)
    before = process.memory_info().rss
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        f"content-length: {6 * MIB}\r\nx-api-key: {ground.keys['bob']}\r\n\r\n"
    ).encode()
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(ground)) for _ in range(25)]
        for connection in slow:
            with suppress(OSError):
                connection.sendall(head + b" " * (5 * MIB))
        # 125 MiB were sent, of which an owner alone may hold half of the budget.
        assert process.memory_info().rss - before < 2 * BUDGET_MIB * MIB
        assert large_body(ground, "alice", 2 * MIB).status == 400, "the upstream does not understand it"
        refused = 25 - BUDGET_MIB // 2 // 5
        wait_until(lambda: len(select.select(slow, [], [], 1)[0]) >= refused, DEADLINE_S)
        for connection in select.select(slow, [], [], 1)[0]:
            status, body = read_answer(connection)
            assert status == 503, body
            assert b"request_memory_used_up" in body
    # With the connections, the memory is free again.
    wait_until(lambda: large_body(ground, "bob", 6 * MIB).status == 400, DEADLINE_S)


@pytest.mark.parametrize(
    ("table", "way"),
    [
        ("files", "GET /v1/files"),
        ("gates", "POST /api/jobs/{job}/kickoff?durationMs=1"),
        ("journal_heads", "GET /v1/batches/{batch}/events?results=true&after={number}"),
    ],
    ids=["calls", "kickoffs", "readers-of-events"],
)
def test_calls_of_one_owner_leave_database_connections_to_others(ground: TenantGround, table: str, way: str) -> None:
    spec = {"processor": {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ sku }}"}}
    job = post_job(ground.server, table_of(3), spec, key=ground.keys["bob"]).json["jobId"]
    wait_until(lambda: bool(ground.ok("bob", "GET", f"/api/jobs/{job}")["ingest"]["done"]), DEADLINE_S)
    batch = ground.start("bob", jsonl(3))

    def request(number: int) -> bytes:
        what = way.format(job=job, batch=batch, number=number)
        return f"{what} HTTP/1.1\r\nhost: a\r\nx-api-key: {ground.keys['bob']}\r\n\r\n".encode()

    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ExitStack() as stack:
        blocker = stack.enter_context(psycopg.connect(ground.database))
        blocker.execute(f"LOCK TABLE penstock.{table}".encode())
        slow = [stack.enter_context(connect(ground)) for _ in range(20)]
        for number, connection in enumerate(slow):
            connection.sendall(request(number))
        # Inside the blocker's transaction the first look would be repeated for ever.
        watcher = stack.enter_context(psycopg.connect(ground.database, autocommit=True))
        wait_until(lambda: watcher.execute(waiting).fetchall() >= [(4,)], DEADLINE_S)
        for _ in range(3):
            assert ground.ask("alice", "GET", "/v1/sessions", timeout_s=DEADLINE_S).status == 200
        assert ground.ask(None, "GET", "/readyz", timeout_s=DEADLINE_S).status == 200
        blocker.rollback()
        if "events" not in way:  # which have no end
            assert {read_answer(connection)[0] for connection in slow} == {200}


def test_jobs_of_one_owner_leave_room_for_those_of_others(ground: TenantGround) -> None:
    spec = {"processor": {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ sku }}"}}

    def start(tenant: str, rows: int) -> str:
        answer = post_job(ground.server, table_of(rows), spec, key=ground.keys[tenant])
        assert answer.status == 200, answer.content
        return f"/api/jobs/{answer.json['jobId']}"

    with psycopg.connect(ground.database, autocommit=True) as connection:
        slow_down_rows(connection, 1)
        large = [start("bob", 8_000) for _ in range(8)]
        small = start("alice", 3)
        wait_until(lambda: bool(ground.ok("alice", "GET", small)["ingest"]["done"]), DEADLINE_S)
        done = [ground.ok("bob", "GET", each)["ingest"]["done"] for each in large]
        connection.execute("DROP FUNCTION penstock.wait CASCADE")
    assert done.count(True) < 4, "it would have waited for the first four"
    wait_until(lambda: all(ground.ok("bob", "GET", each)["ingest"]["done"] for each in large), DEADLINE_S)


def test_previews_that_one_owner_sends_slowly_leave_others_theirs(ground: TenantGround) -> None:
    body, kind = form({"file": table_of(3)}, "rows.csv")
    head = f"POST /api/jobs/preview HTTP/1.1\r\nhost: a\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
    with ExitStack() as stack:
        for _ in range(12):
            connection = stack.enter_context(connect(ground))
            connection.sendall(f"{head}x-api-key: {ground.keys['bob']}\r\n\r\n".encode() + body[:-1])
        seen = ground.ask("alice", "POST", "/api/jobs/preview", body, headers={"content-type": kind})
    assert seen.status == 200, seen.content
    assert len(seen.json["rows"]) == 3


@pytest.mark.parametrize("sent", [b"", b"GET /v1/files HTTP/1.1\r\nx-a: " + b"a" * 60_000], ids=["idle", "half-a-head"])
def test_strangers_leave_room_for_those_with_a_key(ground: TenantGround, sent: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(2 * CLIENTS):
            connection = stack.enter_context(connect(ground))
            with suppress(OSError):
                connection.sendall(sent)
        for _ in range(10):
            assert ground.ask("alice", "GET", "/v1/files").status == 200


def test_a_connection_that_has_shown_a_key_is_kept(ground: TenantGround) -> None:
    request = f"GET /v1/files HTTP/1.1\r\nhost: a\r\nx-api-key: {ground.keys['alice']}\r\n\r\n".encode()
    with ExitStack() as stack:
        known = stack.enter_context(connect(ground))
        for _ in range(3):
            known.sendall(request)
            assert read_answer(known)[0] == 200
            for _ in range(CLIENTS):
                stack.enter_context(connect(ground))


def test_connections_of_one_owner_leave_room_for_those_of_others(ground: TenantGround) -> None:
    request = f"GET /v1/files HTTP/1.1\r\nhost: a\r\nx-api-key: {ground.keys['alice']}\r\n\r\n".encode()
    with ExitStack() as stack:

        def told() -> tuple[int, bytes]:
            connection = stack.enter_context(connect(ground))
            connection.sendall(request)
            return read_answer(connection)

        answers = [told() for _ in range(CLIENTS + 5)]
        statuses = [status for status, _ in answers]
        assert statuses == sorted(statuses)
        assert 0.7 * CLIENTS < statuses.count(200) < 0.9 * CLIENTS, "alone, one may have most of them"
        assert (answers[-1][0], b"too_many_connections" in answers[-1][1]) == (503, True)
        for _ in range(3):
            assert ground.ask("bob", "GET", "/v1/files").status == 200
    wait_until(lambda: ground.ask("alice", "GET", "/v1/files").status == 200, DEADLINE_S)


UNFINISHED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\nx"


def test_strangers_that_are_being_answered_leave_room_for_those_with_a_key(tmp_path: Path, server_18: str) -> None:
    """What is refused is answered once its body has come, or after `linger_s`."""
    options = ("--set", f"max_connections={CLIENTS}", "--set", "linger_s=300")
    with ExitStack() as stack:
        ground = stack.enter_context(tenant_ground(tmp_path, server_18, *options, mock=(), workers=0))
        for _ in range(2 * CLIENTS):
            connection = stack.enter_context(connect(ground))
            with suppress(OSError):
                connection.sendall(UNFINISHED)
        for _ in range(10):
            assert ground.ask("alice", "GET", "/v1/files").status == 200
        # Where strangers crowd, they are answered at once.
        connection = stack.enter_context(connect(ground))
        connection.sendall(UNFINISHED)
        assert read_answer(connection)[0] == 401


DESCRIPTORS = 1_024


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * DESCRIPTORS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_more_strangers_than_descriptors_leave_some_to_the_server(tmp_path: Path, server_18: str) -> None:
    """Whoever has a key is served, with calls to the upstream, and the server lives on."""
    beats = "SELECT max(heartbeat_at) FROM penstock.workers"
    chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    quick = ("--set", "heartbeat_interval_s=0.2")
    with ExitStack() as stack:
        limited = ("/bin/sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *PENSTOCK)
        ground = stack.enter_context(tenant_ground(tmp_path, server_18, *quick, mock=(), program=limited))
        wait_until(lambda: "raise the limit (ulimit -n)" in ground.server.log, DEADLINE_S)
        for number in range(DESCRIPTORS + 100):
            connection = stack.enter_context(connect(ground))
            with suppress(OSError):
                connection.sendall((b"", UNFINISHED)[number % 2])
        for _ in range(10):
            assert ground.ask("alice", "POST", "/v1/chat/completions", chat).status == 200
        ground.until("alice", f"/v1/batches/{ground.start('alice', jsonl(20))}", "status", "completed")
        looking = stack.enter_context(psycopg.connect(ground.database, autocommit=True))
        before = looking.execute(beats).fetchall()
        wait_until(lambda: looking.execute(beats).fetchall() > before, DEADLINE_S)
        assert psutil.Process(ground.server.process.pid).num_fds() < DESCRIPTORS
    assert "Too many open files" not in ground.server.log
