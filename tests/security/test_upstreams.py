"""S26, and upstreams that answer nonsense: what one tenant, or an upstream, can do to a tenant by way of the provider
that all of them share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from typing import Any
from uuid import uuid4

import pytest

from tests.support.batch_api import ENDPOINT
from tests.support.cli import request_line
from tests.support.hostile import Exchange, Script, Upstream, answer, message, raw
from tests.support.server import Answered
from tests.support.tcp_server import LoopThread
from tests.support.tenants import TenantGround, tenant_ground
from tests.support.wait import wait_until

PROVIDER_KEY = "sk-CANARY/provider-0123456789abcdef"
HTML = b"<html><script>alert(1)</script></html>"
JSON_TYPE = {"content-type": "application/json"}
SEMI_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def echo(exchange: Exchange) -> None:
    """Good answer that repeats everything it was sent, in its body and its headers."""
    told = json.dumps({"id": "x", "got": exchange.request.headers}).replace("/", "\\/").encode()
    key = exchange.request.headers["authorization"]
    headers = {"content-type": "application/json", "x-request-id": f"id-{key}", "x-ratelimit-note": key}
    await exchange.send(message(200, told, headers))


async def echo_stream(exchange: Exchange) -> None:
    """Stream that repeats the key in its type, and in pieces of a few bytes."""
    key = exchange.request.headers["authorization"].encode()
    await exchange.send(SEMI_STREAM.replace(b"stream\r\n", b"stream; k=" + key + b"\r\n"))
    content = f'data: {{"key": "{exchange.request.headers["authorization"]}"}}\n\n'.encode()
    for at in range(0, len(content), 7):
        piece = content[at : at + 7]
        await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    await exchange.send(b"0\r\n\r\n")


async def echo_error(exchange: Exchange) -> None:
    """Error that repeats the key, escaped as JSON may be."""
    told = json.dumps({"error": {"message": exchange.request.headers["authorization"]}}).replace("/", "\\/")
    await exchange.send(message(400, told.encode(), JSON_TYPE))


def with_status(status: str) -> Script:
    return raw(f"HTTP/1.1 {status} Odd\r\ncontent-length: 2\r\n\r\n{{}}".encode())


SCRIPTS: Mapping[str, Script] = {
    "html": answer(200, HTML, {"content-type": "text/html"}),
    "many": answer(200, b"{}", {f"x-ratelimit-{n}": "1" for n in range(10_000)} | JSON_TYPE),
    "long-name": answer(200, b"{}", {"x-ratelimit-" + "a" * 50_000: "1"} | JSON_TYPE),
    "wide": answer(200, b"{}", {"content-type": "application/json; " + "x" * 200_000}),
    "wide-stream": raw(
        SEMI_STREAM.replace(b"event-stream", b"event-stream; " + b"x" * 200_000) + b"4\r\n:x\n\n\r\n0\r\n\r\n"
    ),
    "deep": answer(200, b'{"a":' * 900 + b'"' + b"x" * 900 + b'"' + b"}" * 900, JSON_TYPE),
    "half": answer(200, b'{"a": "' + b"x" * 900 + b'\\ud83d"}', JSON_TYPE),
    "locked": answer(401, b'{"error": {"code": "invalid_api_key", "message": "CANARY of the request"}}', JSON_TYPE),
    "busy": answer(429, b'{"error": {"code": "slow_down", "message": "CANARY"}}', {"retry-after": "600", **JSON_TYPE}),
    "echo": echo,
    "echo-stream": echo_stream,
    "echo-error": echo_error,
    "list": answer(200, HTML, {"content-type": "application/json, text/html"}),
    "rss": answer(200, HTML, {"content-type": "application/rss+xml"}),
    "xsl": answer(200, HTML, {"content-type": "text/xsl"}),
    "script": answer(200, HTML, {"content-type": "application/javascript"}),
    "parts": answer(200, HTML, {"content-type": "multipart/x-mixed-replace; boundary=x"}),
    "list-stream": raw(SEMI_STREAM.replace(b"event-stream", b"event-stream, text/html") + b"4\r\n:x\n\n\r\n0\r\n\r\n"),
    **{f"status-{status}": with_status(status) for status in ("000", "099", "600", "777", "999")},
}


@dataclass(frozen=True, slots=True)
class Place:
    ground: TenantGround
    upstream: Upstream

    def chat(self, tenant: str, model: str, *, session: str | None = None, **options: Any) -> Answered:
        """One call as the official client makes it; with a session, in its order."""
        headers = dict(options.pop("headers", {})) | ({"x-session-id": session} if session else {})
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **options}
        return self.ground.ask(tenant, "POST", ENDPOINT, body, headers=headers)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[Place]:
    async def serve(exchange: Exchange) -> None:
        await SCRIPTS.get(json.loads(exchange.request.body)["model"], echo)(exchange)

    settings = {"max_attempts": 2, "retry_base_s": 0.01, "retry_cap_s": 0.05}
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with LoopThread("odd upstream") as thread, thread.entered(Upstream({ENDPOINT: serve})) as upstream:
        told = ("--base-url", upstream.base_url, "--api-key-env", "PROVIDER_KEY")
        directory = tmp_path_factory.mktemp("upstreams")
        with tenant_ground(directory, server_18, *options, *told, env={"PROVIDER_KEY": PROVIDER_KEY}) as ground:
            yield Place(ground, upstream)


@pytest.fixture
def session() -> str:
    return f"s-{uuid4().hex[:12]}"


# -- keys that leave


def test_an_idempotency_key_is_its_owners_alone(place: Place) -> None:
    place.upstream.received.clear()
    chosen = {"idempotency-key": "order-17"}
    for tenant in ("alice", "bob", "alice"):
        assert place.chat(tenant, "echo", headers=chosen).status == 200
    sent = [request.headers["idempotency-key"] for request in place.upstream.received]
    assert sent[0] == sent[2]  # so that an upstream that honours it answers a repeated call once
    assert sent[0] != sent[1]
    assert "order-17" not in sent
    # Nor can a tenant choose what another's key becomes, or what a stored request is called under.
    assert place.chat("bob", "echo", headers={"idempotency-key": sent[0]}).status == 200
    assert place.upstream.received[-1].headers["idempotency-key"] not in sent


def test_an_idempotency_key_that_cannot_be_one_is_refused(place: Place) -> None:
    refused = place.chat("alice", "echo", headers={"idempotency-key": "x" * 5_000})
    assert (refused.status, refused.json["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("name", ["accept", "openai-beta", "anthropic-beta", "anthropic-version"])
def test_a_header_that_cannot_be_passed_on_is_its_callers_mistake(place: Place, name: str) -> None:
    for stream in (False, True):
        refused = place.chat("alice", "echo", stream=stream, headers={name: "\xff"})
        assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_request")


# -- answers that are none


def test_a_failed_request_is_never_answered_like_a_good_one(place: Place, session: str) -> None:
    for options in ({}, {"stream": True}):
        failed = place.chat("alice", "html", session=session, **options)
        assert (failed.status, failed.json["error"]["code"]) == (502, "invalid_response")
        again = place.ground.ok("alice", "GET", f"/v1/sessions/{session}/requests")["data"][-1]
        assert (again["status"], again["error"]["code"]) == ("failed", "invalid_response")


@pytest.mark.parametrize("status", ["000", "099", "600", "777", "999"])
def test_a_status_that_is_none_is_an_error_like_any_other(place: Place, session: str, status: str) -> None:
    ways: list[Callable[[], Answered]] = [
        lambda: place.chat("alice", f"status-{status}"),
        lambda: place.chat("alice", f"status-{status}", stream=True),
        lambda: place.chat("alice", f"status-{status}", session=session),
    ]
    for ask in ways:
        refused = ask()
        assert (refused.status, refused.json["error"]["code"]) == (502, "protocol_error")
        assert status in refused.json["error"]["message"]


@pytest.mark.parametrize("model", ["html", "list", "rss", "xsl", "script", "parts"])
def test_a_page_is_no_page_of_this_server(place: Place, model: str) -> None:
    passed = place.chat("alice", model)
    assert (passed.status, passed.content) == (200, HTML)
    assert passed.headers["content-type"].startswith("text/plain")
    assert passed.headers["x-content-type-options"] == "nosniff"


def test_nor_is_a_stream(place: Place, session: str) -> None:
    assert place.chat("alice", "list-stream", stream=True).headers["content-type"].startswith("text/plain")
    for _ in range(2):  # as it comes, and as it is stored
        told = place.chat("alice", "list-stream", stream=True, session=session, headers={"idempotency-key": "1"})
        assert (told.status, told.headers["content-type"]) == (200, "text/event-stream")


@pytest.mark.parametrize(
    ("model", "options"), [("many", {}), ("long-name", {}), ("wide", {}), ("wide-stream", {"stream": True})]
)
def test_headers_are_bounded(place: Place, session: str, model: str, options: dict[str, Any]) -> None:
    with closing(HTTPConnection("127.0.0.1", place.ground.server.port, timeout=30)) as connection:
        for headers in ({}, {"x-session-id": session}):
            body = json.dumps({"model": model, "messages": [], **options})
            sent = {"authorization": f"Bearer {place.ground.keys['alice']}", **headers}
            connection.request("POST", ENDPOINT, body, sent)
            with connection.getresponse() as response:
                assert response.status == 200
                response.read()
                assert sum(len(name) + len(value) for name, value in response.getheaders()) < 4_000


@pytest.mark.parametrize("model", ["deep", "half"])
def test_odd_answers_are_cells_of_the_grid(place: Place, model: str) -> None:
    batch_id = place.ground.start("alice", (json.dumps(request_line("1", "hello", model)) + "\n").encode())
    place.ground.until("alice", f"/v1/batches/{batch_id}", "status", "completed")
    for asked in ("", "?cellBytes=64", "?cellBytes=2000"):
        (item,) = place.ground.ok("alice", "GET", f"/api/jobs/{batch_id}/items{asked}")["items"]
        assert item["status"] == "DONE"
    assert place.ground.ask("alice", "GET", f"/api/jobs/{batch_id}/items/1").status == 200


@pytest.mark.parametrize(("model", "gate"), [("locked", "halted"), ("busy", "waiting")])
def test_what_an_upstream_says_to_one_owner_is_not_told_to_another(place: Place, model: str, gate: str) -> None:
    ground = place.ground
    line = (json.dumps(request_line("1", "hello", model)) + "\n").encode()
    started: dict[str, str] = {}
    for tenant in ("alice", "bob"):
        started[tenant] = ground.start(tenant, line)
        path = f"/api/work/{started[tenant]}"
        wait_until(partial(is_closed, ground, path, gate), 30)
        shown = ground.ok(tenant, "GET", path)["limit"]
        assert (shown["gate"], shown["gateCode"]) == (gate, "invalid_api_key" if gate == "halted" else "slow_down")
        assert shown["gateCode"] in shown["gateMessage"]
        assert "CANARY" not in shown["gateMessage"]
        assert started["alice"] not in shown["gateMessage"]
    told = {tenant: first_tick(ground, tenant, started["bob"])["limit"]["gateMessage"] for tenant in ("root", "bob")}
    assert "CANARY" in told["root"]
    assert told["bob"] == shown["gateMessage"]
    assert ground.ok("root", "GET", f"/api/work/{started['bob']}")["limit"]["gateMessage"] == told["root"]
    for tenant, batch_id in started.items():
        ground.ok(tenant, "POST", f"/v1/batches/{batch_id}/cancel")


def is_closed(ground: TenantGround, path: str, gate: str) -> bool:
    limit = ground.ok("root", "GET", path)["limit"]
    return limit is not None and limit["gate"] == gate


def first_tick(ground: TenantGround, tenant: str, work_id: str) -> Any:
    with closing(HTTPConnection("127.0.0.1", ground.server.port, timeout=30)) as connection:
        connection.request("GET", f"/api/ticks?work={work_id}", headers={"x-api-key": ground.keys[tenant]})
        with connection.getresponse() as response:
            return json.loads(next(line for line in response if line.startswith(b"data: ")).removeprefix(b"data: "))


# -- the provider's key


def test_the_providers_key_leaves_in_no_answer(place: Place, session: str) -> None:
    ground = place.ground
    answers = [
        place.chat("alice", "echo"),
        place.chat("alice", "echo", session=session),
        place.chat("alice", "echo-stream", stream=True),
        place.chat("alice", "echo-stream", stream=True, session=session),
        ground.ask("alice", "GET", f"/v1/sessions/{session}/requests"),
    ]
    lines = "".join(json.dumps(request_line(str(n), "hello", "echo")) + "\n" for n in range(2)).encode()
    batch_id = ground.start("alice", lines)
    batch = ground.until("alice", f"/v1/batches/{batch_id}", "status", "completed")
    answers.append(ground.ask("alice", "GET", f"/v1/files/{batch['output_file_id']}/content"))
    for told in answers:
        assert told.status == 200
        whole = told.content + json.dumps(dict(told.headers)).encode()
        assert b"CANARY" not in whole
        assert b"[redacted]" in whole


def test_nor_in_an_error(place: Place, session: str) -> None:
    for options in ({}, {"stream": True}, {"session": session}):
        told = place.chat("alice", "echo-error", **options)
        assert told.status == 400
        assert b"CANARY" not in told.content
        assert b"[redacted]" in told.content
