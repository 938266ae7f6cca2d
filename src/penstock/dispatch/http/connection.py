"""One connection to an upstream, with one request at a time on it: HTTP/1.1 as it comes off the wire."""

from __future__ import annotations

import asyncio
import re
import ssl
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import httptools

from penstock.config import KIB, DispatchLimits
from penstock.dispatch.http.countdown import Countdown
from penstock.dispatch.http.errors import TransportError, too_large
from penstock.dispatch.http.tls import explain_alert

# Before an answer, and between and after its pieces: heads, interim answers, trailers.
_MAX_BARE_BYTES = 256 * KIB
_MAX_UNREAD_BYTES = 256 * KIB
_MAX_MEMBERS = 100
_FEW_HEADERS = 20
_STATUSES = range(100, 600)
_UNSENDABLE = re.compile(r"[^\t\x20-\x7e]")
_PACKINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}


class HttpConnection(asyncio.Protocol):
    """`first_byte` and `idle` time the task of a request that waits for the whole answer."""

    transport: asyncio.Transport

    def __init__(
        self, limits: DispatchLimits, first_byte: Countdown, idle: Countdown, on_end: Callable[[HttpConnection], None]
    ) -> None:
        self._limits = limits
        self._first_byte = first_byte
        self._idle = idle
        self._on_end = on_end
        self._cut = False
        self._closed = False
        self._full = False
        self._more = bytearray()
        self._waiting: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.rest()

    def rest(self) -> None:
        """Between two requests: whatever comes now was not asked for."""
        self._asked = False
        self._sent = True
        self._task: asyncio.Task[Any] | None = None
        self._fault: TransportError | None = None
        self._bare_bytes = 0
        self._interim = False
        self._framed = False
        self._clean = True
        self._paused = False
        self._size = 0
        self._first = b""
        if self._more:
            self._more = bytearray()
        self._unpacker: _Unpacker | None = None
        self.head_came = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.whole = False

    @property
    def usable(self) -> bool:
        return not self._closed and not self._cut and not self.transport.is_closing()

    @property
    def reusable(self) -> bool:
        ready = self.whole and self._clean and self._sent and not self._paused and self.usable
        return ready and not self.transport.get_write_buffer_size()

    def send(self, message: list[bytes], task: asyncio.Task[Any] | None) -> None:
        """Begin a request. Every piece of the answer wakes the caller; with a `task`, whose countdowns are kept here,
        only the whole answer does."""
        self._asked = True
        self._task = task
        if len(message) == 1:
            self.transport.write(message[0])
        else:
            self.transport.writelines(message)

    def send_more(self, piece: bytes | memoryview, *, last: bool = False) -> None:
        """More of the request under way."""
        self._sent = last
        if piece:
            self.transport.write(piece)

    async def room(self) -> None:
        """Until more can be sent, or the answer begins, after which no more need be."""
        if self._fault is not None:
            raise self._fault
        while self._full and not self.head_came:
            await self.change()

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

    @property
    def has_content(self) -> bool:
        return bool(self._first)

    def content(self) -> bytes:
        """What has come since the last look."""
        if self._paused and self.usable:
            self._paused = False
            self.transport.resume_reading()
        # Nearly always all has come at once.
        content = self._first
        if self._more:
            content += self._more
            self._more = bytearray()
        self._first = b""
        return content

    def cut(self) -> None:
        """Close, without waiting for anything."""
        self._cut = True
        if not self._closed:
            self.transport.abort()
        self._on_end(self)

    def fail(self, code: str, message: str) -> None:
        self._break_off(TransportError(code, message))

    def _break_off(self, fault: TransportError) -> None:
        if self._fault is None and not self.whole:
            self._fault = fault
            self._wake()
        self.cut()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    # -- what the event loop says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._asked or self.whole:
            self.cut()
            return
        self._bare_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail("protocol_error", "it changed the protocol unasked")
        except httptools.HttpParserError as error:
            self.fail("protocol_error", str(error) or type(error).__name__)
        if self._bare_bytes > _MAX_BARE_BYTES:
            self.fail("protocol_error", f"more than {_MAX_BARE_BYTES} bytes that are no part of an answer")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._on_end(self)
        if exc is None and not self._cut and self.head_came and not self._framed and self._ended_by_peer():
            self._end()  # it ends where the connection does
            return
        said = str(exc) if exc is not None else "the connection closed before the answer's end"
        self._break_off(explain_alert(exc) or TransportError("connection_reset", said))

    def _ended_by_peer(self) -> bool:
        """Whether the other side said that this is the end. With TLS a bare end may be anybody's doing."""
        tls: ssl.SSLObject | None = self.transport.get_extra_info("ssl_object")
        if tls is None:
            return True
        try:
            return not tls.read(1)
        except ssl.SSLZeroReturnError:
            return True
        except ssl.SSLError:
            return False

    # -- what the parser says

    def on_message_begin(self) -> None:
        if self.whole:
            self._clean = False  # what follows the answer is not part of it, nor of the next

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_came:  # those after a body are not read
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.whole:
            return
        status: int = self._parser.get_status_code()
        if status not in _STATUSES:
            # Nobody could be answered with it, and one below 100 would be waited on as if an answer followed.
            self.fail("protocol_error", f"HTTP {status:03d} is no status")
            return
        if status < 200:
            self._interim = True
            self.headers = []
            return
        self.status = status
        self.head_came = True
        self._framed = self._clean = self._parser.should_keep_alive()
        for name, value in self.headers:
            lowered = name.lower()
            if lowered == b"content-length" or (lowered == b"transfer-encoding" and b"chunked" in value.lower()):
                self._framed = True
            elif lowered == b"content-encoding":
                self._expect_packed(value.strip().lower())
        if self._task is not None:
            self._first_byte.leave(self._task)
            self._idle.start(self._task)
        if self._task is None or self._full:
            self._wake()

    def on_body(self, body: bytes) -> None:
        if self.whole or self._interim or self._fault is not None:
            return
        if self._unpacker is not None:
            try:
                body = self._unpacker.unpack(body, self._limits.max_response_bytes - self._size + 1)
            except zlib.error as error:
                self.fail("protocol_error", f"the answer cannot be unpacked: {error}")
                return
        if not body:
            return
        self._bare_bytes = 0
        self._size += len(body)
        if self._size > self._limits.max_response_bytes:
            self._break_off(too_large(self.status, self._limits))
            return
        if self._first:
            self._more += body
        else:
            self._first = body
        if self._task is not None:
            self._idle.start(self._task)
            return
        if len(self._first) + len(self._more) > _MAX_UNREAD_BYTES and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif self.head_came and not self.whole and self._fault is None:
            self._end()

    def _end(self) -> None:
        if self._unpacker is not None and not self._unpacker.whole:
            self.fail("protocol_error", "the packed answer breaks off")
            return
        self._bare_bytes = 0
        self.whole = True
        self._wake()

    def _expect_packed(self, coding: bytes) -> None:
        if coding in (b"", b"identity"):
            return
        if coding not in _PACKINGS:
            self.fail("protocol_error", f"an answer packed as {coding[:20].decode('latin-1')!r} was not asked for")
            return
        self._unpacker = _Unpacker(_PACKINGS[coding])


