"""HTTP/1.1 as the mock speaks it: bytes to requests, answers to bytes. No sockets in here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus

from penstock.config import KIB, MIB

CHUNK_LINE_MAX_BYTES = 1 * KIB

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/(\d)\.(\d)")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_ABSOLUTE = re.compile(r"https?://[^/?]*", re.IGNORECASE)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class WireLimits:
    header_max_bytes: int = 32 * KIB
    body_max_bytes: int = 64 * MIB


class WireError(Exception):
    """The bytes are no request we can serve; the connection cannot be used any further."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(slots=True)
class Request:
    method: str
    path: str
    query: str
    headers: dict[bytes, bytes]
    keep_alive: bool
    chunked_answers: bool
    """Whether the client understands a chunked answer: HTTP/1.0 does not."""
    has_body: bool
    body: bytes = b""


class RequestReader:
    """Takes bytes as they come and gives whole requests, in order."""

    __slots__ = ("_buffer", "_chunks", "_length", "_limits", "_request", "wants_continue")

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._request: Request | None = None
        self._chunks: _Chunks | None = None
        self._length = 0
        self.wants_continue = False
        """The client holds its body back until it is told to go on."""

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> Request | None:
        """The next whole request, or None until more bytes came. Raises WireError."""
        request = self._request
        if request is None:
            request = self._request = self._take_head()
            if request is None:
                return None
        buffer = self._buffer
        if self._chunks is not None:
            if not self._chunks.take(buffer):
                return None
            request.body = bytes(self._chunks.body)
            self._chunks = None
        elif length := self._length:
            if len(buffer) < length:
                return None
            request.body = bytes(buffer[:length])
            del buffer[:length]
        self._request = None
        self.wants_continue = False
        return request

    def _take_head(self) -> Request | None:
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):  # RFC 9112, 2.2: old clients send one after a body
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n")
        if end > self._limits.header_max_bytes or (end < 0 and len(buffer) > self._limits.header_max_bytes):
            raise WireError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The header is longer than {self._limits.header_max_bytes} bytes.",
            )
        if end < 0:
            if b"\n\n" in buffer:
                raise _bad("Lines must end in CRLF.")
            return None
        lines = bytes(buffer[:end]).split(b"\r\n")
        del buffer[: end + 4]
        return self._read_head(lines)

    def _read_head(self, lines: list[bytes]) -> Request:
        match = _REQUEST_LINE.fullmatch(lines[0])
        if match is None:
            raise _bad("The request line is malformed.")
        method, target, major, minor = match.groups()
        if major != b"1":
            raise WireError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "Only HTTP/1.1 is spoken here.")
        modern = minor != b"0"
        headers = _read_fields(lines)
        if modern and b"host" not in headers:
            raise _bad("The Host header is missing.")
        has_body = self._frame(headers, modern)
        connection = headers.get(b"connection", b"").lower()
        path, _, query = _ABSOLUTE.sub("", target.decode("ascii"), count=1).partition("?")
        return Request(
            method=method.decode("ascii"),
            path=path or "/",
            query=query,
            headers=headers,
            keep_alive=b"close" not in connection if modern else b"keep-alive" in connection,
            chunked_answers=modern,
            has_body=has_body,
        )

    def _frame(self, headers: dict[bytes, bytes], modern: bool) -> bool:
        """Finds how the body is delimited. Anything two parsers could read differently is refused."""
        encoding = headers.get(b"transfer-encoding")
        length = headers.get(b"content-length")
        self._length = 0
        if encoding is not None:
            if length is not None or not modern:
                raise _bad("Transfer-Encoding goes with neither Content-Length nor HTTP/1.0.")
            if encoding.lower() != b"chunked":
                raise WireError(HTTPStatus.NOT_IMPLEMENTED, "The only transfer encoding known here is chunked.")
            self._chunks = _Chunks(self._limits)
        elif length is not None:
            if not length.isdigit() or len(length) > 15:
                raise _bad("Content-Length is not a number.")
            self._length = int(length)
            if self._length > self._limits.body_max_bytes:
                raise _too_large(self._limits)
        expect = headers.get(b"expect")
        if expect is not None and modern:
            if expect.lower() != b"100-continue":
                raise WireError(HTTPStatus.EXPECTATION_FAILED, "The only expectation known here is 100-continue.")
            self.wants_continue = True
        return encoding is not None or length is not None


def _read_fields(lines: list[bytes]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in lines[1:]:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise _bad("A header line is malformed.")
        name, value = match[1].lower(), match[2].rstrip()
        if name not in headers:
            headers[name] = value
        elif name != b"content-length":
            headers[name] += b", " + value
        elif headers[name] != value:
            raise _bad("Content-Length is given twice and differs.")
    return headers


class _Part(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()


class _Chunks:
    """A chunked body, taken out of a growing buffer as far as it goes."""

    __slots__ = ("_left", "_limits", "_part", "_trailer_bytes", "body")

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._part = _Part.SIZE
        self._left = 0
        self._trailer_bytes = 0
        self.body = bytearray()

    def take(self, buffer: bytearray) -> bool:
        """Whether the body is complete."""
        while True:
            if self._part is _Part.DATA:
                piece = buffer[: self._left]
                del buffer[: self._left]
                self.body += piece
                self._left -= len(piece)
                if self._left:
                    return False
                self._part = _Part.DATA_END
            elif self._part is _Part.DATA_END:
                if len(buffer) < 2:
                    return False
                if not buffer.startswith(b"\r\n"):
                    raise _bad("A chunk is longer than its size says.")
                del buffer[:2]
                self._part = _Part.SIZE
            else:
                line = self._take_line(buffer)
                if line is None:
                    return False
                if self._part is _Part.SIZE:
                    self._read_size(line)
                elif not line:
                    return True
                else:
                    self._skip_trailer(line)

    def _take_line(self, buffer: bytearray) -> bytes | None:
        end = buffer.find(b"\r\n", 0, CHUNK_LINE_MAX_BYTES)
        if end < 0:
            if len(buffer) >= CHUNK_LINE_MAX_BYTES:
                raise _bad("A line between chunks is too long.")
            return None
        line = bytes(buffer[:end])
        del buffer[: end + 2]
        return line

    def _read_size(self, line: bytes) -> None:
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise _bad("A chunk's size is malformed.")
        self._left = int(match[1], 16)
        if len(self.body) + self._left > self._limits.body_max_bytes:
            raise _too_large(self._limits)
        self._part = _Part.DATA if self._left else _Part.TRAILER

    def _skip_trailer(self, line: bytes) -> None:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > self._limits.header_max_bytes:
            raise WireError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "The trailer is too long.")


def _bad(message: str) -> WireError:
    return WireError(HTTPStatus.BAD_REQUEST, message)


def _too_large(limits: WireLimits) -> WireError:
    message = f"The body is longer than {limits.body_max_bytes} bytes."
    return WireError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in HTTPStatus}


def encode_head(status: int, headers: Iterable[tuple[str, str]], *, keep_alive: bool) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    end = "\r\n" if keep_alive else "connection: close\r\n\r\n"
    return _STATUS_LINES[status] + (lines + end).encode("latin-1")


def encode_chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
