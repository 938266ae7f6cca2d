"""An application called in this process: streamed both ways, left early, broken, and done before it is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.client.api import Answer, Request, Unreachable
from penstock.client.asgi import AsgiTransport
from penstock.client.events import read_events
from penstock.errors import PenstockError

Application = Callable[[Any, Any, Any], Awaitable[None]]
_HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"X-One", b"1")]}


def call(application: Application, request: Request, use: Callable[[Answer], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with AsgiTransport(application, "the application").send(request) as answer:
            return await use(answer)

    return asyncio.run(run())


def test_an_answer_and_what_was_asked() -> None:
    seen: dict[str, Any] = {}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope, content=(await receive())["body"])
        await send(_HEAD)
        await send({"type": "http.response.body", "body": b"all"})

    request = Request("POST", "/v1/a b", {"metadata[k]": "ä&"}, {"Content-Type": "text/plain"}, b"hello")

    async def use(answer: Answer) -> tuple[int, str, bytes]:
        return answer.status, answer.headers["x-one"], await answer.whole()

    assert call(application, request, use) == (200, "1", b"all")
    assert (seen["method"], seen["path"], seen["content"]) == ("POST", "/v1/a b", b"hello")
    assert seen["query_string"] == b"metadata%5Bk%5D=%C3%A4%26"
    assert (b"content-type", b"text/plain") in seen["headers"]


def test_neither_side_runs_ahead_of_the_other() -> None:
    made, taken, sent, read = 0, 0, 0, 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal made
        for _ in range(100):
            made += 1
            assert made - taken <= 2
            yield b"x" * 10

    async def application(_: Any, receive: Any, send: Any) -> None:
        nonlocal taken, sent
        size = 0
        while (part := await receive())["more_body"]:
            taken += 1
            size += len(part["body"])
        await send(_HEAD)
        for _ in range(size):
            sent += 1
            assert sent - read <= 3
            await send({"type": "http.response.body", "body": b"y", "more_body": True})
        await send({"type": "http.response.body"})

    async def use(answer: Answer) -> None:
        nonlocal read
        async for piece in answer.pieces:
            read += len(piece)

    call(application, Request("PUT", "/", body=body), use)
    assert read == 1_000


def test_what_follows_the_answer_is_waited_for() -> None:
    done = []

    async def application(_: Any, receive: Any, send: Any) -> None:
        await send(_HEAD)
        await send({"type": "http.response.body", "body": b"soon"})
        await asyncio.sleep(0)
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        done.append(True)

    call(application, Request("GET", "/"), lambda answer: answer.whole())
    assert done == [True]


def test_a_caller_who_leaves_early_ends_the_application() -> None:
    ended = []

    async def application(_: Any, __: Any, send: Any) -> None:
        try:
            await send(_HEAD)
            while True:
                await send({"type": "http.response.body", "body": b"more", "more_body": True})
        finally:
            ended.append(True)

    async def use(answer: Answer) -> bytes:
        return await anext(answer.pieces)

    assert call(application, Request("GET", "/"), use) == b"more"
    assert ended == [True]


@pytest.mark.parametrize("after_head", [False, True])
def test_an_application_that_breaks_off(after_head: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def application(_: Any, __: Any, send: Any) -> None:
        if after_head:
            await send(_HEAD)
        raise ZeroDivisionError

    with caplog.at_level(logging.CRITICAL), pytest.raises(Unreachable, match="the application broke off"):
        call(application, Request("GET", "/"), lambda answer: answer.whole())


def test_a_body_that_fails_tells_its_own_reason() -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        raise PenstockError("the file changed")

    async def application(_: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({**_HEAD, "status": 400})
        await send({"type": "http.response.body"})

    with pytest.raises(PenstockError, match="the file changed"):
        call(application, Request("PUT", "/", body=body), lambda answer: answer.whole())


@pytest.mark.parametrize("size", [1, 3, 1_000])
def test_events_in_pieces_of_any_size(size: int) -> None:
    stream = (
        "retry: 1\n\n: hi\nevent: a\r\ndata: ü\ndata: 2\n\nid: 3\ndata:x\n\nevent: none\n\nevent: cut\ndata: y".encode()
    )

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    async def read() -> list[tuple[str, str]]:
        return [event async for event in read_events(pieces())]

    assert asyncio.run(read()) == [("a", "ü\n2"), ("message", "x")]
