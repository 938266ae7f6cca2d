"""A TCP server of the tests: owns its listening socket, its connections and their tasks, and closes them all.

    async with TcpServer(serve) as server:
        ...  # connect to 127.0.0.1, server.port

`serve(reader, writer)` is called for each connection in a task of its own; when it returns, what it wrote is sent and
the connection is closed. When the block ends, nobody is accepted any more, tasks are cancelled, and every socket is
closed before the next line runs: no loop is needed to close the rest later. This holds on asyncio's loop and on uvloop,
and in whichever order client, task and server end.

A peer may leave at any time: connection errors in `serve` are no news. Any other error is a mistake in the test's
server and is raised at the end of the block.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

_T = TypeVar("_T")

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

LOOPBACK = "127.0.0.1"
_BACKLOG = 2048
_CLOSE_DEADLINE_S = 30.0
_CONTROL_DEADLINE_S = 60.0
_RESET = struct.pack("ii", 1, 0)


def abort(writer: asyncio.StreamWriter) -> None:
    """Close at once, whatever is still unsent; nothing if it is closed already."""
    # A transport of asyncio that has closed after sending what it had left knows no loop any more: to abort it is an
    # error then, and not nothing.
    if is_open(writer):
        writer.transport.abort()


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, not FIN. A unix socket knows no reset and is only closed."""
    if is_open(writer):
        sock = writer.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()


def is_open(writer: asyncio.StreamWriter) -> bool:
    """Whether its socket is still there. uvloop forgets the socket of a closed transport, asyncio does not."""
    sock = writer.get_extra_info("socket")
    return sock is not None and sock.fileno() != -1


def bind(host: str = LOOPBACK, port: int = 0, *, shared: bool = False) -> socket.socket:
    """A socket with an address; shared, others may bind to it too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        undo.pop_all()
    return sock


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    began: bool = False
    """Its task has run: a transport owns the socket, or did."""
    ending: bool = False
    """Aborted, and closed in a moment."""


class TcpServer:
    """Listens on a free port of `host` from the beginning of the block to its end."""

    def __init__(
        self, serve: Serve, host: str = LOOPBACK, *, tls: ssl.SSLContext | None = None, limit_bytes: int = 64 * 1024
    ) -> None:
        self.host = host
        self.port = 0
        self._serve = serve
        self._tls = tls
        self._limit_bytes = limit_bytes
        self._listening: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._mistakes: list[BaseException] = []

    async def __aenter__(self) -> Self:
        self.listen(bind(self.host))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
        if error is None:
            self.raise_mistakes()

    def listen(self, bound: socket.socket) -> None:
        """Accept connections on this socket, which is ours from here on. Nothing if there is one already."""
        if self._listening is not None:
            bound.close()
            return
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self.port = bound.getsockname()[1]
        self._listening = bound
        # Accepted by hand: what asyncio's server has accepted and not announced yet cannot be closed by anybody.
        asyncio.get_running_loop().add_reader(bound, self._accept, bound)

    def refuse(self) -> None:
        """Accept no more; the connections there are stay."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening)
            self._listening.close()
            self._listening = None

    async def close(self) -> None:
        """Accept no more and end every connection. Returns when all sockets are closed."""
        self.refuse()
        connections = dict(self._connections)
        for task, connection in connections.items():
            if not connection.ending:
                task.cancel()
            if not connection.began:  # and never will: the task is cancelled before its first line
                connection.sock.close()
        await asyncio.gather(*connections, return_exceptions=True)

    def raise_mistakes(self) -> None:
        if self._mistakes:
            raise self._mistakes[0]

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_BACKLOG):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            sock.setblocking(False)
            connection = _Connection(sock)
            task = asyncio.get_running_loop().create_task(self._hold(connection))
            self._connections[task] = connection
            task.add_done_callback(self._held)

    def _held(self, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mistakes.append(error)

    async def _hold(self, connection: _Connection) -> None:
        """One connection, from its beginning until its socket is closed."""
        connection.began = True
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            try:
                reader, writer = await self._connect(connection.sock)
                try:
                    await self._serve(reader, writer)
                    writer.close()
                    await writer.wait_closed()
                finally:
                    abort(writer)
            finally:
                connection.ending = True
                await _until_closed(connection.sock)

    async def _connect(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=self._limit_bytes, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=self._tls)
        return reader, _Writer(transport, protocol, reader, loop)


class _Writer(asyncio.StreamWriter):
    def close(self) -> None:
        # asyncio's TLS transport forgets its connection when it is closed twice: nobody could abort it any more.
        if not self.is_closing():
            super().close()


async def _until_closed(sock: socket.socket) -> None:
    """Both loops close an aborted socket a turn or two later."""
    try:
        async with asyncio.timeout(_CLOSE_DEADLINE_S):
            while sock.fileno() != -1:
                await asyncio.sleep(0)
    except TimeoutError:
        raise AssertionError(f"{sock} was aborted and did not close within {_CLOSE_DEADLINE_S:g} s") from None


class LoopThread:
    """An event loop with a thread of its own, for servers of tests that wait for other things."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop, self._stop = self._started.result(_CONTROL_DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CONTROL_DEADLINE_S)
        assert not self._thread.is_alive(), f"the loop of {self._thread.name} does not end"

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Do this in the loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CONTROL_DEADLINE_S)

    def do(self, act: Callable[[], _T]) -> _T:
        async def work() -> _T:
            return act()

        return self.run(work())

    @contextlib.contextmanager
    def entered(self, server: contextlib.AbstractAsyncContextManager[_T]) -> Iterator[_T]:
        """The server in this loop for the length of the block."""
        stack = contextlib.AsyncExitStack()
        entered = self.run(stack.enter_async_context(server))
        try:
            yield entered
        finally:
            self.run(stack.aclose())

    def _run(self) -> None:
        async def main() -> None:
            stop = asyncio.Event()
            self._started.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()

        asyncio.run(main())
