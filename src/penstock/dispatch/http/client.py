"""HTTP/1.1 on the event loop itself, plain and over TLS. See docs/adr/0003-http-client.md for why.

A call that a user waits for spends no time on its way to another thread and back, and one that is cut short closes
its connection at once. No redirect is followed, no proxy read from the environment, no cookie kept, nothing retried,
and at most `max_response_bytes` of an answer are held, counted after decompression.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import quote, urlsplit

from penstock.config import KIB, DispatchLimits
from penstock.dispatch.http.answer import Answer
from penstock.dispatch.http.connect import ConnectOptions, Origin, Proxy, connect, refused_by_proxy
from penstock.dispatch.http.connection import Headers, HttpConnection, checked_text
from penstock.dispatch.http.countdown import Countdown
from penstock.dispatch.http.errors import TransportError, timed_out

_ONE_PACKET_BYTES = 16 * KIB
# Larger bodies are handed to the connection in such pieces, as it takes them.
_PIECE_BYTES = 256 * KIB
_IDLE_S = 60.0
_MAX_KNOWN_DESTINATIONS = 1_000
_KEPT_IN_TARGETS = "/%:@!$&'()*+,;=-._~?[]"
_ASKED_BY_DEFAULT = {"accept": "*/*", "accept-encoding": "identity"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
_WANTS_CREDENTIALS = 407


class _Destination(NamedTuple):
    """Where a URL leads."""

    origin: Origin
    head: bytes
    """How requests to it begin: with everything that is not the single call's to say."""


_Pieces = AsyncGenerator[bytes | memoryview, None]
_Message = tuple[list[bytes], _Pieces | None]
"""A request as it is written: how it begins, and what of a large body is sent as there is room for it."""


