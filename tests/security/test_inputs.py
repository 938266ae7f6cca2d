"""S5, S11, S14, S18, S19: whatever a client writes where, it is refused or taken for what it is: never obeyed, never
a server error, and stored and shown again as it came."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pytest
from msgspec import inspect

from penstock.api.app import endpoints
from penstock.api.endpoint import Endpoint
from tests.support.batch_api import ENDPOINT, jsonl
from tests.support.cli import request_line
from tests.support.tenants import TenantGround, form, tenant_ground
from tests.support.thorough import thorough

INJECTED = (
    "owner",
    "tenant_id",
    "state",
    "status",
    "lease_id",
    "id",
    "role_",
    "created_at",
    "__proto__",
    "fingerprint",
)
EVIL = (
    "' OR '1'='1",
    "'; DROP TABLE penstock.files; --",
    '" OR ""="',
    "%",
    "_",
    "%%' ESCAPE '!",
    "\\",
    "$1",
    "%s %(owner)s {0} {owner!r}",
    "$.a ? (@.b > 1)",
    '{"$ne": null}',
    "(a+)+$",
    "[",
    ".*",
    "../../../etc/passwd",
    "..%2f..%2fetc",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "=cmd|'/c calc'!A1",
    "\r\nset-cookie: a=b",
    "\r\n\r\n<html>",
    "\x00",
    "a\x00b",
    "\x1b[31m",
    "\u202e\u2028\u2029\x85",
    "\ufeff",
    "\ud800",
    "é\u0301🦀𝕏",
    "NaN",
    "-1",
    "1e309",
    "9" * 400,
    "0x10",
    "null",
    "true",
    "",
    " ",
    "x" * 20_000,
)
CHAT = {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ a }}"}
FETCH = {"type": "http", "provider": "default", "method": "POST", "path": "/x"}
LEGAL = tuple(text for text in EVIL if "\x00" not in text and "\ud800" not in text)
WRONG_TYPES: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, [], {}, [[]], {"a": {"b": []}}, [None], "x")

FILE_ID, PART_ID = "file-" + "0" * 32, "part_" + "0" * 32
GOOD: Mapping[str, dict[str, Any]] = {
    "POST /v1/uploads": {"bytes": 1, "filename": "f", "mime_type": "text/plain", "purpose": "batch"},
    "POST /v1/uploads/{upload_id}/complete": {"part_ids": [PART_ID]},
    "POST /v1/batches": {"input_file_id": FILE_ID, "endpoint": ENDPOINT, "completion_window": "24h"},
    "POST /v1/webhook_endpoints": {
        "event_types": ["batch.failed"],
        "name": "hook",
        "url": "http://127.0.0.1:9/hook",
    },
    "POST /v1/webhook_endpoints/{webhook_endpoint_id}/test": {"event_type": "batch.failed"},
    "POST /v1/keys": {"owner": "carol"},
}
IN_DISPOSITION = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._- ()")


def named(endpoint: Endpoint) -> str:
    return f"{endpoint.method} {endpoint.path}"


WITH_BODY = [endpoint for endpoint in endpoints() if endpoint.body is not None]
WITH_QUERY = [endpoint for endpoint in endpoints() if endpoint.query is not None]
WITH_QUERY = [endpoint for endpoint in WITH_QUERY if endpoint.path != "/api/ticks"]  # a good query does not end
WITH_PATH = [endpoint for endpoint in endpoints() if "{" in endpoint.path]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[TenantGround]:
    with tenant_ground(tmp_path_factory.mktemp("inputs"), server_18, mock=()) as ground:
        yield ground


@pytest.fixture(autouse=True)
def no_server_error(ground: TenantGround) -> Iterator[None]:
    """Nothing that these tests do is answered, or logged, as a failure of the server."""
    at = len(ground.server.log)
    yield
    said = [line for line in ground.server.log[at:].splitlines() if " ERROR " in line or "Traceback" in line]
    assert said == []


def place(endpoint: Endpoint, value: str = "nothing") -> str:
    """The path with its variable part filled in."""
    before, _, rest = endpoint.path.partition("{")
    return before + value + rest.partition("}")[2] if rest else before


def who(endpoint: Endpoint) -> str:
    return "root" if endpoint.role == "admin" else "alice"


def encoded(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


def check(status: int, *about: object) -> None:
    assert status < 500, (status, *about)


# -- S18: fields that are not the client's to set


def structs(kind: Any) -> Iterator[tuple[tuple[str, ...], type[Any]]]:
    """Every kind of object in a body, with the way to it."""

    def walk(about: inspect.Type, way: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], type[Any]]]:
        if isinstance(about, inspect.UnionType):
            for entry in about.types:
                yield from walk(entry, way)
        elif isinstance(about, inspect.StructType):
            yield way, about.cls
            for field in about.fields:
                yield from walk(field.type, (*way, field.encode_name))

    yield from walk(inspect.type_info(kind), ())


@pytest.mark.parametrize("endpoint", WITH_BODY, ids=named)
def test_fields_that_nobody_may_set_are_refused_by_name(ground: TenantGround, endpoint: Endpoint) -> None:
    for way, kind in structs(endpoint.body):
        theirs = {field.encode_name for field in msgspec.structs.fields(kind)}
        for name in (name for name in INJECTED if name not in theirs):
            inner: dict[str, Any] = {name: "x"}
            for step in reversed(way):
                inner = {step: inner}
            for body in (inner, {**GOOD.get(named(endpoint), {}), **inner}):
                refused = ground.ask(who(endpoint), endpoint.method, place(endpoint), body)
                shown = ".".join((*way, name))
                assert refused.status == 422, (body, refused.content)
                error = refused.json["error"]
                assert shown in error["message"]
                if endpoint.dialect == "openai":
                    assert (error["param"], error["code"]) == (shown, "unknown_parameter")


def test_nor_in_forms(ground: TenantGround) -> None:
    for name in INJECTED:
        content, kind = form({name: "x", "purpose": "batch", "file": b"{}"})
        refused = ground.ask("alice", "POST", "/v1/files", content, headers={"content-type": kind})
        assert (refused.status, refused.json["error"]["param"]) == (422, name)
        content, kind = form({"data": b"{}", name: "x"})
        opened = ground.ok("alice", "POST", "/v1/uploads", GOOD["POST /v1/uploads"])["id"]
        refused = ground.ask("alice", "POST", f"/v1/uploads/{opened}/parts", content, headers={"content-type": kind})
        assert (refused.status, refused.json["error"]["param"]) == (422, name)
    assert ground.ok("alice", "GET", "/v1/files")["data"] == []


NESTED_AT = {
    "processor": {"processor": "NESTED"},
    "parameters": {"processor": {**CHAT, "parameters": {"a": "NESTED"}}},
    "schema": {"processor": {**CHAT, "schema": {"type": "object", "properties": {"a": "NESTED"}}}},
    "enum": {"processor": {**CHAT, "schema": {"type": "object", "properties": {"a": {"enum": ["NESTED"]}}}}},
    "body": {"processor": {**FETCH, "body": "NESTED"}},
    "equals": {"processor": {**FETCH, "rules": [{"outcome": "done", "path": "a", "equals": "NESTED"}]}},
    "columns": {"processor": CHAT, "columns": "NESTED"},
    "unknown": {"processor": CHAT, "x": "NESTED"},
}


@pytest.mark.parametrize("path", ["/api/jobs", "/api/jobs/preview"])
@pytest.mark.parametrize("where", NESTED_AT)
@pytest.mark.parametrize("depth", [120, 480, 990, 3_000])
def test_specs_nested_deep(ground: TenantGround, path: str, where: str, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    spec = json.dumps(NESTED_AT[where]).replace('"NESTED"', nested)
    content, media = form({"spec": spec, "file": b"a,b\n1,2\n"}, "rows.csv")
    answer = ground.ask("alice", "POST", path, content, headers={"content-type": media})
    # A preview tells what is wrong with a definition among its problems.
    assert answer.status == 400 or (answer.status, path) == (200, "/api/jobs/preview"), answer.content
    assert answer.status == 400 or answer.json["problems"]


def test_sources_nested_deep(ground: TenantGround) -> None:
    source = '{"adapter":' * 3_000 + "1" + "}" * 3_000
    content, media = form({"spec": json.dumps({"processor": CHAT}), "source": source})
    answer = ground.ask("alice", "POST", "/api/jobs", content, headers={"content-type": media})
    assert (answer.status, answer.json["error"]["param"]) == (400, "source")


def test_nor_in_message_batches(ground: TenantGround) -> None:
    """Anthropic's servers call this a bad request."""
    request = {"custom_id": "a", "params": {"model": "small", "max_tokens": 1, "messages": []}}
    for name in INJECTED:
        for body in (
            {name: "x", "requests": [request]},
            {"requests": [request], name: "x"},
            {"requests": [{**request, name: "x"}]},
        ):
            refused = ground.ask("alice", "POST", "/v1/messages/batches", body)
            assert refused.status == 400
            assert name in refused.json["error"]["message"]
    assert ground.ok("alice", "GET", "/v1/messages/batches")["data"] == []


