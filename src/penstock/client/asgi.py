"""Transport to an ASGI application in this process: no socket, and no more than one piece held."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message

from penstock.client.api import Answer, Body, Request, Unreachable

_log = logging.getLogger("penstock.client")


class AsgiTransport:
    """Transport that calls the application for each request, in a task of its own."""

    local = True

    def __init__(self, application: ASGIApp, place: str) -> None:
        self._application = application
        self.place = place

    @contextlib.asynccontextmanager
    async def send(self, request: Request) -> AsyncIterator[Answer]:
        exchange = _Exchange(self.place, request.body)
        task = asyncio.create_task(self._call(self._scope(request), exchange))
        try:
            yield await exchange.answer()
            if exchange.finished:
                await task  # the application may still work after its answer
        finally:
            exchange.leave()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _call(self, scope: dict[str, Any], exchange: _Exchange) -> None:
        try:
            await self._application(scope, exchange.receive, exchange.send)
        except Exception as error:
            # The error's text is left out: it may quote a request.
            _log.error("%s %s: %s", scope["method"], scope["path"], type(error).__name__)
        finally:
            await exchange.end()

    def _scope(self, request: Request) -> dict[str, Any]:
        path, _, query = request.target.partition("?")
        headers = {"host": "localhost", **request.headers}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
            "client": ("127.0.0.1", 0),
            "server": ("localhost", 80),
            "state": {},
        }


class _Exchange:
    """Exchange of one request and its answer, a piece at a time each."""

    def __init__(self, place: str, body: bytes | Body | None) -> None:
        self._place = place
        self._parts = _parts(body)
        # One message at most: the application runs ahead of its reader by no more than that.
        self._answers: asyncio.Queue[Message | None] = asyncio.Queue(1)
        self._left = asyncio.Event()
        self._failure: Exception | None = None
        self.finished = False
        """Whether the whole answer was read."""

    # -- the application's side

    async def receive(self) -> Message:
        try:
            part = await anext(self._parts, None)
        except Exception as error:
            self._failure = error
            return {"type": "http.disconnect"}
        if part is not None:
            return part
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._left.is_set():
            raise OSError("the client has left")
        await self._answers.put(message)

    async def end(self) -> None:
        if not self._left.is_set():
            await self._answers.put(None)

    # -- the client's side

    def leave(self) -> None:
        self._left.set()
        with contextlib.suppress(asyncio.QueueEmpty):
            while True:
                self._answers.get_nowait()

    async def answer(self) -> Answer:
        head = await self._next()
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in head.get("headers", [])}
        return Answer(head["status"], headers, self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._next()
            more = bool(message.get("more_body"))
            if not more:
                self.finished = True
                self._left.set()
            if message.get("body"):
                yield bytes(message["body"])

    async def _next(self) -> Message:
        message = await self._answers.get()
        if self._failure is not None:
            raise self._failure
        if message is None:
            raise Unreachable(
                f"{self._place} broke off", hint="The log, penstock.log in the data directory, tells more.", sent=True
            )
        return message


async def _parts(body: bytes | Body | None) -> AsyncIterator[Message]:
    if callable(body):
        async for piece in body():
            yield {"type": "http.request", "body": piece, "more_body": True}
        body = None
    yield {"type": "http.request", "body": body or b"", "more_body": False}