def checked_text(text: str) -> str:
    """A part of a request's header. The value is left out of the message: it may be a secret."""
    if _UNSENDABLE.search(text):
        raise TransportError("invalid_request", "a header contains a line break or another character it cannot hold")
    return text


class _Unpacker:
    """What was packed although nobody asked for it, in one member or several."""

    def __init__(self, form: int) -> None:
        self._form = form
        self._member = zlib.decompressobj(form)
        self._members = 0

    @property
    def whole(self) -> bool:
        return self._member.eof or not self._members

    def unpack(self, packed: bytes, most: int) -> bytes:
        """At most so many bytes, which is more than may come: what is left over then no longer matters."""
        content = b""
        while packed and len(content) < most:
            if self.whole:
                self._members += 1
                if self._members > _MAX_MEMBERS:
                    raise zlib.error("it has too many members")
                self._member = zlib.decompressobj(self._form)
            content += self._member.decompress(packed, most - len(content))
            packed = self._member.unused_data
        return content


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
                    self._read.setdefault(name.decode().lower(), value.decode().strip())
        return self._read

    def __getitem__(self, name: str) -> str:
        if self._read is None and len(self._raw) < _FEW_HEADERS:
            wanted = name.encode()
            for each, value in self._raw:
                if each.lower() == wanted and value.isascii():
                    return value.decode().strip()
            raise KeyError(name)
        return self._all[name]

    def mention(self, texts: tuple[bytes, ...]) -> bool:
        """Whether one of these texts is in any header."""
        return any(
            text in value or (len(name) >= len(text) and text.lower() in name.lower())
            for text in texts
            for name, value in self._raw
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