# -- S19: text that means something to somebody else


def takes_brackets(kind: Any) -> bool:
    about = inspect.type_info(kind)
    entries = about.types if isinstance(about, inspect.UnionType) else (about,)
    return any(isinstance(entry, inspect.ListType | inspect.DictType) for entry in entries)


@pytest.mark.parametrize("endpoint", WITH_QUERY, ids=named)
def test_hostile_queries(ground: TenantGround, endpoint: Endpoint) -> None:
    assert endpoint.query is not None

    def ask_with(query: str) -> None:
        body = b"" if endpoint.method == "PUT" else None
        answer = ground.ask(who(endpoint), endpoint.method, f"{place(endpoint)}?{query[:60_000]}", body)
        check(answer.status, query[:100])

    for text in EVIL:
        ask_with(f"{encoded(text)}={encoded(text)}")
    for number, field in enumerate(msgspec.structs.fields(endpoint.query)):
        for text in EVIL:
            ask_with(f"{field.encode_name}={encoded(text)}")
            # Of a field that is neither a list nor a table, a name with brackets is one that nobody knows.
            if number == 0 or takes_brackets(field.type) or thorough():
                ask_with(f"{field.encode_name}[]={encoded(text)}")
                ask_with(f"{field.encode_name}[{encoded(text)}]={encoded(text)}")
        for text in ("x" * 200_000, "&".join("a" * 1_000)):
            way = f"{place(endpoint)}?{field.encode_name}={text}"
            check(ground.ask(who(endpoint), endpoint.method, way).status, text[:100])


