"""HTTP listener: uvicorn, with bounds on request heads, and stopped by the server rather than by signals."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Generator
from functools import lru_cache
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.config import Config
from penstock.errors import PenstockError, UsageError

_BACKLOG = 2048
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


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
    """Serves the application until `should_exit`; `force_exit` does not wait for requests under way."""

    def __init__(self, app: Any, config: Config) -> None:
        limits = config.serve
        bounded = type(
            "BoundedProtocol",
            (Protocol,),
            {"head_timeout_s": limits.head_timeout_s, "max_head_bytes": limits.max_head_bytes},
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
                limit_concurrency=limits.max_connections,
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


class Protocol(HttpToolsProtocol):
    """HTTP protocol with bounds on request heads: on the time until they are whole, and on their size. Bodies are
    bounded by the application."""

    head_timeout_s = 20.0
    max_head_bytes = 65_536

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_is_open = True
        self._head_bytes = 0
        self._body_came = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._body_came = False
        super().data_received(data)
        if not self._head_is_open and self.timeout_keep_alive_task is None and not self._busy:
            self._head_is_open = True  # line ends before a request: its timer runs already
        if self._head_is_open:
            # Most heads come in one piece: for those no timer is set.
            self._expect_head()
            # A head that began behind a body is counted from the next piece on.
            self._head_bytes += 0 if self._body_came else len(data)
            if self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_is_open = True
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _head_is_here(self) -> None:
        self._head_is_open = False
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
