"""HTTP listener: uvicorn, with bounds on request heads, and stopped by the server rather than by signals."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections import deque
from collections.abc import Generator
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NoReturn

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.config import Config
from penstock.errors import PenstockError, UsageError
from penstock.server.connections import CONNECTION, Connections
from penstock.server.head_counter import HeadCounter
from penstock.server.memory import Hold, MemoryBudget, MemoryUsedUpError

_BACKLOG = 2048
_HEADER_BYTES = len(": \r\n")
_FREE_BYTES = 8 * 1024
"""Bytes that a connection may hold uncounted: most requests are smaller, and need no arithmetic."""
_MOST_QUEUED = 64
"""Requests that a connection may have waiting behind the one that is being answered."""
_QUEUED_BYTES = 4 * 1024
"""Memory that such a request takes beside its bytes."""

_TOO_LARGE = "The request's line, headers and trailers are larger than max_head_bytes."
_VERSION = "Send this as HTTP/1.1."
_CODING = "The only 'Transfer-Encoding' is 'chunked', of HTTP/1.1."
_HOST = "A request has one 'Host'."
_PROTOCOL = "Send a request with a body without 'Upgrade': this server speaks HTTP/1.1."
_TOO_MANY = "As many clients as may be are connected (max_connections). Try again."
_TOO_MANY_QUEUED = "Too many requests at once on one connection."
_TOO_MUCH = "Requests hold as much memory as they may (request_memory_bytes). Try again."
_REFUSALS = {
    _TOO_LARGE: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    _VERSION: HTTPStatus.HTTP_VERSION_NOT_SUPPORTED,
    _CODING: HTTPStatus.NOT_IMPLEMENTED,
    _TOO_MANY: HTTPStatus.SERVICE_UNAVAILABLE,
    _TOO_MUCH: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""Statuses of refusals; of all others it is 400."""


