"""Secrets of a provider in its answers: found wherever a piece ends, and nothing else is touched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping

import pytest

from penstock.dispatch.http.connection import Headers
from penstock.dispatch.http.redaction import Redactor, key_texts, secret_texts

Find = Callable[[str, Mapping[str, str]], tuple[str, ...]]

KEY = "sk-0123456789/abcdefghij"
CONTENT = f"before {KEY} and {KEY[:-1]} sk-{KEY}{KEY} after s".encode()
CLEAN = f"before [redacted] and {KEY[:-1]} sk-[redacted][redacted] after s".encode()


async def _cut(content: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(KEY) - 1, len(KEY), len(KEY) + 1, 1_000])
def test_a_key_is_found_however_a_stream_is_cut(size: int) -> None:
    async def read() -> bytes:
        redactor = Redactor(key_texts(KEY, {}))
        return b"".join([piece async for piece in redactor.pieces(_cut(CONTENT, size))])

    assert asyncio.run(read()) == CLEAN


def test_nothing_is_held_back_that_is_no_beginning_of_a_key() -> None:
    async def read() -> list[bytes]:
        return [piece async for piece in Redactor((KEY,)).pieces(_cut(b"data: 1\n\ndata: 2\n\n", 9))]

    assert asyncio.run(read()) == [b"data: 1\n\n", b"data: 2\n\n"]


def test_a_good_answer_loses_only_what_cannot_be_there_by_chance() -> None:
    headers = {"x-region": "eu-central-1-and-so-on-and-on", "x-access-token": "t0ken-0123456789abcdef"}
    assert set(key_texts("lm-studio", headers)) == {"t0ken-0123456789abcdef"}
    assert set(secret_texts("lm-studio", headers)) == {"lm-studio", *headers.values()}


@pytest.mark.parametrize("find", [key_texts, secret_texts])
@pytest.mark.parametrize("written", ["/+&'\"", "\\/+&'\\\"", "/+\\u0026'\\\"", "/\\u002B\\u0026\\u0027\\u0022"])
def test_what_json_escapes_hides_no_key(find: Find, written: str) -> None:
    """Servers differ in what they escape: a slash, what has a meaning in HTML, a plus."""
    key = "sk-0123456789abcdefghij{}klm"
    body = json.dumps({"key": "KEY"}).replace("KEY", key.format(written))
    assert Redactor(find(key.format("/+&'\""), {})).body(body.encode()) == b'{"key": "[redacted]"}'


def test_a_key_is_found_in_values_and_names_of_headers() -> None:
    key = "sk-Abc0123456789-xyz0123456789"
    raw = [(b"content-type", b"text/event-stream; k=" + key.encode()), (b"X-Note-" + key.encode(), b"1"), (b"a", b"b")]
    found = Redactor(key_texts(key, {})).headers(Headers(raw))
    assert dict(found) == {"content-type": "text/event-stream; k=[redacted]", "a": "b"}
    only_named = Redactor(key_texts(key, {})).headers(Headers(raw[1:]))
    assert dict(only_named) == {"a": "b"}
