"""Guard of a request's streams: slow senders and slow readers are cut off, sizes are bounded, headers are added."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from time import monotonic

from starlette.requests import Request
from starlette.types import Message, Receive, Send

from penstock.api.errors import ApiError
from penstock.config import ServeLimits


class SlowReaderError(Exception):
    """Client that has left the answer unread for too long, or reads it too slowly."""


class Guard:
    """Guard between the server and the handler of one request."""

    def __init__(
        self, receive: Receive, send: Send, limits: ServeLimits, headers: Iterable[tuple[bytes, bytes]]
    ) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._headers = list(headers)
        self._names = {name for name, _ in self._headers}
        self._whole = False
        self._waited_s = 0.0
        self._received = 0
        self._unread_s = 0.0
        self.status: int | None = None
        """Status of the answer, once it has begun."""
        self.complete = False
        self.sent_bytes = 0

    async def receive(self) -> Message:
        """The next piece of the body. Only the time spent waiting for the client counts against it."""
        if self._whole:
            return await self._receive()
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
            self.sent_bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        limits = self._limits
        # As for a body: only the time spent waiting for the client counts, over the whole answer.
        allowed_s = limits.send_timeout_s + self.sent_bytes / limits.send_min_bytes_per_s - self._unread_s
        began = monotonic()
        try:
            async with asyncio.timeout(min(limits.send_timeout_s, max(0.0, allowed_s))):
                await self._send(message)
        except TimeoutError:
            raise SlowReaderError from None
        self._unread_s += monotonic() - began

    async def linger(self) -> None:
        """Read and drop for a while what the client is still sending: many clients read no answer before they have sent
        everything, and would lose it if they were cut off."""
        with contextlib.suppress(TimeoutError, ApiError):
            async with asyncio.timeout(self._limits.linger_s):
                while not self._whole:
                    await self.receive()


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the whole body. Raises ApiError if it is longer than that."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            message = f"The request's body is larger than {max_bytes:,} bytes."
            raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
    return b"".join(pieces)
