"""Requests made at random, over every operation of the API, with ids that exist.

schemathesis invents ids, so most of what it sends ends at 404; these reach the handlers' last statements. Values are
drawn from what breaks servers: bounds and what lies beyond them, wrong types and kinds of ids, odd text and headers.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote

from penstock.api.endpoint import Endpoint
from tests.support.tenants import form

_VARIABLE = re.compile(r"{(\w+)(?::\w+)?}")
_TIMEOUT_S = 60.0
_READ_BYTES = 64 * 1024
# No larger waits: a request that waits as it was told is not a finding.
_NUMBERS = (
    *("0", "1", "-1", "2", "100", "101", "10000", "10001", "0.5", "1e3", "-0", "00", "+1", "1_000", "٣", "NaN", "inf"),
    *("2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "1e309", "9" * 400),
    *("253402300799", "253402300800", "-62135596801", "1700000000"),
)
_WAITS = ("0", "0.01", "-1", "NaN", "1e309", "x", "")
_TEXTS = (
    *("", " ", "a", "null", "true", "[]", "{}", "%", "%00", "\x00", "'", '"', "';--", "*", "..", "../..", "a/b", "\\"),
    *("é", "\u2028", "\ud7ff", "👩‍👩‍👧", "x" * 300, "x" * 5000, "a,b", "a b", "$.x", "(((((", "_" * 40, "~"),
)
_ODD_HEADERS: Sequence[Mapping[str, str]] = (
    {},
    {"idempotency-key": "k"},
    {"idempotency-key": "k" * 300},
    {"prefer": "respond-async, wait=0"},
    {"x-penstock-console": "1", "origin": "http://["},
    {"sec-fetch-site": "cross-site"},
    {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "x"},
    {"x-session-id": "fuzz"},
    {"x-session-id": "\x7f"},
    {"content-type": "text/plain"},
    {"content-type": "multipart/form-data; boundary=b"},
    {"content-type": "application/json; charset=latin-1"},
    {"origin": "http://["},
    {"if-none-match": "*"},
    {"range": "bytes=5-1"},
    {"last-event-id": "9" * 20},
    {"accept-encoding": "zstd, gzip;q=0"},
    {"content-encoding": "gzip"},
)


_HEADER_NAMES = (
    *("origin", "host", "prefer", "cookie", "range", "if-none-match", "if-range", "accept", "accept-encoding"),
    *("content-type", "content-encoding", "sec-fetch-site", "x-penstock-console", "last-event-id", "traceparent"),
    *("idempotency-key", "x-session-id", "x-request-id", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-prefix"),
    *("forwarded", "authorization", "x-api-key", "user-agent", "ce-id", "ce-time", "expect", "upgrade"),
)
_HEADER_TEXTS = (
    *(
        "",
        "null",
        "*",
        "http://[",
        "http://a:b@c:99999",
        "[::1",
        "a:b:c",
        "//",
        "bytes=0-",
        "bytes=-1",
        "bytes=9-1,2-3",
    ),
    *('W/"x"', '"' * 2_000, 'a="' + '\\"' * 2_000 + '"', "a=" + " " * 20_000 + '""x', "," * 20_000, ";=" * 10_000),
    *("penstock_console=" + "a" * 32, "penstock_console=\xff", "wait=" + "9" * 400, "9" * 400, "-1", "\xe9\xff", "%00"),
    *(
        "application/json;" + " " * 20_000,
        "multipart/form-data; boundary=",
        "text/event-stream",
        "Bearer",
        "Bearer \xff",
    ),
    *(
        "application/cloudevents+json",
        "application/cloudevents-batch+json",
        "application/" + "a+" * 5_000,
        "100-continue",
    ),
)
_KEPT = 0.9
"""Share of the requests before anything may be deleted."""
_NEST = "nested deep"
_DEPTHS = (50, 120, 480, 950, 3_000)


@dataclass(frozen=True, slots=True)
class Good:
    """What an operation takes, to be changed in one place."""

    body: Any = None
    """JSON. Of a form: its fields; texts are fields, bytes are files, and all else is JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    path: Mapping[str, str] = field(default_factory=dict)
    """Values of the variables in the path, where they are not ids."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request."""

    operation: Endpoint
    """Which it is made for; its method may be another's."""
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    as_it_should_be: bool = False


