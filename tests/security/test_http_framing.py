"""S24 and what a request's frame may be: trailers, heads however they arrive, versions, codings, text that is not
UTF-8, and the pages of other sites. Nothing of it is a server error, and nothing of it costs memory."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import psutil
import pytest
from msgspec import inspect

from penstock.api.app import endpoints
from penstock.api.endpoint import Endpoint
from tests.support.batch_api import jsonl
from tests.support.server import ServerProcess, served
from tests.support.tenants import TenantGround, form, tenant_ground

MIB = 1024 * 1024
CHAT = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
MAX_HEAD_BYTES = 65_536


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[TenantGround]:
    with tenant_ground(tmp_path_factory.mktemp("framing"), server_18, mock=()) as ground:
        yield ground


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    nowhere = ("--base-url", "http://127.0.0.1:9/v1")
    with served(tmp_path_factory.mktemp("keyless"), *nowhere, database=shared_database_18, workers=0) as server:
        yield server


@contextmanager
def connected(server: ServerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    answer = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(65_536):
            answer += data
    return answer


def exchange(server: ServerProcess, *pieces: bytes) -> bytes:
    """What the server answers to these pieces, sent one after the other, until it closes."""
    with connected(server) as connection:
        with suppress(OSError):  # it may have hung up already
            for piece in pieces:
                connection.sendall(piece)
        return read_all(connection)


def status(answer: bytes) -> int:
    return int(answer.split()[1]) if answer else 0


def head(ground: TenantGround, method: bytes = b"POST", path: bytes = b"/v1/chat/completions", *more: bytes) -> bytes:
    key = ground.keys["bob"].encode()
    lines = (method + b" " + path + b" HTTP/1.1", b"host: a", b"x-api-key: " + key, b"connection: close", *more)
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunked(body: bytes, *trailers: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n" % (len(body), body) + b"".join(line + b"\r\n" for line in trailers) + b"\r\n"


# -- S24: trailers


@pytest.mark.parametrize("with_key", [False, True], ids=["no-key", "key"])
@pytest.mark.parametrize("size", [40, 60_000], ids=["short", "long"])
def test_trailers_without_end_take_no_memory(ground: TenantGround, with_key: bool, size: int) -> None:
    process = psutil.Process(ground.server.process.pid)
    before = process.memory_info().rss
    key = b"x-api-key: " + ground.keys["bob"].encode() + b"\r\n" if with_key else b""
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n" + key + b"transfer-encoding: chunked\r\n\r\n0\r\n"
    block = (b"x-t: " + b"a" * size + b"\r\n") * (MIB // size)
    sent, answer = 0, b""
    with connected(ground.server) as connection:
        connection.sendall(request)
        try:
            while sent < 48 * MIB:
                connection.sendall(block)
                sent += len(block)
        except OSError:  # it has hung up
            pass
        with suppress(OSError):
            answer = read_all(connection)
    assert process.memory_info().rss - before < 32 * MIB
    assert sent < 48 * MIB, "the server took all of them"
    assert status(answer) in (0, 400, 401, 431)


def test_one_trailer_without_end_takes_no_memory(ground: TenantGround) -> None:
    process = psutil.Process(ground.server.process.pid)
    before = process.memory_info().rss
    sent = 0
    with connected(ground.server) as connection, suppress(OSError):
        connection.sendall(head(ground, b"POST", b"/v1/batches", b"transfer-encoding: chunked") + b"0\r\nx-t: ")
        while sent < 48 * MIB:
            connection.sendall(b"a" * MIB)
            sent += MIB
    assert process.memory_info().rss - before < 32 * MIB
    assert sent < 48 * MIB


def test_trailers_are_no_headers(ground: TenantGround) -> None:
    body = msgspec.json.encode(CHAT)
    key = b"x-api-key: " + ground.keys["bob"].encode()
    bare = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert status(exchange(ground.server, bare + chunked(body, key))) == 401
    with_key = head(ground, b"POST", b"/v1/chat/completions", b"transfer-encoding: chunked")
    answer = exchange(ground.server, with_key + chunked(body, b"x-session-id: from-a-trailer", b"idempotency-key: t"))
    assert status(answer) == 200
    assert ground.ask("bob", "GET", "/v1/sessions/from-a-trailer").status == 404


def test_a_request_behind_trailers_is_served(ground: TenantGround) -> None:
    """Trailers that are few are passed over, and count for their own request alone."""
    first = head(ground, b"POST", b"/v1/chat/completions", b"transfer-encoding: chunked")
    first = first.replace(b"connection: close\r\n", b"")
    body = chunked(msgspec.json.encode(CHAT), b"x-t: " + b"a" * 40_000)
    answer = exchange(ground.server, first + body, first + body, head(ground, b"GET", b"/v1/files"))
    assert answer.count(b"HTTP/1.1 200 OK") == 3


# -- heads


def whole(request: bytes) -> list[bytes]:
    return [request]


def in_pieces(request: bytes) -> list[bytes]:
    return [request[at : at + 5_000] for at in range(0, len(request), 5_000)]


@pytest.mark.parametrize("cut", [whole, in_pieces])
@pytest.mark.parametrize("kind", ["one", "many", "path"])
def test_the_bound_on_heads_holds_however_they_arrive(ground: TenantGround, cut: Any, kind: str) -> None:
    def sized(size: int) -> bytes:
        rest = size - len(head(ground, b"GET", b"/v1/files"))
        if kind == "path":
            return head(ground, b"GET", b"/v1/files?x=" + b"a" * rest)
        if kind == "one":
            return head(ground, b"GET", b"/v1/files", b"x-a: " + b"a" * rest)
        return head(ground, b"GET", b"/v1/files", *[b"x-a: " + b"a" * 93] * (rest // 100))

    assert status(exchange(ground.server, *cut(sized(MAX_HEAD_BYTES - 500)))) == 200
    assert status(exchange(ground.server, *cut(sized(MAX_HEAD_BYTES + 500)))) == 431
    # Behind another request, in the same piece: never served, if only closed.
    first = head(ground, b"GET", b"/v1/files").replace(b"connection: close\r\n", b"")
    answer = exchange(ground.server, *cut(first + sized(MAX_HEAD_BYTES + 500)))
    assert answer.count(b"HTTP/1.1 200 OK") <= 1


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET /v1/files HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"GET /healthz HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /healthz HTTP/0.9\r\nhost: a\r\n\r\n", 505),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n", 501),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n\r\n", 501),
        (b"GET /healthz HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    ],
)
def test_frames_that_can_be_read_in_two_ways_are_refused(ground: TenantGround, request_: bytes, expected: int) -> None:
    answer = exchange(ground.server, request_)
    # What the parser itself refuses, it calls a bad request.
    assert status(answer) in (expected, 400), answer
    assert b"connection: close" in answer


def test_chunked_is_chunked_in_any_case(ground: TenantGround) -> None:
    for coding in (b"chunked", b"Chunked", b"CHUNKED "):
        request = head(ground, b"POST", b"/v1/chat/completions", b"transfer-encoding: " + coding)
        assert status(exchange(ground.server, request + chunked(msgspec.json.encode(CHAT)))) == 200


# -- requests that are sent before the last one is answered


@pytest.mark.parametrize("with_key", [False, True], ids=["no-key", "key"])
def test_requests_without_end_take_no_memory(ground: TenantGround, with_key: bool) -> None:
    process = psutil.Process(ground.server.process.pid)
    before = process.memory_info().rss
    key = b"x-api-key: " + ground.keys["bob"].encode() + b"\r\n" if with_key else b""
    block = (b"GET /healthz HTTP/1.1\r\nhost: a\r\n" + key + b"content-length: 1\r\n\r\nx") * 10_000
    sent = 0
    with connected(ground.server) as connection, suppress(OSError):
        while sent < 6 * MIB:
            connection.sendall(block)
            sent += len(block)
    assert process.memory_info().rss - before < 24 * MIB
    assert sent < 6 * MIB, "the server took all of them"


def test_requests_sent_at_once_are_answered_in_turn(ground: TenantGround) -> None:
    """Also where they are larger together than one head may be."""
    large = [head(ground, b"GET", b"/v1/nowhere%d" % number, b"x-a: " + b"a" * 5_000) for number in range(20)]
    with_body = head(ground, b"POST", b"/v1/chat/completions", b"content-length: 1") + b"x"
    first = b"".join((*large, with_body, with_body, *large[1:])).replace(b"connection: close\r\n", b"")
    answer = exchange(ground.server, first + large[0])
    statuses = [int(found) for found in re.findall(rb"HTTP/1.1 (\d+)", answer)]
    assert statuses == 20 * [404] + 2 * [400] + 20 * [404]


def test_of_too_many_requests_sent_at_once_those_that_may_wait_are_answered(ground: TenantGround) -> None:
    request = b"GET /v1/files HTTP/1.1\r\nhost: a\r\nx-api-key: " + ground.keys["bob"].encode() + b"\r\n\r\n"
    answer = exchange(ground.server, 70 * request)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == 65 * [b"200"]
    assert answer.count(b"connection: close") == 1


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_another_protocol_is_not_begun(ground: TenantGround, protocol: bytes) -> None:
    """The parser takes what follows the head for that protocol. So nothing may follow: it would be lost unsaid."""
    asked = (b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + protocol)
    plain = head(ground, b"GET", b"/v1/files", *asked).replace(b"connection: close\r\n", b"")
    for answer in (exchange(ground.server, plain), exchange(ground.server, plain + plain)):
        assert (answer.count(b"HTTP/1.1 200 OK"), answer.count(b"connection: close")) == (1, 1)
    body = msgspec.json.encode(CHAT)
    for length, sent in ((b"content-length: %d" % len(body), body), (b"transfer-encoding: chunked", chunked(body))):
        answer = exchange(ground.server, head(ground, b"POST", b"/v1/sessions/upgrade/close", *asked, length) + sent)
        assert (status(answer), b"Upgrade" in answer) == (400, True), answer


# -- text that is not UTF-8


def place(endpoint: Endpoint, value: bytes) -> bytes:
    """The path with its variable part filled in."""
    before, variable, rest = endpoint.path.encode().partition(b"{")
    return before + value + rest.partition(b"}")[2] if variable else before


@pytest.mark.parametrize("bad", [b"%ff", b"%c0%af", b"%ed%a0%80", b"\xff"])
def test_paths_and_queries_are_utf8(ground: TenantGround, bad: bytes) -> None:
    for endpoint in endpoints():
        filled, method = place(endpoint, b"x"), endpoint.method.encode()
        ways = [filled + b"?limit=1&x" + bad + b"=1", filled + b"?after=" + bad]
        if "{" in endpoint.path:
            ways.append(place(endpoint, bad))
        for way in ways:
            answer = exchange(ground.server, head(ground, method, way, b"content-length: 0"))
            assert status(answer) == 400, (method, way, answer[:200])


def test_bodies_are_utf8(ground: TenantGround) -> None:
    """Also where a value is passed on without being read."""
    bad = b'{"model":"small","messages":[{"role":"user","content":"\xff"}],"max_tokens":1}'
    json_ = {"content-type": "application/json"}
    cloud = b'{"specversion":"1.0","id":"1","type":"t","source":"s","data":' + bad + b"}"
    batch = b'{"requests":[{"custom_id":"a","params":' + bad + b"}]}"
    for method, path, body, headers in (
        ("POST", "/v1/chat/completions", bad, json_),
        ("POST", "/v1/chat/completions", bad, {**json_, "x-session-id": "utf8"}),
        ("POST", "/v1/sessions/utf8/requests", b'{"body":' + bad + b"}", json_),
        ("POST", "/v1/events", cloud, {"content-type": "application/cloudevents+json", "x-session-id": "utf8"}),
        ("POST", "/v1/messages/batches", batch, json_),
    ):
        answer = ground.ask("bob", method, path, body, headers=headers)
        assert answer.status == 400, (path, headers, answer.status, answer.content)
    content, kind = form({"purpose": "batch", "file": jsonl(1)}, "NAME")
    for good in (b"NAME", b'name="purpose"', b"\r\nbatch\r\n"):
        broken = content.replace(good, good[:-1] + b"\xff" + good[-1:])
        assert ground.ask("bob", "POST", "/v1/files", broken, headers={"content-type": kind}).status == 400, good


# -- numbers at their bounds


NUMBERS = (0, 1, -1, 253402300799, 253402300800, -62135596800, -62135596801, 2**31, 2**53, 2**63 - 1, 2**63, 2**64)
MOMENTS = ("0001-01-01T00:00:00Z", "0001-01-01T00:00:00%2B14:00", "9999-12-31T23:59:59Z", "9999-12-31T23:59:59-12:00")


def extremes(about: inspect.Type) -> set[float | str]:
    """Values at, below and above the bounds of a number or a moment; none of any other type."""
    if isinstance(about, inspect.UnionType):
        return {value for each in about.types for value in extremes(each)}
    if isinstance(about, inspect.DateTimeType):
        return set(MOMENTS)
    if not isinstance(about, inspect.IntType | inspect.FloatType):
        return set()
    bounds = [bound for bound in (about.ge, about.gt, about.le, about.lt) if bound is not None]
    return {*NUMBERS, *(bound + step for bound in bounds for step in (-1, 0, 1))}


def test_numbers_and_moments_at_their_bounds_are_no_server_error(ground: TenantGround) -> None:
    batch_id = ground.start("bob", jsonl(1))
    ground.until("bob", f"/v1/batches/{batch_id}", "status", "completed")
    asked = 0
    for endpoint in endpoints():
        if endpoint.query is None or endpoint.method != "GET":
            continue
        path = place(endpoint, batch_id.encode()).decode()
        tenant = "root" if endpoint.role == "admin" else "bob"
        about = inspect.type_info(endpoint.query)
        assert isinstance(about, inspect.StructType)
        # A page that is followed is waited for.
        waits = {field.encode_name for field in about.fields} & {"wait", "timeout"}
        for field in about.fields:
            for value in extremes(field.type):
                if field.encode_name in waits and value in (1, 2, 59, 60, 61):
                    continue
                answer = ground.ask(tenant, "GET", f"{path}?{field.encode_name}={value}")
                assert answer.status < 500, (path, field.encode_name, value, answer.content)
                asked += 1
    assert asked > 100


# -- pages of other sites


FOREIGN: tuple[Mapping[str, str], ...] = (
    {"origin": "http://["},
    {"origin": "http://[::1"},
    {"origin": "http://\u2100"},
    {"origin": "null"},
    {"origin": ""},
    {"origin": "http://evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "Cross-Site"},
    {"host": "evil.example"},
    {"host": "["},
    {"host": "[::1"},
    {"host": "localhost:x:y"},
    {"host": "\u2100"},
)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_pages_of_other_sites_are_refused_without_keys(keyless: ServerProcess, headers: Mapping[str, str]) -> None:
    sent = {"host": f"127.0.0.1:{keyless.port}", "connection": "close", **headers}
    lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in sent.items())
    answer = exchange(keyless, b"GET /v1/files HTTP/1.1\r\n" + lines + b"\r\n")
    assert status(answer) in (400, 401), answer


def test_own_pages_are_served_without_keys(keyless: ServerProcess) -> None:
    own = f"127.0.0.1:{keyless.port}"
    for headers in (
        {},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin"},
        {"origin": f"http://{own}"},
        {"origin": f"http://{own}", "sec-fetch-site": "same-origin"},
    ):
        assert keyless.ask("GET", "/v1/files", headers=headers).status == 200, headers


def test_malformed_origins_do_not_matter_with_a_key(ground: TenantGround) -> None:
    for headers in FOREIGN:
        if "host" not in headers and headers.get("origin", "").isascii():
            assert ground.ask("bob", "GET", "/v1/files", headers=headers).status == 200, headers
