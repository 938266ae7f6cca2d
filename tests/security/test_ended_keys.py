"""S28: a key that is revoked, or expires, ends what it had open: streams, long polls, waits for an answer."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.support.batch_api import ENDPOINT
from tests.support.cli import request_line
from tests.support.hostile import Exchange, Upstream
from tests.support.recorder import Recorder, recording
from tests.support.tcp_server import LoopThread
from tests.support.tenants import TenantGround, form, tenant_ground
from tests.support.wait import wait_until

KEY_CACHE_S = 1.0
# Much longer than it takes, much shorter than what is waited for here lasts.
DEADLINE_S = 40.0
CHUNK = b"1\r\n\n\r\n"


@dataclass(frozen=True, slots=True)
class Place:
    ground: TenantGround
    upstream: Recorder

    def new_key(self) -> tuple[str, str]:
        made = self.ground.ok("root", "POST", "/v1/keys", {"owner": "alice"})
        return made["id"], made["key"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[Place]:
    with recording() as upstream:
        options = ("--base-url", upstream.base_url, "--set", f"key_cache_s={KEY_CACHE_S}")
        with tenant_ground(tmp_path_factory.mktemp("ended"), server_18, *options) as ground:
            yield Place(ground, upstream)


class Open:
    """A request under way."""

    def __init__(self, port: int, key: str, method: str, path: str, body: Any = None, **headers: str) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        sent = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        self._connection.request(method, path, None if body is None else json.dumps(body), sent)

    def close(self) -> None:
        self._connection.close()

    def answer(self) -> HTTPResponse:
        return self._connection.getresponse()


def end_key(ground: TenantGround, key_id: str, ended_by: str) -> None:
    if ended_by == "revoked":
        ground.ok("root", "POST", f"/v1/keys/{key_id}/revoke")
        return
    with psycopg.connect(ground.database, autocommit=True) as connection:
        expire = "UPDATE penstock.api_keys SET expires_at = now() WHERE id = %s"
        assert connection.execute(expire, (key_id.removeprefix("key_"),)).rowcount == 1


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "small", "messages": [{"role": "user", "content": text}], **fields}


@contextmanager
def held_batch(place: Place, name: str) -> Iterator[str]:
    """A batch whose one line is under way for the length of the block."""
    line = request_line("1", f"hold {name} batch", "small")
    batch_id = place.ground.start("alice", json.dumps(line).encode() + b"\n")
    place.upstream.wait_called(f"hold {name} batch")
    yield batch_id
    place.upstream.release(name)


@pytest.mark.parametrize("ended_by", ["revoked", "expired"])
def test_what_an_ended_key_has_open_ends(place: Place, ended_by: str) -> None:
    ground, name = place.ground, f"n{uuid4().hex[:8]}"
    key_id, key = place.new_key()
    with ExitStack() as stack:
        batch_id = stack.enter_context(held_batch(place, name))

        def opened(with_key: str, *args: Any, **headers: str) -> Open:
            return stack.enter_context(closing(Open(ground.server.port, with_key, *args, **headers)))

        begin = partial(opened, key)
        other = opened(ground.keys["alice"], "GET", f"/v1/batches/{batch_id}/events")
        streams = [
            begin("GET", f"/v1/batches/{batch_id}/events?results=true"),
            begin("POST", ENDPOINT, asking(f"hold {name} direct", stream=True)),
            begin("POST", ENDPOINT, asking(f"hold {name} session", stream=True), x_session_id=f"{name}-a"),
        ]
        answers = [stack.enter_context(stream.answer()) for stream in [*streams, other]]
        assert [answer.status for answer in answers] == [200] * 4
        waits = [
            begin("GET", f"/v1/batches/{batch_id}?wait=60"),
            begin("POST", ENDPOINT, asking(f"hold {name} plain"), x_session_id=f"{name}-b"),
        ]
        place.upstream.wait_called(f"hold {name} plain")
        end_key(ground, key_id, ended_by)
        for wait in waits:
            with wait.answer() as refused:
                assert refused.status == 401
                assert json.loads(refused.read())["error"]["code"] == "invalid_api_key"
        for answer in answers[:-1]:
            with pytest.raises(IncompleteRead):  # cut: without an end, nobody takes it for a whole answer
                answer.read()
        assert " ERROR " not in ground.server.log
        # The owner's other key is none of it, nor is what was asked: the requests go on.
        place.upstream.release(name)
        assert answers[-1].read().rstrip().rpartition(b"\n\n")[2].startswith(b"event: done")
        for session in (f"{name}-a", f"{name}-b"):
            (request,) = ground.ok("alice", "GET", f"/v1/sessions/{session}/requests")["data"]
            path = f"/v1/sessions/{session}/requests/{request['id']}?wait=30"
            assert ground.ok("alice", "GET", path)["status"] == "completed"


def test_an_upload_under_way_ends(place: Place) -> None:
    ground = place.ground
    key_id, key = place.new_key()
    before = len(ground.ok("alice", "GET", "/v1/files")["data"])
    with closing(HTTPConnection("127.0.0.1", ground.server.port, timeout=DEADLINE_S)) as connection:
        connection.putrequest("PUT", "/v1/files?purpose=batch&filename=f.jsonl")
        for name, value in (
            ("authorization", f"Bearer {key}"),
            ("content-type", "text/plain"),
            ("transfer-encoding", "chunked"),
        ):
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(CHUNK)
        ground.ok("root", "POST", f"/v1/keys/{key_id}/revoke")
        assert answer_while_sending(connection.sock) == b"HTTP/1.1 401"
    assert len(ground.ok("alice", "GET", "/v1/files")["data"]) == before


def answer_while_sending(sock: socket.socket) -> bytes:
    """How the answer begins that comes while pieces of a body are sent."""
    until = monotonic() + DEADLINE_S
    while monotonic() < until:
        sock.sendall(CHUNK)
        if select.select([sock], [], [], 0.1)[0]:
            return sock.recv(12)
    return b""


async def silent(exchange: Exchange) -> None:
    await exchange.client_leaves()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_that_is_not_answered_yet_ends(tmp_path: Path, server_18: str, stream: bool) -> None:
    """Also at the provider, where it holds one of the slots."""
    with ExitStack() as stack:
        thread = stack.enter_context(LoopThread("silent upstream"))
        upstream = stack.enter_context(thread.entered(Upstream({ENDPOINT: silent})))
        options = ("--base-url", upstream.base_url, "--set", f"key_cache_s={KEY_CACHE_S}")
        ground = stack.enter_context(tenant_ground(tmp_path, server_18, *options, workers=0))
        call = stack.enter_context(
            closing(Open(ground.server.port, ground.keys["alice"], "POST", ENDPOINT, asking("hi", stream=stream)))
        )
        wait_until(lambda: len(upstream.received) == 1, DEADLINE_S)
        end_key(ground, ground.key_ids["alice"], "revoked")
        with call.answer() as refused:
            assert refused.status == 401
            assert json.loads(refused.read())["error"]["code"] == "invalid_api_key"
        wait_until(lambda: upstream.open_connections == 0, DEADLINE_S)


def test_a_kickoff_ends(place: Place) -> None:
    ground, name = place.ground, f"n{uuid4().hex[:8]}"
    key_id, key = place.new_key()
    processor = {"type": "chat", "provider": "default", "model": "small", "prompt": f"hold {name} {{{{ a }}}}"}
    content, kind = form({"spec": json.dumps({"processor": processor}), "file": b"a\n1\n"}, "rows.csv")
    job = ground.ok("alice", "POST", "/api/jobs", content, headers={"content-type": kind})["jobId"]
    place.upstream.wait_called(f"hold {name} 1")
    with closing(Open(ground.server.port, key, "POST", f"/api/jobs/{job}/kickoff?durationMs=60000")) as kickoff:
        end_key(ground, key_id, "revoked")
        with kickoff.answer() as refused:
            assert refused.status == 401
    place.upstream.release(name)
    ground.until("alice", f"/api/jobs/{job}", "state", "DONE")