def make_requests(
    endpoints: Sequence[Endpoint],
    ids: Mapping[str, str],
    good: Mapping[str, Good],
    count: int,
    seed: int,
    *,
    cookie: str,
    spare: Mapping[str, str],
) -> Iterator[Sent]:
    """Each operation once as it should be, then with what has broken servers, then so many odd requests, in turns over
    all. `good` has what they take, by method and path. With the cookie some come as a browser's would. The spare ids
    are deleted at once, others not before the end."""
    for endpoint in sorted(endpoints, key=lambda each: each.path.endswith("cancel")):
        yield _as_it_should_be(endpoint, spare if endpoint.method == "DELETE" else ids, _good(endpoint, good))
    for endpoint in endpoints:
        if endpoint.method != "DELETE":
            yield from _hostile(endpoint, ids, _good(endpoint, good), cookie)
    rng = random.Random(seed)
    for number in range(count):
        endpoint = endpoints[number % len(endpoints)]
        taken = _good(endpoint, good)
        methods = ("HEAD", "OPTIONS", "PATCH", "DELETE") if number > count * _KEPT else ("HEAD", "OPTIONS", "PATCH")
        named = {} if endpoint.method == "DELETE" and number < count * _KEPT else ids
        path = "".join(
            quote(_part(rng, text, named, taken if named else Good()), safe="") if at % 2 else text
            for at, text in enumerate(_VARIABLE.split(endpoint.path))
        )
        query = _query(rng, endpoint, ids)
        body, headers = _body(rng, endpoint, ids, taken)
        yield Sent(
            endpoint,
            endpoint.method if rng.random() < 0.95 else rng.choice(methods),
            path + (f"?{query}" if query else ""),
            body,
            {**headers, **_odd_headers(rng, cookie)},
        )


def _good(endpoint: Endpoint, good: Mapping[str, Good]) -> Good:
    return good.get(f"{endpoint.method} {endpoint.path}", Good())


def _as_it_should_be(endpoint: Endpoint, ids: Mapping[str, str], good: Good) -> Sent:
    def part(found: re.Match[str]) -> str:
        return quote(good.path.get(found[1]) or _fitting(found[1], ids)[0], safe="")

    body, headers = None, dict(good.headers)
    if endpoint.method != "GET":
        body, told = _encoded(endpoint, good.body)
        headers = {**told, **headers}
    path = _VARIABLE.sub(part, endpoint.path)
    path += f"?{good.query}" if good.query else ""
    return Sent(endpoint, endpoint.method, path, body, headers, as_it_should_be=True)


def _hostile(endpoint: Endpoint, ids: Mapping[str, str], good: Good, cookie: str) -> Iterator[Sent]:
    """What chance would take long to find: a browser's cookie with an origin that is none, long headers, and every
    field of the body nested deep."""
    begun = replace(_as_it_should_be(endpoint, ids, good), as_it_should_be=False)
    yield replace(begun, headers={**begun.headers, "cookie": cookie, "x-penstock-console": "1", "origin": "http://["})
    long = {"prefer": "a=" + " " * 20_000 + '""x', "x-forwarded-for": "," * 20_000}
    yield replace(begun, headers={**begun.headers, **long})
    if isinstance(good.body, dict) and endpoint.method != "GET":
        for body in _nested_in(good.body):
            content, headers = _encoded(endpoint, body)
            for depth in (480, 3_000):
                yield replace(begun, body=_deepened(content, depth), headers={**headers, **good.headers})


def _nested_in(value: Any) -> Iterator[Any]:
    """The value with each part of it in turn replaced by what is nested deep."""
    yield _NEST
    if isinstance(value, dict):
        for name, each in value.items():
            yield from ({**value, name: nested} for nested in _nested_in(each))
    elif isinstance(value, list):
        yield from ([nested, *value[1:]] for nested in _nested_in(value[0] if value else None))


def _deepened(content: bytes, depth: int) -> bytes:
    # A form's field that is nothing else has no quotes.
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    return content.replace(json.dumps(_NEST).encode(), nested).replace(_NEST.encode(), nested)


def _odd_headers(rng: random.Random, cookie: str) -> dict[str, str]:
    headers: dict[str, str] = {}
    chance = rng.random()
    if chance < 0.2:
        headers.update(rng.choice(_ODD_HEADERS))
    elif chance < 0.5:
        headers = {rng.choice(_HEADER_NAMES): rng.choice(_HEADER_TEXTS) for _ in range(rng.choice((1, 1, 2)))}
    if rng.random() < 0.15:
        headers.setdefault("cookie", cookie)
        headers.setdefault("x-penstock-console", "1")
        if rng.random() < 0.7:
            headers.setdefault("sec-fetch-site", "same-origin")
    return headers


