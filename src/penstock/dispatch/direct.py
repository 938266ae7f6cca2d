"""HTTP/1.1 without encryption, spoken on the event loop itself. See docs/adr/0009-plain-http.md for when and why.

A call that somebody waits for spends no time on its way to another thread and back, and one that is cut short closes
its connection at once.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Mapping
from time import monotonic
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import quote, urlsplit

from penstock.config import KIB, DispatchLimits
from penstock.dispatch.answer import Answer
from penstock.dispatch.line import Headers, Line
from penstock.dispatch.transport import Countdown, OpenAnswer, TransportError, timed_out

_ONE_PACKET_BYTES = 16 * KIB
_IDLE_S = 60.0
_MAX_KNOWN_PLACES = 1_000
_KEPT_IN_TARGETS = "/%:@!$&'()*+,;=-._~?[]"
_UNSENDABLE = re.compile(r"[^\t\x20-\x7e]")
_ASKED_BY_DEFAULT = {"accept": "*/*", "accept-encoding": "identity"}


class _Place(NamedTuple):
    """Where a URL leads."""

    host: str
    port: int
    head: bytes
    """How requests to it begin: with everything that is not the single call's to say."""


class DirectTransport:
    """Keeps connections for as long as they are used now and then."""

    def __init__(self, limits: DispatchLimits, default_headers: Mapping[str, str]) -> None:
        self.limits = limits
        self._attempt = Countdown(limits.attempt_timeout_s)
        self._first_byte = Countdown(limits.first_byte_timeout_s)
        self._idle = Countdown(limits.idle_timeout_s)
        own = {name.lower(): value for name, value in default_headers.items()}
        self._own_headers = _ASKED_BY_DEFAULT | own
        self._places: dict[tuple[str, ...], _Place] = {}
        self._idle_lines: dict[tuple[str, int], deque[tuple[Line, float]]] = {}
        self._lines: set[Line] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for countdown in (self._attempt, self._first_byte, self._idle):
            countdown.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for line in tuple(self._lines):
            line.fail("connection_reset", "the client was closed")

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request needs a task to be timed in")
        place = self.place(method, url, headers)
        message = _message(place, headers, body)
        started = monotonic()
        self._attempt.start(task)
        try:
            line = await self.line(place)
            try:
                self._first_byte.start(task)
                line.send(message, task)
                while not line.whole:
                    await line.change()
                lasted_ms = int((monotonic() - started) * 1000)
                return Answer(line.status, line.content(), Headers(line.headers), lasted_ms)
            finally:
                self.put_back(line)
        except asyncio.CancelledError:
            for countdown, code in (
                (self._first_byte, "first_byte_timeout"),
                (self._idle, "idle_timeout"),
                (self._attempt, "request_timeout"),
            ):
                if countdown.claims(task):
                    raise timed_out(code, self.limits) from None
            raise
        finally:
            self._attempt.stop(task)
            self._first_byte.stop(task)
            self._idle.stop(task)

    def open(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> OpenAnswer:
        place = self.place(method, url, headers)
        return _OpenAnswer(self, place, _message(place, headers, body))

    # -- what is sent

    def place(self, method: str, url: str, headers: Mapping[str, str]) -> _Place:
        """For a call that has such headers of its own."""
        known = (method, url, *headers)
        try:
            return self._places[known]
        except KeyError:
            if len(self._places) >= _MAX_KNOWN_PLACES:
                self._places.clear()
            self._places[known] = place = self._locate(method, url, {name.lower() for name in headers})
            return place

    def _locate(self, method: str, url: str, told: set[str]) -> _Place:
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode()
            port = parts.port or 80
            target = quote(parts.path or "/", safe=_KEPT_IN_TARGETS)
            if parts.query:
                target += "?" + quote(parts.query, safe=_KEPT_IN_TARGETS)
        except ValueError as error:
            raise TransportError("invalid_request", f"not a URL: {error}") from None
        if parts.scheme != "http" or not host:
            raise TransportError("invalid_request", "not an http:// URL")
        shown = f"[{host}]" if ":" in host else host
        lines = [f"{method} {target} HTTP/1.1", f"host: {shown}" + (f":{port}" if port != 80 else "")]
        lines += [
            f"{_sendable(name)}: {_sendable(value)}" for name, value in self._own_headers.items() if name not in told
        ]
        for name in told:
            _sendable(name)
        return _Place(host, port, ("\r\n".join(lines) + "\r\n").encode())

    # -- connections

    async def line(self, place: _Place) -> Line:
        """A connection that nobody uses, or a new one."""
        waiting = self._idle_lines.get((place.host, place.port))
        while waiting:
            line, _ = waiting.pop()
            if line.usable:
                return line
        return await self._connect(place)

    async def _connect(self, place: _Place) -> Line:
        limit_s = self.limits.connect_timeout_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                _, line = await loop.create_connection(self._new_line, place.host, place.port)
        except TimeoutError:
            raise TransportError("connect_timeout", f"no connection within {limit_s:g} s (connect_timeout_s)") from None
        except OSError as error:
            raise TransportError("connect_failed", error.strerror or str(error)) from None
        line.place = (place.host, place.port)
        self._lines.add(line)
        if self._closed:
            line.fail("connection_reset", "the client was closed")
        return line

    def _new_line(self) -> Line:
        return Line(self.limits, self._first_byte, self._idle, self._lines.discard)

    def put_back(self, line: Line) -> None:
        """It is kept if it can serve again, and closed otherwise."""
        if not line.reusable or self._closed:
            line.cut()
            return
        line.rest()
        self._idle_lines.setdefault(line.place, deque()).append((line, monotonic()))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Those that were used last are used next: what lies longest is not needed."""
        self._sweep = None
        before = monotonic() - _IDLE_S
        for place, waiting in list(self._idle_lines.items()):
            while waiting and (waiting[0][1] <= before or not waiting[0][0].usable):
                waiting.popleft()[0].cut()
            if not waiting:
                del self._idle_lines[place]
        if self._idle_lines:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S / 2, self._close_idle)


class _OpenAnswer:
    """An answer read as it comes."""

    status = 0
    headers: Mapping[str, str] = {}

    def __init__(self, transport: DirectTransport, place: _Place, message: list[bytes]) -> None:
        self._transport = transport
        self._limits = transport.limits
        self._place = place
        self._message = message
        self._line: Line | None = None

    async def __aenter__(self) -> Self:
        limits = self._limits
        self._ends_at = monotonic() + limits.attempt_timeout_s
        try:
            async with asyncio.timeout(limits.attempt_timeout_s):
                line = await self._transport.line(self._place)
        except TimeoutError:
            raise timed_out("request_timeout", limits) from None
        try:
            line.send(self._message, None)
            while not line.head_came:
                await self._change(line, "first_byte_timeout", limits.first_byte_timeout_s)
        except BaseException:
            line.cut()
            raise
        self._line = line
        self.status = line.status
        self.headers = Headers(line.headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line is not None:
            self._transport.put_back(self._line)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        line = self._line
        if line is None:
            raise RuntimeError("the answer is not open")
        while True:
            if line.has_content:
                yield line.content()
            elif line.whole:
                return
            else:
                await self._change(line, "idle_timeout", self._limits.idle_timeout_s)

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self])

    async def _change(self, line: Line, code: str, limit_s: float) -> None:
        left_s = self._ends_at - monotonic()
        try:
            async with asyncio.timeout(min(limit_s, max(0.0, left_s))):
                await line.change()
        except TimeoutError:
            raise timed_out(code if limit_s < left_s else "request_timeout", self._limits) from None


def _message(place: _Place, headers: Mapping[str, str], body: bytes | None) -> list[bytes]:
    """A request as it is written: in one piece unless it is large."""
    told = "".join([f"{name}: {_sendable(value)}\r\n" for name, value in headers.items()])
    length = f"content-length: {len(body)}\r\n" if body is not None else ""
    head = b"%b%b\r\n" % (place.head, (told + length).encode())
    if body is None or len(body) <= _ONE_PACKET_BYTES:
        return [head + (body or b"")]
    return [head, body]


def _sendable(text: str) -> str:
    """A part of a header. What it is not said: it may be a secret."""
    if _UNSENDABLE.search(text):
        raise TransportError("invalid_request", "a header contains a line break or another character it cannot hold")
    return text
