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
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote

from penstock.api.endpoint import Endpoint

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


@dataclass(frozen=True, slots=True)
class Sent:
    """One request."""

    operation: Endpoint
    """Which it is made for; its method may be another's."""
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]


def make_requests(
    endpoints: Sequence[Endpoint], ids: Mapping[str, str], good_bodies: Mapping[str, Any], count: int, seed: int
) -> Iterator[Sent]:
    """So many requests, in turns over all operations."""
    rng = random.Random(seed)
    for number in range(count):
        endpoint = endpoints[number % len(endpoints)]
        path = _VARIABLE.sub(lambda found: quote(_part(rng, found[1], ids), safe=""), endpoint.path)
        query = _query(rng, endpoint, ids)
        yield Sent(
            endpoint,
            endpoint.method if rng.random() < 0.95 else rng.choice(("HEAD", "OPTIONS", "PATCH", "DELETE")),
            path + (f"?{query}" if query else ""),
            _body(rng, endpoint, ids, good_bodies),
            rng.choice(_ODD_HEADERS) if rng.random() < 0.3 else {},
        )


def _part(rng: random.Random, name: str, ids: Mapping[str, str]) -> str:
    """An object's id where its name says so, mostly; else any other, or none."""
    fitting = [each for kind, each in ids.items() if kind.split()[-1] in name or name.split("_")[0] in kind]
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


def _body(rng: random.Random, endpoint: Endpoint, ids: Mapping[str, str], good: Mapping[str, Any]) -> bytes | None:
    if endpoint.method == "GET":
        return None
    begun = good.get(endpoint.path, {})
    chance = rng.random()
    if chance < 0.1:
        return rng.choice((b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":' * 2_000, b"{}" * 3, b'{"a":1,"a":2}'))
    if chance < 0.5:
        return json.dumps(begun).encode()
    return json.dumps(_mutated(rng, begun, ids)).encode()


def _mutated(rng: random.Random, value: Any, ids: Mapping[str, str]) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return {**value, name: _mutated(rng, value[name], ids)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        return [_mutated(rng, value[0], ids), *value[1:]]
    odd: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**63, 1.5, 1e308, [], {}, [[]], {"x": None}, [{}] * 40)
    return rng.choice((*odd, *_TEXTS, *ids.values()))


def send(port: int, key: str, sent: Sent) -> tuple[int | None, bytes]:
    """The answer's status, None if the connection was closed without one; and what it says."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", **sent.headers}
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