def _fitting(name: str, ids: Mapping[str, str]) -> list[str]:
    """Ids of the objects that a variable's name speaks of."""
    exact = [each for kind, each in ids.items() if f"{kind.replace(' ', '_')}_id" == name]
    return exact + [each for kind, each in ids.items() if kind.split()[-1] in name or name.split("_")[0] in kind]


def _part(rng: random.Random, name: str, ids: Mapping[str, str], good: Good) -> str:
    """An object's id where its name says so, mostly; else any other, or none."""
    fitting = [good.path[name]] if name in good.path else _fitting(name, ids)
    if fitting and rng.random() < 0.75:
        return rng.choice(fitting)
    return rng.choice((*ids.values(), "fuzz", *_TEXTS)) or "x"


def _query(rng: random.Random, endpoint: Endpoint, ids: Mapping[str, str]) -> str:
    if endpoint.query is None or rng.random() < 0.2:
        return ""
    names = [name for name in endpoint.query.__struct_encode_fields__ if rng.random() < 0.4]
    told = []
    for name in names:
        values = _WAITS if "wait" in name.lower() or "duration" in name.lower() else (*_NUMBERS, *_TEXTS, *ids.values())
        told.append(f"{name}={quote(rng.choice(values), safe='')}")
    return "&".join(told)


def _body(
    rng: random.Random, endpoint: Endpoint, ids: Mapping[str, str], good: Good
) -> tuple[bytes | None, Mapping[str, str]]:
    """A body and its headers."""
    if endpoint.method == "GET":
        return None, {}
    chance = rng.random()
    if chance < 0.1:
        odd = (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":' * 2_000, b"{}" * 3, b'{"a":1,"a":2}', b"--b\r\n")
        return rng.choice(odd), {}
    begun = {} if good.body is None else good.body
    content, headers = _encoded(endpoint, begun if chance < 0.4 else _mutated(rng, begun, ids))
    content = _deepened(content, rng.choice(_DEPTHS))
    if chance > 0.95:
        content = content[: rng.randrange(len(content) + 1)]
    return content, {**headers, **good.headers}


def _encoded(endpoint: Endpoint, body: Any) -> tuple[bytes, Mapping[str, str]]:
    if isinstance(body, bytes):
        return body, {}
    if not endpoint.form or not isinstance(body, dict):
        return (b"" if body is None else json.dumps(body).encode()), {}
    fields = {name: each if isinstance(each, str | bytes) else json.dumps(each) for name, each in body.items()}
    content, media = form(fields, "rows.csv")
    return content, {"content-type": media}


def _mutated(rng: random.Random, value: Any, ids: Mapping[str, str]) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return {**value, name: _mutated(rng, value[name], ids)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        return [_mutated(rng, value[0], ids), *value[1:]]
    odd: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**63, 1.5, 1e308, [], {}, [[]], {"x": None}, [{}] * 40)
    if rng.random() < 0.1:
        return rng.choice((_NEST, [_NEST], {"type": _NEST}))
    return rng.choice((*odd, *_TEXTS, *ids.values()))


def send(port: int, key: str, sent: Sent) -> tuple[int | None, bytes]:
    """The answer's status, None if the connection was closed without one; and what it says."""
    headers = {"content-type": "application/json", **sent.headers}
    if "cookie" not in headers:  # a key would count before it
        headers.setdefault("authorization", f"Bearer {key}")
    with closing(HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request(sent.method, sent.path, sent.body, headers)
            with connection.getresponse() as response:
                is_stream = (response.headers.get("content-type") or "").startswith("text/event-stream")
                return response.status, b"" if is_stream else response.read(_READ_BYTES)
        except (HTTPException, ConnectionError):
            return None, b""


def is_fault(sent: Sent, status: int | None, content: bytes) -> bool:
    """Whether an answer is the server's fault, while its database and its upstream are well. An upstream may still
    refuse or break off what it is sent, where calls are passed on; a caller may have waited for too short a time."""
    if status in (502, 504):
        return status not in sent.operation.errors
    if status == 503:
        return b'"wait_timeout"' not in content
    return status is None or status >= 500