@pytest.mark.parametrize("endpoint", WITH_PATH, ids=named)
def test_hostile_paths(ground: TenantGround, endpoint: Endpoint) -> None:
    for text in (text for text in EVIL if text):
        body = GOOD.get(named(endpoint), {}) if endpoint.body is not None else None
        answer = ground.ask(who(endpoint), endpoint.method, place(endpoint, encoded(text)), body)
        check(answer.status, text)
        assert answer.status in (200, 400, 404, 405, 409, 422), (text, answer.status)


@pytest.mark.parametrize("endpoint", WITH_BODY, ids=named)
def test_hostile_bodies(ground: TenantGround, endpoint: Endpoint) -> None:
    tenant, path = who(endpoint), place(endpoint)
    good = GOOD.get(named(endpoint), {})
    kinds = list(structs(endpoint.body))
    for way, kind in kinds:
        for field in msgspec.structs.fields(kind):
            for value in (*EVIL, *WRONG_TYPES, [*EVIL], {text: text for text in EVIL}):
                inner: dict[str, Any] = {field.encode_name: value}
                for step in reversed(way):
                    inner = {step: inner}
                answer = ground.ask(tenant, endpoint.method, path, {**good, **inner})
                check(answer.status, inner)
    json_ = {"content-type": "application/json"}
    for raw in (
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"id":1,"id":2}',
        b'"text"',
        b"null",
        b"[]",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"a":"\xed\xa0\x80"}',
        b'{"metadata":{"a":"\\ud800"}}',
        b'{"n":' + b"9" * 100_000 + b"}",
        b"{" + b'"x":1,' * 100_000 + b'"y":1}',
        b"\x00" * 100,
    ):
        check(ground.ask(tenant, endpoint.method, path, raw, headers=json_).status, raw[:50])
    big = b'{"x":"' + b"x" * (9 * 1024 * 1024) + b'"}'
    assert ground.ask(tenant, endpoint.method, path, big, headers=json_).status == 413


