"""The HTTP server: uvicorn, with bounds on request heads, and stopped by us rather than by signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator, Iterable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.api.auth import is_loopback
from penstock.api.guard import WIRE
from penstock.config import Config
from penstock.errors import PenstockError, UsageError

_BACKLOG = 2048
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


def bind(host: str, port: int, *, keyless: bool) -> list[socket.socket]:
    """Sockets that listen at every address of the host. Without keys, only where nobody else can reach them."""
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
            # All of them on one port, also where the system chose it.
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
        """Signals are for the whole program, not for this part of it."""
        yield


class _Wire:
    """One request's end of the connection, for whoever times it."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def body_is_here(self) -> bool:
        return not self._cycle.more_body and self._cycle.message_event.is_set()

    @property
    def takes_more(self) -> bool:
        return not self._cycle.flow.write_paused

    def write(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """What `send` of the cycle does with a head and with a body, for one that is whole and closes nothing."""
        cycle = self._cycle
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused or not cycle.keep_alive:
            return False
        lines = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        lines += (b"\r\n", body)
        cycle.transport.write(b"".join(lines))
        cycle.waiting_for_100_continue = False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        return True


class Protocol(HttpToolsProtocol):
    """Heads must come whole, in time and within bounds; bodies are the application's to watch."""

    head_timeout_s = 20.0
    max_head_bytes = 65_536

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_is_open = True
        self._head_bytes = 0
        self._body_came = False
        self._patience: asyncio.TimerHandle | None = None

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
            self._head_is_open = True  # line ends before a request: its clock runs already
        if self._head_is_open:
            # Most come in one piece: for those no clock is set.
            self._expect_head()
            # What came behind a body is counted from the next piece on.
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
        cast(dict[str, Any], self.scope)[WIRE] = _Wire(self.cycle)

    def _expect_head(self) -> None:
        if self._patience is None:
            self._patience = self.loop.call_later(self.head_timeout_s, self._too_slow)

    def _head_is_here(self) -> None:
        self._head_is_open = False
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    @property
    def _busy(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _too_slow(self) -> None:
        self._patience = None
        if self._busy:
            self._expect_head()  # a request that was begun behind another: that one is not to suffer
        elif not self.transport.is_closing():
            self.transport.close()
