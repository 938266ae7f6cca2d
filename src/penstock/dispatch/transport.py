"""HTTP clients behind one small protocol, and the one for encrypted connections.

See docs/adr/0003-http-client.md for that choice, and docs/adr/0009-plain-http.md for the other client (`direct.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from pyreqwest.client import ClientBuilder
from pyreqwest.exceptions import (
    ConnectError,
    DetailedPyreqwestError,
    NetworkError,
    RequestTimeoutError,
)
from pyreqwest.http import HeaderMap
from pyreqwest.request import StreamRequest
from pyreqwest.response import Response

from penstock.config import DispatchLimits
from penstock.dispatch.answer import Answer

# Every connection stays with us until it has been idle for long: the dispatcher bounds their number.
_UNLIMITED_IDLE = 2**31
_CONNECTING = "client error (Connect)"
_BROKEN_OFF = ("end of file", "unexpected eof", "reset", "broken pipe", "closed", "aborted")


class TransportError(Exception):
    """No whole answer came. `code` is one of the documented error codes."""

    def __init__(self, code: str, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status_code = status_code


class Transport(Protocol):
    """One request at a time per caller, any number of callers.

    An implementation follows no redirect, reads no proxy from the environment, keeps no cookie,
    retries nothing, and holds at most `max_response_bytes` of an answer, counted after decompression.
    """

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """A whole answer, or TransportError."""

    async def close(self) -> None: ...


@runtime_checkable
class StreamingTransport(Protocol):
    """A transport that can also hand out answers as they come."""

    def open(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> OpenAnswer: ...


class OpenAnswer(Protocol):
    """An answer whose head has come once it is entered. Everything may raise TransportError."""

    status: int
    headers: Mapping[str, str]

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The body in pieces, as they arrive."""

    async def read(self) -> bytes:
        """All that is left of the body."""


class Countdown:
    """One time limit for many tasks with one timer: as all have the same limit, the first to start
    is the first to run out. A timer for each request would cost a tenth of the request."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._started: dict[asyncio.Task[Any], float] = {}
        self._expired: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, task: asyncio.Task[Any]) -> None:
        self._started.pop(task, None)
        self._started[task] = monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._check)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Do not count any longer. If the time was up already, `claims` still finds out."""
        self._started.pop(task, None)

    def stop(self, task: asyncio.Task[Any]) -> None:
        self._started.pop(task, None)
        if task in self._expired:  # the client answered with something else than the cancellation
            self._expired.discard(task)
            task.uncancel()

    def claims(self, task: asyncio.Task[Any]) -> bool:
        """Whether a cancellation just caught in `task` came from here; if so it is undone."""
        if task not in self._expired:
            return False
        self._expired.discard(task)
        return task.uncancel() == 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        now = monotonic()
        for task, started in list(self._started.items()):
            remaining_s = started + self.limit_s - now
            if remaining_s > 0:
                self._timer = asyncio.get_running_loop().call_later(remaining_s, self._check)
                return
            del self._started[task]
            self._expired.add(task)
            task.cancel()