def test_what_is_left_of_all_that(ground: TenantGround) -> None:
    """The tables are still there, and a server that answers."""
    assert ground.ok("alice", "GET", "/v1/batches")["object"] == "list"
    assert ground.ask(None, "GET", "/readyz").status == 200


# -- as it came


def test_metadata_is_kept_and_searched_as_it_is(ground: TenantGround) -> None:
    file_id = ground.put("bob", jsonl(1))
    asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
    short = [text for text in LEGAL if len(text) <= 64]
    made = {}
    for text in short:
        batch = ground.ok("bob", "POST", "/v1/batches", {**asked, "metadata": {text: text, "k": text}})
        assert batch["metadata"] == {text: text, "k": text}
        made[text] = batch["id"]
    for text, batch_id in made.items():
        for key in (text, "k"):
            found = ground.ok("bob", "GET", f"/v1/batches?limit=100&metadata[{encoded(key)}]={encoded(text)}")["data"]
            assert [batch["id"] for batch in found] == [batch_id], (key, text)
        assert ground.ok("bob", "GET", f"/v1/batches/{batch_id}")["metadata"] == {text: text, "k": text}
    for text in ("\x00", "a\x00b", "\ud800"):
        for metadata in ({text: "x"}, {"x": text}):
            assert ground.ask("bob", "POST", "/v1/batches", {**asked, "metadata": metadata}).status == 400
    ground.ok("bob", "DELETE", f"/v1/files/{file_id}")


