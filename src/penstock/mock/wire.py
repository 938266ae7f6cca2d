"""HTTP/1.1 as the mock speaks it: bytes to requests, answers to bytes. No sockets in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus

import httptools

from penstock.config import KIB, MIB

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class WireLimits:
    header_max_bytes: int = 32 * KIB
    """Bound for the fields of a head, for the trailer of a chunked body, and for a line between chunks."""
    body_max_bytes: int = 64 * MIB


class WireError(Exception):
    """Bytes that are not a request the mock can serve; the connection cannot be used any further."""

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
    """Reader that takes bytes as they come and gives whole requests, in order. Its `on_` methods are called by the
    parser."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._unread = b""
        self._whole: deque[Request] = deque()
        self._error: WireError | None = None
        self._bare_bytes = 0
        """Bytes since the last piece of a body or the last end of a head or request."""
        self.wants_continue = False
        """Whether the client holds its body back until the mock sends 100-continue."""
        self.on_message_begin()

    @property
    def buffered_bytes(self) -> int:
        return len(self._unread)

    def feed(self, data: bytes) -> None:
        self._unread = self._unread + data if self._unread else data

    def next(self) -> Request | None:
        """The next whole request, or None until more bytes came. Raises WireError."""
        if self._unread and not self._whole:
            self._parse()
        if self._whole:
            return self._whole.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _parse(self) -> None:
        data, self._unread = self._unread, b""
        # The parser does not say how far it came. In pieces of this size, no head or trailer within the limit is
        # refused, and none that is twice as long is waited for.
        step = self._limits.header_max_bytes
        try:
            for at in range(0, len(data), step):
                piece = data[at : at + step]
                self._bare_bytes += len(piece)
                self._parser.feed_data(piece)
                if self._bare_bytes > step:
                    self._refuse_long()
        except WireError as error:
            self._error = error
        except httptools.HttpParserCallbackError as error:
            raised = error.__context__
            if not isinstance(raised, WireError):
                raise
            self._error = raised
        except httptools.HttpParserError as error:
            self._error = _bad(f"The request is malformed: {error}.")

    def _refuse_long(self) -> None:
        if self._request is not None and not self._field_bytes:
            raise _bad("A line between chunks is too long.")
        part = "header" if self._request is None else "trailer"
        raise WireError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"The {part} is longer than {self._limits.header_max_bytes} bytes.",
        )

    def on_message_begin(self) -> None:
        self._request: Request | None = None
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._field_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._field_bytes += len(name) + len(value)
        if self._field_bytes > self._limits.header_max_bytes:
            self._refuse_long()
        if self._request is not None:
            return  # a trailer's fields are not read
        name, value = name.lower(), value.rstrip()
        if name in self._headers:
            value = self._headers[name] + b", " + value
        self._headers[name] = value

    def on_headers_complete(self) -> None:
        headers, version = self._headers, self._parser.get_http_version()
        modern = version != "1.0"
        if version == "0.9":  # the parser's version for a request line without one
            raise _bad("The request line is malformed.")
        if not version.startswith("1."):
            raise WireError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "Only HTTP/1.1 is spoken here.")
        if self._parser.should_upgrade():
            raise WireError(HTTPStatus.NOT_IMPLEMENTED, "No other protocol is spoken here: send no Upgrade.")
        if modern and b"host" not in headers:
            raise _bad("The Host header is missing.")
        length, encoding = headers.get(b"content-length"), headers.get(b"transfer-encoding")
        if encoding is not None and not modern:
            raise _bad("Transfer-Encoding does not go with HTTP/1.0.")
        if encoding is not None and encoding.lower() != b"chunked":
            raise WireError(HTTPStatus.NOT_IMPLEMENTED, "The only transfer encoding known here is chunked.")
        if length is not None and int(length) > self._limits.body_max_bytes:
            raise _too_large(self._limits)
        expect = headers.get(b"expect")
        if expect is not None and modern:
            if expect.lower() != b"100-continue":
                raise WireError(HTTPStatus.EXPECTATION_FAILED, "The only expectation known here is 100-continue.")
            self.wants_continue = True
        try:
            url = httptools.parse_url(self._target)
            path, query = (url.path or b"/").decode("ascii"), (url.query or b"").decode("ascii")
        except (httptools.HttpParserInvalidURLError, UnicodeDecodeError):
            raise _bad("The request line is malformed.") from None
        self._request = Request(
            method=self._parser.get_method().decode("ascii"),
            path=path,
            query=query,
            headers=headers,
            keep_alive=self._parser.should_keep_alive(),
            chunked_answers=modern,
            has_body=length is not None or encoding is not None,
        )
        self._field_bytes = self._bare_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_max_bytes:
            raise _too_large(self._limits)
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None  # noqa: S101  (a request ends after its head)
        request.body = b"".join(self._body)
        self._whole.append(request)
        self._bare_bytes = 0
        self.wants_continue = False


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