class HttpClient:
    """Keeps connections for as long as they are used now and then."""

    def __init__(
        self,
        limits: DispatchLimits,
        default_headers: Mapping[str, str],
        options: ConnectOptions = ConnectOptions(),  # noqa: B008 -- frozen
    ) -> None:
        self.limits = limits
        self._options = options
        self._proxy = None if options.proxy is None else Proxy.parse(options.proxy)
        self._attempt = Countdown(limits.attempt_timeout_s)
        self._first_byte = Countdown(limits.first_byte_timeout_s)
        self._idle = Countdown(limits.idle_timeout_s)
        own = {name.lower(): value for name, value in default_headers.items()}
        self._own_headers = _ASKED_BY_DEFAULT | own
        self._destinations: dict[tuple[str, ...], _Destination] = {}
        self._resting: dict[Origin, deque[tuple[HttpConnection, float]]] = {}
        self._connections: set[HttpConnection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for countdown in (self._attempt, self._first_byte, self._idle):
            countdown.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self._connections):
            connection.fail("connection_reset", "the client was closed")

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request needs a task to be timed in")
        destination = self.destination(method, url, headers)
        origin = destination.origin
        begin, more = _message(destination, headers, body)
        started = monotonic()
        self._attempt.start(task)
        try:
            connection = await self.connection(origin)
            try:
                self._first_byte.start(task)
                connection.send(begin, task)
                if more is not None:
                    await _send_pieces(connection, more, lambda: self._room(connection, task))
                while not connection.whole:
                    await connection.change()
                if self._proxy is not None:
                    self.check_proxy(origin, connection.status)
                lasted_ms = int((monotonic() - started) * 1000)
                return Answer(connection.status, connection.content(), Headers(connection.headers), lasted_ms)
            finally:
                self.put_back(connection, origin)
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

    def open(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | AsyncIterable[bytes] | None
    ) -> OpenAnswer:
        """An answer to be read as it comes. A body that is a stream is sent in chunks, unless `headers` have its
        content-length."""
        destination = self.destination(method, url, headers)
        return OpenAnswer(self, destination.origin, _message(destination, headers, body))

    def _room(self, connection: HttpConnection, task: asyncio.Task[Any]) -> Coroutine[Any, Any, None]:
        self._first_byte.start(task)
        return connection.room()

    # -- what is sent

    def destination(self, method: str, url: str, headers: Mapping[str, str]) -> _Destination:
        """For a call that has such headers of its own."""
        known = (method, url, *headers)
        try:
            return self._destinations[known]
        except KeyError:
            if len(self._destinations) >= _MAX_KNOWN_DESTINATIONS:
                self._destinations.clear()
            self._destinations[known] = destination = self._locate(method, url, {name.lower() for name in headers})
            return destination

    def _locate(self, method: str, url: str, told: set[str]) -> _Destination:
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode()
            port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
            target = quote(parts.path or "/", safe=_KEPT_IN_TARGETS)
            if parts.query:
                target += "?" + quote(parts.query, safe=_KEPT_IN_TARGETS)
        except ValueError as error:
            raise TransportError("invalid_request", f"not a URL: {error}") from None
        if parts.scheme not in _DEFAULT_PORTS or not host:
            raise TransportError("invalid_request", "not an http:// or https:// URL")
        origin = Origin(parts.scheme, host, port)
        lines = [f"{method} {target} HTTP/1.1", f"host: {origin.host_header}"]
        if self._proxy is not None and origin.scheme == "http":
            lines[0] = f"{method} http://{origin.host_header}{target} HTTP/1.1"
            lines += self._proxy.headers
        lines += [
            f"{checked_text(name)}: {checked_text(value)}"
            for name, value in self._own_headers.items()
            if name not in told
        ]
        for name in told:
            checked_text(name)
        return _Destination(origin, ("\r\n".join(lines) + "\r\n").encode())

    def check_proxy(self, origin: Origin, status: int) -> None:
        """Whether an answer is the upstream's, or a proxy's that was to forward the request."""
        if status == _WANTS_CREDENTIALS and self._proxy is not None and origin.scheme == "http":
            raise refused_by_proxy(status)

    # -- connections

    async def connection(self, origin: Origin) -> HttpConnection:
        """A connection that nobody uses, or a new one."""
        waiting = self._resting.get(origin)
        while waiting:
            connection, _ = waiting.pop()
            if connection.usable:
                return connection
        tls = self._options.tls() if origin.scheme == "https" else None
        connection = await connect(
            origin, self._new_connection, self.limits.connect_timeout_s, tls=tls, proxy=self._proxy
        )
        self._connections.add(connection)
        if self._closed:
            connection.fail("connection_reset", "the client was closed")
        return connection

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self.limits, self._first_byte, self._idle, self._connections.discard)

    def put_back(self, connection: HttpConnection, origin: Origin) -> None:
        """It is kept if it can serve again, and closed otherwise."""
        if not connection.reusable or self._closed:
            connection.cut()
            return
        connection.rest()
        self._resting.setdefault(origin, deque()).append((connection, monotonic()))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Those that were used last are used next: what lies longest is not needed."""
        self._sweep = None
        before = monotonic() - _IDLE_S
        for origin, waiting in list(self._resting.items()):
            while waiting and (waiting[0][1] <= before or not waiting[0][0].usable):
                waiting.popleft()[0].cut()
            if not waiting:
                del self._resting[origin]
        if self._resting:
            self._sweep = asyncio.get_running_loop().call_later(_IDLE_S / 2, self._close_idle)


class OpenAnswer:
    """An answer read as it comes: its head is there once it is entered. Everything may raise TransportError."""

    status = 0
    headers: Mapping[str, str] = {}

    def __init__(self, client: HttpClient, origin: Origin, message: _Message) -> None:
        self._client = client
        self._limits = client.limits
        self._origin = origin
        self._message = message
        self._connection: HttpConnection | None = None

    async def __aenter__(self) -> Self:
        limits = self._limits
        self._ends_at = monotonic() + limits.attempt_timeout_s
        try:
            async with asyncio.timeout(limits.attempt_timeout_s):
                connection = await self._client.connection(self._origin)
        except TimeoutError:
            raise timed_out("request_timeout", limits) from None
        in_time = partial(self._within, "first_byte_timeout", limits.first_byte_timeout_s)
        try:
            begin, more = self._message
            connection.send(begin, None)
            if more is not None:
                # Each piece that is taken shows that the other side is there.
                await _send_pieces(connection, more, lambda: in_time(connection.room()))
            while not connection.head_came:
                await in_time(connection.change())
            self._client.check_proxy(self._origin, connection.status)
        except BaseException:
            connection.cut()
            raise
        self._connection = connection
        self.status = connection.status
        self.headers = Headers(connection.headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._client.put_back(self._connection, self._origin)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        connection = self._connection
        if connection is None:
            raise RuntimeError("the answer is not open")
        while True:
            if connection.has_content:
                yield connection.content()
            elif connection.whole:
                return
            else:
                await self._within("idle_timeout", self._limits.idle_timeout_s, connection.change())

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self])

    async def _within(self, code: str, limit_s: float, waiting: Coroutine[Any, Any, None]) -> None:
        left_s = self._ends_at - monotonic()
        try:
            async with asyncio.timeout(min(limit_s, max(0.0, left_s))):
                await waiting
        except TimeoutError:
            raise timed_out(code if limit_s < left_s else "request_timeout", self._limits) from None


async def _send_pieces(connection: HttpConnection, pieces: _Pieces, room: Callable[[], Awaitable[None]]) -> None:
    """The rest of a request, unless it is answered before."""
    async with aclosing(pieces):
        async for piece in pieces:
            connection.send_more(piece)
            await room()
            if connection.head_came:
                return
    connection.send_more(b"", last=True)


def _message(
    destination: _Destination, headers: Mapping[str, str], body: bytes | AsyncIterable[bytes] | None
) -> _Message:
    """In one piece unless it is large."""
    told = "".join([f"{name}: {checked_text(value)}\r\n" for name, value in headers.items()])
    if body is None or isinstance(body, bytes):
        length = f"content-length: {len(body)}\r\n" if body is not None else ""
        head = b"%b%b\r\n" % (destination.head, (told + length).encode())
        if body is None or len(body) <= _ONE_PACKET_BYTES:
            return [head + (body or b"")], None
        return ([head, body], None) if len(body) <= _PIECE_BYTES else ([head], _pieces(body))
    length = next((value for name, value in headers.items() if name.lower() == "content-length"), "")
    if length:
        return [b"%b%b\r\n" % (destination.head, told.encode())], _exactly(int(length), body)
    head = b"%b%b\r\n" % (destination.head, f"{told}transfer-encoding: chunked\r\n".encode())
    return [head], _chunks(body)


async def _pieces(body: bytes) -> AsyncGenerator[memoryview, None]:
    view = memoryview(body)
    for at in range(0, len(view), _PIECE_BYTES):
        yield view[at : at + _PIECE_BYTES]


async def _chunks(body: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in body:
        if piece:
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


async def _exactly(size: int, body: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """As much as was promised: what is too much would be taken for the next request."""
    left = size
    async for piece in body:
        left -= len(piece)
        if left < 0:
            break
        yield piece
    if left:
        raise TransportError("invalid_request", f"the body is not of {size} bytes, as its content-length says")