class _RefusedError(Exception):
    """Request that the protocol refuses while it is being read."""


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is reachable from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int, *, keyless: bool) -> list[socket.socket]:
    """Bind a socket at every address of the host. Without API keys, only loopback addresses are allowed."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host}: no such address", hint="For example --host 127.0.0.1") from error
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
    if keyless:
        for _, address in addresses:
            if not is_loopback(str(address[0])):
                raise UsageError(
                    f"without API keys anybody who reaches {host or 'this machine'} could use the server",
                    hint="Make a key first (penstock keys create --role admin), or listen on --host 127.0.0.1.",
                )
    sockets: list[socket.socket] = []
    try:
        for family, address in addresses:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # All sockets are on one port, also where the system chose it.
            chosen = sockets[0].getsockname()[1] if port == 0 and len(sockets) > 1 else port
            sock.bind((address[0], chosen, *address[2:]))
            sock.setblocking(False)
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise PenstockError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="Choose another --port or --host."
        ) from error
    return sockets


class Listener(uvicorn.Server):
    """Serves the application until `should_exit`; `force_exit` does not wait for requests under way.

    `max_clients` may be connected at once. What strangers send before they show a key counts against `memory`.
    """

    def __init__(
        self, app: Any, config: Config, *, max_clients: int | None = None, memory: MemoryBudget | None = None
    ) -> None:
        limits = config.serve
        bounded = type(
            "BoundedProtocol",
            (Protocol,),
            {
                "head_timeout_s": limits.head_timeout_s,
                "max_head_bytes": limits.max_head_bytes,
                "send_timeout_s": limits.send_timeout_s,
                "clients": Connections(max_clients or limits.max_connections),
                "memory": memory or MemoryBudget(limits.request_memory_bytes),
            },
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=max(1, round(limits.keep_alive_s)),
                timeout_graceful_shutdown=max(1, round(config.liveness.drain_timeout_s)),
            )
        )

        self.listening = asyncio.Event()
        """Set once connections are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone: the whole program handles them."""
        yield


class _Flow(FlowControl):
    """Flow of a connection that is not read from while requests wait behind the one that is being answered, nor after
    the last one that will be answered."""

    def __init__(self, transport: asyncio.Transport, queued: deque[Any]) -> None:
        super().__init__(transport)
        self._queued = queued
        self.is_over = False
        """Whether nothing more is read, ever."""

    def stop_reading(self) -> None:
        self.is_over = True
        self.pause_reading()

    def resume_reading(self) -> None:
        if not self._queued and not self.is_over:
            super().resume_reading()


class Protocol(HttpToolsProtocol):
    """HTTP protocol with bounds on request heads, on their size and the time until they are whole, and on requests that
    are sent before the last one is answered. Trailers count as part of the head, and are dropped. Requests that can be
    read in two ways are refused. Bodies are bounded by the application."""

    head_timeout_s = 20.0
    max_head_bytes = 65_536
    send_timeout_s = 120.0
    clients: Connections
    memory: MemoryBudget
    flow: _Flow

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heads = HeadCounter(self.max_head_bytes)
        self._refusal = ""
        """Why the request is refused, if not by the parser."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_stranger = True
        self._held = Hold(self.memory)
        self._queued_bytes = 0
        """What the requests that wait hold, with the one before them."""
        self._previous: tuple[RequestResponseCycle | None, int] = (None, 0)
        """The request before the last one, and what it held when the last one began."""
        self._extensions = {CONNECTION: self}

    @property
    def answering(self) -> bool:
        return self._busy

    def cut(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self._expect_head()
        if not self.clients.begin(self, len(self.connections)):
            self.refuse_unread(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self.clients.end(self)
        self._held.release()
        super().connection_lost(exc)

    def trust(self, owner: str) -> None:
        """A request has shown a key of that owner: from now on the application counts what it holds. Raises
        TooManyConnectionsError, or MemoryUsedUpError for what is queued behind it."""
        if self._is_stranger:
            self.clients.trust(self, owner)
            self._is_stranger = False
            queued_bytes = self._held.held_bytes if self.pipeline else 0
            self._held.release()
            self._held.owner = owner
            self._held.resize(queued_bytes)

    def data_received(self, data: bytes) -> None:
        heads = self._heads
        if not self.flow.is_over:
            super().data_received(data)
        if self.flow.is_over or self.transport.is_closing():
            return
        heads.piece(len(data))
        if not heads.is_open and self.timeout_keep_alive_task is None and not self._busy:
            heads.is_open = True  # line ends before a request: its timer runs already
        if heads.is_open:
            # Most heads come in one piece: for those no timer is set.
            self._expect_head()
        if heads.too_large:
            self.refuse_unread(_TOO_LARGE)
        elif self._is_stranger or self.pipeline or self._held.held_bytes or heads.untold_bytes > _FREE_BYTES:
            try:
                self._held.resize(self._count())
            except MemoryUsedUpError:
                self.refuse_unread(_TOO_MUCH)

    def _count(self) -> int:
        """What has to be counted now, beside what the application counts of those with a key."""
        held = self._heads.untold_bytes
        if self.pipeline:
            held += self._queued_bytes
        elif self._is_stranger and self._busy:
            held += self._heads.head_bytes + len(self.cycle.body)
        return held if held > _FREE_BYTES else 0

    def _count_queued(self, size: int) -> None:
        """Count so much more of a request that waits, before it is taken: what a piece brings may be many times its
        size."""
        self._queued_bytes += size
        if self._queued_bytes > max(_FREE_BYTES, self._held.held_bytes):
            try:
                self._held.resize(self._queued_bytes)
            except MemoryUsedUpError:
                self._refuse(_TOO_MUCH)

    def refuse_unread(self, why: str) -> None:
        """Refuse a request that is not whole, and close the connection."""
        self._refusal = why
        self.send_400_response(why)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and self._previous[0] is not self.cycle:
            self._previous = (None, 0)
        if self.transport.is_closing():
            self._abort_unread()
        elif self._held.held_bytes and not self.pipeline:
            self._held.resize(min(self._held.held_bytes, self._count()))

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._abort_unread()

    def _abort_unread(self) -> None:
        """Have a connection that is closing end, even if its client never reads the rest."""
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self.send_timeout_s, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read: with the reason, unless another answer is under way or still to come."""
        answer_is_under_way = self._busy and (self._heads.is_open or self.cycle.response_started)
        if answer_is_under_way or self.pipeline:
            self._close_when_answered()
            return
        msg = self._refusal or msg
        status = _REFUSALS.get(msg, HTTPStatus.BAD_REQUEST)
        self.transport.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: text/plain; charset=utf-8\r\n"
            f"content-length: {len(msg)}\r\nconnection: close\r\n\r\n{msg}".encode("ascii")
        )
        self.transport.close()

    def _close_when_answered(self) -> None:
        """Have the requests that came whole answered, and the last answer say that it is the last one: whoever sent
        more knows by that which to send again."""
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()
            self.cycle = self._previous[0]  # type: ignore[assignment]  # there is one: it is not answered yet
        if self.cycle.more_body:
            self.transport.close()
            return
        self.cycle.keep_alive = False
        self.flow.stop_reading()

    def on_message_begin(self) -> None:
        if self._busy:
            self._previous = (self.cycle, self._heads.head_bytes + len(self.cycle.body))
        super().on_message_begin()
        self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]
        self._heads.begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + _HEADER_BYTES)
        if self._heads.is_open:  # otherwise it is a trailer, which must not pass for a header
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._heads.body(len(body))
        if self.pipeline:
            self._count_queued(len(body))
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._refuse_ambiguous()
        if self._busy:
            self._queue()
        self._heads.end()
        self._cancel_head_timer()
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser takes what follows for the other protocol

    def _queue(self) -> None:
        """Refuse a request that would have to wait behind too many others, or that there is no memory for."""
        if len(self.pipeline) >= _MOST_QUEUED:
            self._refuse(_TOO_MANY_QUEUED)
        if not self.pipeline:
            self._queued_bytes = self._previous[1]
        self._count_queued(self._heads.head_bytes + _QUEUED_BYTES)

    def on_message_complete(self) -> None:
        self._heads.end()
        super().on_message_complete()

    def _count_head(self, size: int) -> None:
        self._heads.line(size)
        if self._heads.too_large:
            self._refuse(_TOO_LARGE)

    def _refuse_ambiguous(self) -> None:
        """Refuse a request that another server on its way may have read differently."""
        version, hosts, coding, length = self.parser.get_http_version(), 0, None, b"0"
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding":
                coding = value if coding is None else b"several"
            elif name == b"content-length":
                length = value
        if version not in ("1.0", "1.1"):
            self._refuse(_VERSION)
        if coding is not None and (coding.strip().lower() != b"chunked" or version == "1.0"):
            self._refuse(_CODING)
        if hosts != 1 and (hosts or version == "1.1"):
            self._refuse(_HOST)
        if self.parser.should_upgrade() and (coding is not None or length.strip(b"0 ")):
            self._refuse(_PROTOCOL)  # the parser reads no body of it

    def _refuse(self, why: str) -> NoReturn:
        """Stop the parser, which has `send_400_response` called."""
        self._refusal = why
        raise _RefusedError(why)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._busy:
            self._expect_head()  # the slow request is pipelined behind another, which must not suffer
        elif not self.transport.is_closing():
            self.transport.close()
