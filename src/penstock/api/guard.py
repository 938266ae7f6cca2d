"""Guard of a request's streams: slow senders and slow readers are cut off, sizes are bounded, headers are added."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from time import monotonic
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Send

from penstock.api.errors import ApiError
from penstock.config import ServeLimits
from penstock.server.memory import Hold

_PIECE_BYTES = 64 * 1024
"""The most that is given to the transport at once."""


_DROP_BYTES_PER_S = 64 * 1024 * 1024
_MANY_OWNERS = 1_000


class SlowReaderError(Exception):
    """Client that has left the answer unread for too long, or reads it too slowly."""


class DropPace:
    """Pace at which the bodies of refused requests are dropped. Many that come at once, as they do when all are refused
    at once and all try again, would keep the event loop from everybody else's."""

    def __init__(self) -> None:
        self._over_at: dict[str, float] = {}
        """When an owner's bytes so far would have come at that pace."""

    def rest_s(self, owner: str, size: int) -> float:
        """How long to rest after so many bytes more of an owner's."""
        now = monotonic()
        if len(self._over_at) > _MANY_OWNERS:
            self._over_at = {owner: at for owner, at in self._over_at.items() if at > now}
        over_at = self._over_at[owner] = max(now, self._over_at.get(owner, now)) + size / _DROP_BYTES_PER_S
        return over_at - now


class Guard:
    """Guard between the server and the handler of one request."""

    def __init__(
        self, receive: Receive, send: Send, limits: ServeLimits, headers: Iterable[tuple[bytes, bytes]], memory: Hold
    ) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._headers = list(headers)
        self._names = {name for name, _ in self._headers}
        self._memory = memory
        self._covered = False
        self._whole = False
        # Seconds that the client may still keep us waiting: they are gained by the bytes that pass, up to the time that
        # it may be silent. So nobody buys hours of silence with the first megabytes.
        self._body_s = limits.body_idle_timeout_s
        self._unread_s = limits.send_timeout_s
        self.status: int | None = None
        """Status of the answer, once it has begun."""
        self.complete = False
        self.sent_bytes = 0
        self.shut_out = False
        """Whether the request must end because its key did."""
        self._listener: asyncio.Task[Any] | None = None

    async def receive(self) -> Message:
        """The next piece of the body. Only the time spent waiting for the client counts against it."""
        if self.shut_out:
            self._whole = True
            return {"type": "http.disconnect"}
        if self._whole:
            return await self._listen()
        began = monotonic()
        try:
            async with asyncio.timeout(max(0.0, self._body_s)):
                message = await self._receive()
        except TimeoutError:
            self._whole = True
            raise ApiError(
                408, "The request's body came too slowly.", code="timeout", headers={"connection": "close"}
            ) from None
        self._body_s -= monotonic() - began
        return self._note(message)

    async def _listen(self) -> Message:
        """Wait until the client leaves, or is made to: whoever waits here ends its request then."""
        self._listener = listener = asyncio.current_task()
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if not self.shut_out or listener is None or listener.uncancel():
                raise
            return {"type": "http.disconnect"}
        finally:
            if self._listener is listener:  # another may listen by now
                self._listener = None

    def shut(self) -> None:
        """End the request as if its client had left: its key was revoked, or has expired."""
        self.shut_out = True
        if self._listener is not None:
            self._listener.cancel()

    def open_for_refusal(self) -> None:
        """Let the refusal out, which tells the client why its request ended."""
        self.shut_out = False

    def _note(self, message: Message) -> Message:
        if message["type"] == "http.request":
            gained_s = len(message.get("body", b"")) / self._limits.body_min_bytes_per_s
            self._body_s = min(self._limits.body_idle_timeout_s, self._body_s + gained_s)
            self._whole = not message.get("more_body", False)
        else:
            self._whole = True
        return message

    def cover(self, body: bytes | memoryview) -> None:
        """Count an answer that is whole already, before it begins: it is held until the client has read it. Raises
        MemoryUsedUpError."""
        if len(body) > _PIECE_BYTES:
            self._memory.grow(len(body))
            self._covered = True

    async def send(self, message: Message) -> None:
        if self.shut_out:
            raise ClientDisconnect
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kept = [entry for entry in message.get("headers", ()) if entry[0] not in self._names]
            await self._send_in_time({**message, "headers": kept + self._headers})
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        if len(body) <= _PIECE_BYTES:
            await self._send_piece(message, body, more=more)
            return
        # In pieces: what the transport was given cannot be taken back from a client that does not read.
        if not self._covered:
            self._memory.grow(len(body))
        for at in range(0, len(body), _PIECE_BYTES):
            piece, rest = body[at : at + _PIECE_BYTES], at + _PIECE_BYTES < len(body)
            await self._send_piece({**message, "body": piece, "more_body": more or rest}, piece, more=more or rest)
        if not self._covered:
            self._memory.grow(-len(body))

    async def _send_piece(self, message: Message, body: bytes, *, more: bool) -> None:
        gained_s = len(body) / self._limits.send_min_bytes_per_s
        self._unread_s = min(self._limits.send_timeout_s, self._unread_s + gained_s)
        await self._send_in_time(message)
        self.sent_bytes += len(body)
        self.complete = not more

    async def _send_in_time(self, message: Message) -> None:
        """Only the time spent waiting for the client counts."""
        began = monotonic()
        try:
            async with asyncio.timeout(max(0.0, self._unread_s)):
                await self._send(message)
        except TimeoutError:
            raise SlowReaderError from None
        self._unread_s -= monotonic() - began

    async def linger(self, pace: DropPace, owner: str) -> None:
        """Read and drop for a while what the client is still sending: many clients read no answer before they have sent
        everything, and would lose it if they were cut off."""
        self._memory.release()  # the request is over, and what was read of it is gone
        with contextlib.suppress(TimeoutError, ApiError):
            async with asyncio.timeout(self._limits.linger_s):
                while not self._whole:
                    message = await self.receive()
                    await asyncio.sleep(pace.rest_s(owner, len(message.get("body", b""))))


async def read_body(request: Request, max_bytes: int, memory: Hold) -> bytes:
    """Read the whole body, which is JSON. Raises ApiError if it is longer than that, or not UTF-8: values that are
    passed on as they are get no other look."""
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        memory.grow(len(piece))
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            message = f"The request's body is larger than {max_bytes:,} bytes."
            raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
    content = b"".join(pieces)
    if not content.isascii():
        try:
            content.decode()
        except UnicodeDecodeError:
            raise ApiError(400, "The request's body is not valid JSON: it is not UTF-8.", code="invalid_json") from None
    return content