def test_custom_ids_come_back_as_they_are(ground: TenantGround) -> None:
    ids = [text for text in LEGAL if 0 < len(text) <= 512]
    lines = [request_line(custom_id, text) for custom_id, text in zip(ids, reversed(ids), strict=True)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    batch_id = ground.start("bob", content)
    batch = ground.until("bob", f"/v1/batches/{batch_id}", "status", "completed", "failed")
    assert batch["status"] == "completed", batch["errors"]
    output = ground.ask("bob", "GET", f"/v1/files/{batch['output_file_id']}/content")
    # Also for those who split at every character that Python takes for the end of a line.
    assert [json.loads(line)["custom_id"] for line in output.content.decode().splitlines()] == ids
    shown = ground.ok("bob", "GET", f"/v1/batches/{batch_id}/results?limit=100")["data"]
    assert [entry["custom_id"] for entry in shown] == ids
    assert [entry["body"] for entry in shown] == [line["body"] for line in lines]
    back = ground.ask("bob", "GET", f"/v1/files/{batch['input_file_id']}/content")
    assert back.content == content
    nothing_failed = ground.ask("bob", "POST", f"/v1/batches/{batch_id}/retry", {"custom_ids": ids})
    assert nothing_failed.status == 400


def test_models_may_be_called_anything(ground: TenantGround) -> None:
    named_so = [text for text in LEGAL if text.strip() and len(text) <= 255]
    models = [text for text in named_so if text.isprintable()]
    unfit = [text for text in named_so if not text.isprintable()]

    def asking(models: list[str]) -> bytes:
        lines = (request_line(f"r{number}", "hi", model) for number, model in enumerate(models))
        return "".join(json.dumps(line) + "\n" for line in lines).encode()

    batch_id = ground.start("bob", asking(unfit))
    batch = ground.until("bob", f"/v1/batches/{batch_id}", "status", "completed", "failed")
    assert [error["line"] for error in batch["errors"]["data"]] == list(range(1, len(unfit) + 1))
    batch_id = ground.start("bob", asking(models))
    batch = ground.until("bob", f"/v1/batches/{batch_id}", "status", "completed", "failed")
    assert batch["status"] == "completed", batch["errors"]
    assert batch["request_counts"] == {"total": len(models), "completed": len(models), "failed": 0}


def test_names_of_webhooks_and_keys_are_kept(ground: TenantGround) -> None:
    plain = [text for text in LEGAL if text and len(text) <= 255 and not any(c < " " or c == "\x7f" for c in text)]
    for text in plain:
        key = ground.ok("root", "POST", "/v1/keys", {"owner": text, "name": text})
        assert (key["owner"], key["name"]) == (text, text)
        if "\x85" not in text:
            hook = {"event_types": ["batch.failed"], "name": text, "url": "http://127.0.0.1:9/hook"}
            made = ground.ok("bob", "POST", "/v1/webhook_endpoints", hook)
            assert ground.ok("bob", "GET", f"/v1/webhook_endpoints/{made['id']}")["name"] == text
            ground.ok("bob", "DELETE", f"/v1/webhook_endpoints/{made['id']}")
        # Somebody of that name has a place of their own.
        assert ground.server.ask("GET", "/v1/batches", key=key["key"]).json["data"] == []


# -- S11: files with names


def test_a_download_is_a_file_whatever_it_is_called(ground: TenantGround) -> None:
    page = b"<html><script>alert(1)</script>"
    for name in (
        *LEGAL,
        "x" * 3_000,
        "report.html",
        "a\x00b.html",
        'x"; filename=evil.exe; "',
        "/etc/passwd",
        "C:\\x\\y.txt",
        "..",
    ):
        way = f"/v1/files?purpose=user_data&filename={encoded(name)}"
        put = ground.ask("bob", "PUT", way, page, headers={"content-type": "text/html"})
        content, kind = form({"purpose": "user_data", "file": page}, name.replace("\x00", ""))
        posted = ground.ask("bob", "POST", "/v1/files", content, headers={"content-type": kind})
        if len(name) > 4_000:
            assert posted.status == 400  # longer than a part's headers may be
            posted = put
        for answer in (put, posted):
            assert answer.status == 200, (name, answer.content)
            file = answer.json
            shown = file["filename"]
            assert 0 < len(shown) <= 255
            assert shown.isprintable()
            assert "/" not in shown
            assert "\\" not in shown
            got = ground.ask("bob", "GET", f"/v1/files/{file['id']}/content")
            assert got.content == page
            assert got.headers["content-type"] == "application/octet-stream"
            assert got.headers["x-content-type-options"] == "nosniff"
            assert "set-cookie" not in got.headers
            kind, plain, exact = got.headers["content-disposition"].split("; ")
            assert kind == "attachment"
            assert set(plain.removeprefix('filename="').removesuffix('"')) <= IN_DISPOSITION
            assert unquote(exact.removeprefix("filename*=UTF-8''")) == shown
        for file_id in {put.json["id"], posted.json["id"]}:
            ground.ok("bob", "DELETE", f"/v1/files/{file_id}")
        if name == name.strip() and name.isprintable() and 0 < len(name) <= 255 and not set(name) & {"/", "\\"}:
            assert put.json["filename"] == (name if name != ".." else "upload")


# -- S5 and friends: what is no HTTP


def raw(ground: TenantGround, request: bytes, *, leave: bool = True) -> bytes:
    """The first line of the answer; nothing if there is none. Who leaves after the request may get none."""
    with socket.create_connection(("127.0.0.1", ground.server.port), timeout=10) as connection:
        connection.sendall(request)
        if leave:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while data := connection.recv(65_536):
                answer += data
        except ConnectionResetError:
            pass
    return answer.partition(b"\r\n")[0]


def test_what_is_no_http_is_refused(ground: TenantGround) -> None:
    key = ground.keys["bob"].encode()
    head = b"host: localhost\r\nauthorization: Bearer " + key + b"\r\n"
    for request in (
        b"GET /v1/files HTTP/1.1\r\n" + head + b"x-a: b\x00c\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\n" + head + b"x-a\x00b: c\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\n" + head + b"x a: c\r\n\r\n",
        b"GET /v1/files\x00 HTTP/1.1\r\n" + head + b"\r\n",
        b"GET /v1/files HTTP/9.9\r\n" + head + b"\r\n",
        b"GET /v1/files HTTP/1.1\r\n" + head + b"content-length: -1\r\n\r\n",
        b"GET /v1/files HTTP/1.1\r\n" + head + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /v1/batches HTTP/1.1\r\n" + head + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        b"POST /v1/batches HTTP/1.1\r\n" + head + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"G\xc3\xa4T / HTTP/1.1\r\n" + head + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n\r\n\r\n\r\n",
        b"",
    ):
        told = raw(ground, request)
        assert told == b"" or told.split()[1].startswith(b"4"), (request, told)
    # Odd, but HTTP: bytes that are no text in the path and in the query, and keys of every kind.
    for path in (
        b"/v1/files/\xff\xfe",
        b"/v1/files?after=\xff",
        b"/v1/files?%ff=%fe",
        b"//v1//files",
        b"/v1/files/%2e",
    ):
        told = raw(ground, b"GET " + path + b" HTTP/1.1\r\n" + head + b"connection: close\r\n\r\n")
        assert told == b"" or 200 <= int(told.split()[1]) < 500, (path, told)
    for value in (b"Bearer \xff\xfe", b"Bearer", b"Basic abc", b"Bearer " + b"x" * 10_000, b"Bearer sk-penstock-%s"):
        lines = b"host: a\r\nconnection: close\r\nauthorization: " + value
        told = raw(ground, b"GET /v1/files HTTP/1.1\r\n" + lines + b"\r\n\r\n", leave=False)
        assert told.split()[1] == b"401", (value, told)


def test_idempotency_keys_are_plain_text(ground: TenantGround) -> None:
    content = jsonl(1)
    for key in ("' OR 1=1 --", "%", "x" * 255):
        headers = {"idempotency-key": key, "content-type": "text/plain"}
        ids = {ground.ok("bob", "PUT", "/v1/files?purpose=batch", content, headers=headers)["id"] for _ in range(2)}
        assert len(ids) == 1
        ground.ok("bob", "DELETE", f"/v1/files/{ids.pop()}")
    for key in ("", "x" * 256, "\xe9"):
        headers = {"idempotency-key": key, "content-type": "text/plain"}
        assert ground.ask("bob", "PUT", "/v1/files?purpose=batch", content, headers=headers).status == 400


# -- S14: cursors


def test_a_cursor_is_an_id_and_nothing_else(ground: TenantGround) -> None:
    ids = [ground.put("bob", jsonl(1)) for _ in range(3)]
    whole = [file["id"] for file in ground.ok("bob", "GET", "/v1/files")["data"]]
    for at in range(len(ids[0])):
        for flipped in (chr(ord(ids[1][at]) ^ 1), ids[1][at].upper(), "\u0660"):
            cursor = ids[1][:at] + flipped + ids[1][at + 1 :]
            answer = ground.ask("bob", "GET", f"/v1/files?limit=3&after={encoded(cursor)}")
            if answer.status == 200:
                page = [file["id"] for file in answer.json["data"]]
                assert page == ([one for one in whole if one < cursor][:3])
            else:
                assert (answer.status, answer.json["error"]["param"]) == (400, "after")
    for file_id in ids:
        ground.ok("bob", "DELETE", f"/v1/files/{file_id}")
