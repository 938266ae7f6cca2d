"""HTTP/1.1 without encryption, spoken on the event loop itself. See docs/adr/0009-plain-http.md for when and why.

A call that somebody waits for spends no time on its way to another thread and back, and one that is cut short closes
its connection at once.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Self, cast
from urllib.parse import quote, urlsplit

import httptools

from penstock.config import KIB, DispatchLimits
from penstock.dispatch.answer import Answer
from penstock.dispatch.transport import Countdown, OpenAnswer, TransportError, timed_out, too_large

_MAX_HEAD_BYTES = 256 * KIB
_MAX_UNREAD_BYTES = 256 * KIB
_ONE_PACKET_BYTES = 16 * KIB
_IDLE_S = 60.0
_FEW = 20
_MAX_KNOWN_PLACES = 1_000
_KEPT_IN_TARGETS = "/%:@!$&'()*+,;=-._~?[]"
_UNSENDABLE = re.compile(r"[^\t\x20-\x7e]")
_PACKINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class _Place(NamedTuple):
    """Where a URL leads."""

    host: str
    port: int
    head: bytes
    """How every request to it begins."""


class DirectTransport:
    """Keeps connections for as long as they are used now and then."""

    def __init__(self, limits: DispatchLimits, default_headers: Mapping[str, str]) -> None:
        self.limits = limits
        self.attempt = Countdown(limits.attempt_timeout_s)
        self.first_byte = Countdown(limits.first_byte_timeout_s)
        self.idle = Countdown(limits.idle_timeout_s)
        self._default_headers = dict(default_headers)
        self._places: dict[tuple[str, str], _Place] = {}
        self._idle_lines: dict[tuple[str, int], deque[tuple[_Line, float]]] = {}
        self._lines: set[_Line] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        for countdown in (self.attempt, self.first_byte, self.idle):
            countdown.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for line in tuple(self._lines):
            line.cut()

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request needs a task to be timed in")
        started = monotonic()
        self.attempt.start(task)
        try:
            line = await self.line(method, url)
            try:
                self.first_byte.start(task)
                line.send(self.message(method, url, headers, body), task)
                while not line.whole:
                    await line.change()
                lasted_ms = int((monotonic() - started) * 1000)
                return Answer(line.status, line.content(), Headers(line.headers), lasted_ms)
            finally:
                self.put_back(line)
        except asyncio.CancelledError:
            for countdown, code in (
                (self.first_byte, "first_byte_timeout"),
                (self.idle, "idle_timeout"),
                (self.attempt, "request_timeout"),
            ):
                if countdown.claims(task):
                    raise timed_out(code, self.limits) from None
            raise
        finally:
            self.attempt.stop(task)
            self.first_byte.stop(task)
            self.idle.stop(task)

    def open(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> OpenAnswer:
        return _OpenAnswer(self, method, url, self.message(method, url, headers, body))

    # -- what is sent

    def message(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> list[bytes]:
        """A request as it is written: in one piece unless it is large."""
        told = "".join(f"{name}: {_sendable(name, value)}\r\n" for name, value in headers.items())
        length = f"content-length: {len(body)}\r\n" if body is not None else ""
        head = b"%b%b\r\n" % (self._place(method, url).head, (told + length).encode())
        if body is None or len(body) <= _ONE_PACKET_BYTES:
            return [head + (body or b"")]
        return [head, body]

    def _place(self, method: str, url: str) -> _Place:
        try:
            return self._places[method, url]
        except KeyError:
            if len(self._places) >= _MAX_KNOWN_PLACES:
                self._places.clear()
            self._places[method, url] = place = self._locate(method, url)
            return place

    def _locate(self, method: str, url: str) -> _Place:
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode()
            port = parts.port or 80
        except ValueError as error:
            raise TransportError("invalid_request", f"not a URL: {error}") from None
        if parts.scheme != "http" or not host:
            raise TransportError("invalid_request", "not an http:// URL")
        shown = f"[{host}]" if ":" in host else host
        target = quote(parts.path or "/", safe=_KEPT_IN_TARGETS)
        if parts.query:
            target += "?" + quote(parts.query, safe=_KEPT_IN_TARGETS)
        lines = [f"{method} {target} HTTP/1.1", f"host: {shown}" + (f":{port}" if port != 80 else "")]
        lines += ["accept-encoding: identity", *(f"{n}: {_sendable(n, v)}" for n, v in self._default_headers.items())]
        if not any(name.lower() == "accept" for name in self._default_headers):
            lines.append("accept: */*")
        return _Place(host, port, ("\r\n".join(lines) + "\r\n").encode())

    # -- connections

    async def line(self, method: str, url: str) -> _Line:
        """A connection that nobody uses, or a new one."""
        place = self._place(method, url)
        waiting = self._idle_lines.get((place.host, place.port))
        while waiting:
            line, _ = waiting.pop()
            if line.usable:
                return line
        return await self._connect(place)

    async def _connect(self, place: _Place) -> _Line:
        limit_s = self.limits.connect_timeout_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                _, line = await loop.create_connection(lambda: _Line(self), place.host, place.port)
        except TimeoutError:
            raise TransportError("connect_timeout", f"no connection within {limit_s:g} s (connect_timeout_s)") from None
        except OSError as error:
            raise TransportError("connect_failed", error.strerror or str(error)) from None
        line.place = (place.host, place.port)
        self._lines.add(line)
        return line

    def put_back(self, line: _Line) -> None:
        """It is kept if it can serve again, and closed otherwise."""
        if not line.reusable:
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

    def forget(self, line: _Line) -> None:
        self._lines.discard(line)


class _Line(asyncio.Protocol):
    """One connection, with one request at a time on it."""

    _transport: asyncio.Transport

    def __init__(self, owner: DirectTransport) -> None:
        self._owner = owner
        self.place = ("", 0)
        self._closed = False
        self._waiting: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.rest()

    def rest(self) -> None:
        """Between two requests: whatever comes now was not asked for."""
        self._asked = False
        self._task: asyncio.Task[Any] | None = None
        self._fault: TransportError | None = None
        self._head_bytes = 0
        self._head_done = False
        self._interim = False
        self._framed = False
        self._clean = True
        self._paused = False
        self._size = 0
        self._unread = 0
        self._unpacker: _Unpacker | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: deque[bytes] = deque()
        self.whole = False

    @property
    def usable(self) -> bool:
        return not self._closed and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        return self.whole and self._clean and self.usable and not self._transport.get_write_buffer_size()

    @property
    def head_came(self) -> bool:
        return self._head_done

    def send(self, message: list[bytes], task: asyncio.Task[Any] | None) -> None:
        """With a `task`, it is told when the answer is whole, and its countdowns are kept; else of every piece."""
        self._asked = True
        self._task = task
        if len(message) == 1:
            self._transport.write(message[0])
        else:
            self._transport.writelines(message)

    async def change(self) -> None:
        """Until there is more to know. Raises TransportError if nothing more will come."""
        if self._fault is None and not self.whole:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        if self._fault is not None:
            raise self._fault

    def content(self) -> bytes:
        """What has come since the last look."""
        self._unread = 0
        if self._paused and self.usable:
            self._paused = False
            self._transport.resume_reading()
        content = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        self.pieces.clear()
        return content

    def cut(self) -> None:
        if not self._closed:
            self._transport.abort()
        self._owner.forget(self)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _fail(self, code: str, message: str) -> None:
        self._break_off(TransportError(code, message))

    def _break_off(self, fault: TransportError) -> None:
        if self._fault is None and not self.whole:
            self._fault = fault
            self._wake()
        self._clean = False
        self.cut()

    # -- what the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._asked or self.whole:
            self._clean = False
            self.cut()
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("protocol_error", "it changed the protocol unasked")
        except httptools.HttpParserError as error:
            self._fail("protocol_error", str(error) or type(error).__name__)
        if not self._head_done and self._head_bytes > _MAX_HEAD_BYTES:
            self._fail("protocol_error", f"more than {_MAX_HEAD_BYTES} bytes before the answer")

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._owner.forget(self)
        if not self._asked or self.whole:
            return
        if exc is None and self._head_done and not self._framed and self._fault is None:
            self._end()  # it ends where the connection does
            return
        self._fail("connection_reset", str(exc) if exc is not None else "the connection closed before the answer's end")

    # -- what the parser says

    def on_message_begin(self) -> None:
        if self.whole:
            self._clean = False  # what follows the answer is not part of it, nor of the next

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.whole:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.whole:
            return
        status: int = self._parser.get_status_code()
        if status < 200:
            self._interim = True
            self.headers = []
            return
        self.status = status
        self._head_done = True
        self._framed = self._clean = self._parser.should_keep_alive()
        for name, value in self.headers:
            lowered = name.lower()
            if lowered == b"content-length" or (lowered == b"transfer-encoding" and b"chunked" in value.lower()):
                self._framed = True
            elif lowered == b"content-encoding":
                self._expect_packed(value.strip().lower())
        if self._task is not None:
            self._owner.first_byte.stop(self._task)
            self._owner.idle.start(self._task)
        else:
            self._wake()

    def on_body(self, body: bytes) -> None:
        if self.whole or self._fault is not None:
            return
        limits = self._owner.limits
        if self._unpacker is not None:
            try:
                body = self._unpacker.unpack(body, limits.max_response_bytes - self._size + 1)
            except zlib.error as error:
                self._fail("protocol_error", f"the answer cannot be unpacked: {error}")
                return
        self._size += len(body)
        if self._size > limits.max_response_bytes:
            self._break_off(too_large(self.status, limits))
            return
        self.pieces.append(body)
        if self._task is not None:
            self._owner.idle.start(self._task)
            return
        self._unread += len(body)
        if self._unread > _MAX_UNREAD_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif self._head_done and self._fault is None:
            self._end()

    def _end(self) -> None:
        if self._unpacker is not None and not self._unpacker.whole:
            self._fail("protocol_error", "the packed answer breaks off")
            return
        self.whole = True
        self._wake()

    def _expect_packed(self, coding: bytes) -> None:
        if coding in (b"", b"identity"):
            return
        if coding not in _PACKINGS:
            self._fail("protocol_error", f"an answer packed as {coding[:20].decode('latin-1')!r} was not asked for")
            return
        self._unpacker = _Unpacker(_PACKINGS[coding])


class _Unpacker:
    """What was packed although nobody asked for it, in one member or several."""

    def __init__(self, form: int) -> None:
        self._form = form
        self._fed = False
        self._member = zlib.decompressobj(form)

    @property
    def whole(self) -> bool:
        return self._member.eof or not self._fed

    def unpack(self, packed: bytes, most: int) -> bytes:
        """At most so many bytes, which is more than may come: what is left over then no longer matters."""
        self._fed = True
        content = self._member.decompress(packed, most)
        while self._member.eof and self._member.unused_data and len(content) < most:
            packed = self._member.unused_data
            self._member = zlib.decompressobj(self._form)
            content += self._member.decompress(packed, most - len(content))
        return content


class _OpenAnswer:
    """An answer read as it comes."""

    status = 0
    headers: Mapping[str, str] = {}

    def __init__(self, transport: DirectTransport, method: str, url: str, message: list[bytes]) -> None:
        self._transport = transport
        self._method = method
        self._url = url
        self._message = message
        self._line: _Line | None = None

    async def __aenter__(self) -> Self:
        limits = self._transport.limits
        self._ends_at = monotonic() + limits.attempt_timeout_s
        self._line = line = await self._transport.line(self._method, self._url)
        try:
            line.send(self._message, None)
            while not line.head_came:
                await self._change(line, "first_byte_timeout", limits.first_byte_timeout_s)
        except BaseException:
            line.cut()
            raise
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
            if line.pieces:
                yield line.content()
            elif line.whole:
                return
            else:
                await self._change(line, "idle_timeout", self._transport.limits.idle_timeout_s)

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self])

    async def _change(self, line: _Line, code: str, limit_s: float) -> None:
        left_s = self._ends_at - monotonic()
        try:
            async with asyncio.timeout(min(limit_s, max(0.0, left_s))):
                await line.change()
        except TimeoutError:
            raise timed_out(code if limit_s < left_s else "request_timeout", self._transport.limits) from None


class Headers(Mapping[str, str]):
    """An answer's headers, read when asked for; one that is not text counts as absent. Of two the first counts."""

    def __init__(self, raw: list[tuple[bytes, bytes]]) -> None:
        self._raw = raw
        self._read: dict[str, str] | None = None

    @property
    def _all(self) -> dict[str, str]:
        if self._read is None:
            self._read = {}
            for name, value in self._raw:
                if name.isascii() and value.isascii():
                    self._read.setdefault(name.decode().lower(), value.decode())
        return self._read

    def __getitem__(self, name: str) -> str:
        if self._read is None and len(self._raw) < _FEW:
            wanted = name.encode()
            for each, value in self._raw:
                if each.lower() == wanted and value.isascii():
                    return value.decode()
            raise KeyError(name)
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _sendable(name: str, value: str) -> str:
    if _UNSENDABLE.search(value) or _UNSENDABLE.search(name):
        raise TransportError("invalid_request", f"the header {name[:50]!r} cannot be sent")
    return value