class PyreqwestTransport:
    """reqwest, a Rust client, on a thread of its own."""

    def __init__(self, limits: DispatchLimits, default_headers: Mapping[str, str]) -> None:
        self._limits = limits
        self._first_byte = Countdown(limits.first_byte_timeout_s)
        self._idle = Countdown(limits.idle_timeout_s)
        # A task cancelled before the answer's head has come leaves its request running inside the
        # client. These two end it there, so the client's own limits must not be left out.
        longest_silence_s = max(limits.first_byte_timeout_s, limits.idle_timeout_s)
        self._client = (
            ClientBuilder()
            .timeout(timedelta(seconds=limits.attempt_timeout_s))
            .read_timeout(timedelta(seconds=longest_silence_s))
            .connect_timeout(timedelta(seconds=limits.connect_timeout_s))
            .no_proxy()
            .follow_redirects(False)
            .referer(False)
            .default_cookie_store(False)
            .max_connections(None)
            .pool_max_idle_per_host(_UNLIMITED_IDLE)
            .default_headers(dict(default_headers))
            .build()
        )

    async def close(self) -> None:
        self._first_byte.close()
        self._idle.close()
        await self._client.close()

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request needs a task to be timed in")
        started = monotonic()
        head_came = False
        try:
            request = self._build(method, url, headers, body)
            self._first_byte.start(task)
            async with request as response:
                head_came = True
                self._first_byte.stop(task)
                content = await self._read(response, task)
                return Answer(response.status, content, _Headers(response.headers), int((monotonic() - started) * 1000))
        except asyncio.CancelledError:
            if self._first_byte.claims(task):
                raise timed_out("first_byte_timeout", self._limits) from None
            if self._idle.claims(task):
                raise timed_out("idle_timeout", self._limits) from None
            raise
        except RequestTimeoutError as error:
            raise self.client_timed_out(error, head_came, monotonic() - started) from None
        except (DetailedPyreqwestError, ValueError) as error:
            raise _translate(error) from None
        finally:
            self._first_byte.stop(task)
            self._idle.stop(task)

    def open(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> OpenAnswer:
        return _OpenAnswer(self, self._build(method, url, headers, body), self._limits)

    def _build(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> StreamRequest:
        builder = self._client.request(method, url).headers(headers)
        if body is not None:
            builder = builder.body_bytes(body)
        # 0: give us the head when it is there. Otherwise the client first fills a buffer, during
        # which neither limit can tell silence before the answer from silence inside it.
        return builder.streamed_read_buffer_limit(0).build_streamed()

    async def _read(self, response: Response, task: asyncio.Task[Any]) -> bytes:
        cap = self._limits.max_response_bytes
        reader = response.body_reader
        content = b""
        more = bytearray()
        while True:
            self._idle.start(task)
            piece = await reader.read_chunk()
            if piece is None:
                return content + more if more else content
            if not content:
                content = piece.to_bytes()  # nearly always all there is
            else:
                more += piece
            if len(content) + len(more) > cap:
                raise too_large(response.status, self._limits)

    def client_timed_out(self, error: RequestTimeoutError, head_came: bool, lasted_s: float) -> TransportError:
        # The class says "connect" of anything before the head; the causes know.
        if _CONNECTING in _causes(error):
            limit_s = self._limits.connect_timeout_s
            return TransportError("connect_timeout", f"no connection within {limit_s:g} s (connect_timeout_s)")
        if lasted_s >= self._limits.attempt_timeout_s:
            return timed_out("request_timeout", self._limits)
        return timed_out("idle_timeout" if head_came else "first_byte_timeout", self._limits)


class _OpenAnswer:
    """An answer of reqwest, read as it comes."""

    status = 0
    headers: Mapping[str, str] = {}

    def __init__(self, transport: PyreqwestTransport, request: StreamRequest, limits: DispatchLimits) -> None:
        self._transport = transport
        self._request = request
        self._limits = limits
        self._response: Response | None = None
        self._began = monotonic()
        self._bytes = 0

    async def __aenter__(self) -> Self:
        try:
            with self._in_our_words():
                async with asyncio.timeout(self._limits.first_byte_timeout_s):
                    self._response = await self._request.__aenter__()
        except TimeoutError:
            raise timed_out("first_byte_timeout", self._limits) from None
        self.status = self._response.status
        self.headers = _Headers(self._response.headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._request.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._piece()) is not None:
            yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self])

    async def _piece(self) -> bytes | None:
        if self._response is None:
            raise RuntimeError("the answer is not open")
        try:
            with self._in_our_words():
                async with asyncio.timeout(self._limits.idle_timeout_s):
                    piece = await self._response.body_reader.read_chunk()
        except TimeoutError:
            raise timed_out("idle_timeout", self._limits) from None
        if piece is None:
            return None
        self._bytes += len(piece)
        if self._bytes > self._limits.max_response_bytes:
            raise too_large(self.status, self._limits)
        return piece.to_bytes()

    @contextmanager
    def _in_our_words(self) -> Iterator[None]:
        try:
            yield
        except RequestTimeoutError as error:
            head_came, lasted_s = self._response is not None, monotonic() - self._began
            raise self._transport.client_timed_out(error, head_came, lasted_s) from None
        except (DetailedPyreqwestError, ValueError) as error:
            raise _translate(error) from None


def timed_out(code: str, limits: DispatchLimits) -> TransportError:
    """Which of the limits, in words."""
    if code == "first_byte_timeout":
        return TransportError(code, f"no answer within {limits.first_byte_timeout_s:g} s ({code}_s)")
    if code == "idle_timeout":
        return TransportError(code, f"the answer stopped for {limits.idle_timeout_s:g} s ({code}_s)")
    return TransportError(code, f"no whole answer within {limits.attempt_timeout_s:g} s (attempt_timeout_s)")


def too_large(status: int, limits: DispatchLimits) -> TransportError:
    message = f"HTTP {status} with more than {limits.max_response_bytes} bytes (max_response_bytes)"
    return TransportError("response_too_large", message, status)


class _Headers(Mapping[str, str]):
    """An answer's headers, read when asked for; one that is not text counts as absent."""

    def __init__(self, raw: HeaderMap) -> None:
        self._raw = raw

    def __getitem__(self, name: str) -> str:
        try:
            return self._raw[name]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Any:
        return iter(self._raw.keys())

    def __len__(self) -> int:
        return len(self._raw)


def _translate(error: Exception) -> TransportError:
    """The client's error in our words. Its last cause is the plainest, and names no URL."""
    if not isinstance(error, DetailedPyreqwestError):
        return TransportError("invalid_request", str(error))
    causes = _causes(error)
    message = causes[-1] if causes else error.message
    if isinstance(error, ConnectError) and _CONNECTING in causes:
        code = "connect_failed"
    elif isinstance(error, NetworkError) or any(word in message.lower() for word in _BROKEN_OFF):
        code = "connection_reset"
    elif isinstance(error, ValueError):
        code = "invalid_request"
    else:
        code = "protocol_error"
    return TransportError(code, message)


def _causes(error: DetailedPyreqwestError) -> list[str]:
    return [cause["message"] for cause in error.details.get("causes") or ()]
