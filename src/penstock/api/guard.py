"""A request's stream under watch: slow senders and slow readers are cut off, sizes are bounded, headers are added."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from time import monotonic
from typing import Protocol

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Send

from penstock.api.errors import ApiError
from penstock.config import ServeLimits

WIRE = "penstock.wire"
"""Where a request's scope has its `Wire`, if the server gives one."""


class SlowReaderError(Exception):
    """The client has left the answer unread for too long."""


class Wire(Protocol):
    """What the connection knows of itself. Where neither end has to be waited for, nothing needs to be timed."""

    @property
    def body_is_here(self) -> bool:
        """All of the request's body has come."""

    @property
    def takes_more(self) -> bool:
        """What is sent now is taken at once."""

    def write(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a whole answer in one go; False if it has to be sent in the ordinary way."""


class Guard:
    """Stands between the server and the handler of one request."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        limits: ServeLimits,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        bodiless: bool,
        wire: Wire | None = None,
    ) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._headers = list(headers)
        self._names = {name for name, _ in self._headers}
        self._bodiless = bodiless
        self._wire = wire
        self._whole = False
        self._waited_s = 0.0
        self._received = 0
        self.status: int | None = None
        """Of the answer, once it has begun."""
        self.complete = False
        self.sent_bytes = 0

    async def receive(self) -> Message:
        """The next piece of the body. Only the time spent waiting for the client counts against it."""
        if self._whole:
            return await self._receive()
        if self._wire is not None and self._wire.body_is_here:
            return self._note(await self._receive())
        limits = self._limits
        allowed_s = limits.body_idle_timeout_s + self._received / limits.body_min_bytes_per_s - self._waited_s
        began = monotonic()
        try:
            async with asyncio.timeout(min(limits.body_idle_timeout_s, max(0.0, allowed_s))):
                message = await self._receive()
        except TimeoutError:
            self._whole = True
            raise ApiError(
                408, "The request's body came too slowly.", code="timeout", headers={"connection": "close"}
            ) from None
        self._waited_s += monotonic() - began
        return self._note(message)

    def _note(self, message: Message) -> Message:
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
        else:
            self._whole = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kept = [entry for entry in message.get("headers", ()) if entry[0] not in self._names]
            message = {**message, "headers": kept + self._headers}
        elif message["type"] == "http.response.body":
            if self._bodiless:
                if self.complete:
                    return
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            self.sent_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        if self._wire is not None and self._wire.takes_more:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._limits.send_timeout_s):
                await self._send(message)
        except TimeoutError:
            raise SlowReaderError from None

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a whole answer in one go, if it can be; False if nothing was sent."""
        if self._bodiless or self._wire is None or not self._wire.write(status, headers + self._headers, body):
            return False
        self.status = status
        self.sent_bytes = len(body)
        self.complete = True
        return True

    async def read(self, max_bytes: int) -> bytes:
        """The whole body, if it is no longer than that."""
        pieces: list[bytes] = []
        while not self._whole:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            pieces.append(message.get("body", b""))
            if self._received > max_bytes:
                raise too_large(max_bytes)
        return b"".join(pieces)

    async def linger(self) -> None:
        """Take and drop what the client is still sending, for a while: many read no answer before they are done, and
        to cut them off would lose it."""
        with contextlib.suppress(TimeoutError, ApiError):
            async with asyncio.timeout(self._limits.linger_s):
                while not self._whole:
                    await self.receive()


def too_large(max_bytes: int) -> ApiError:
    message = f"The request's body is larger than {max_bytes:,} bytes."
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})
