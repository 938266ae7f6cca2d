"""An upstream that misbehaves in every way we know, on real sockets.

Paths without a script of their own are answered properly, so that a test can watch a neighbour.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.support.tcp_server import TcpServer, reset

GOOD_BODY = b'{"id": "ok",  "n": 1.0}'


@dataclass(slots=True)
class Received:
    """One request as it came over the wire; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    header_names: list[str] = field(default_factory=list)
    """As often as they came."""


@dataclass(slots=True)
class Exchange:
    request: Received
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            if self.writer.is_closing():
                raise ConnectionResetError  # uvloop would call it a mistake of ours
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)  # a client that keeps up would leave the loop to this script alone

    def reset(self) -> None:
        """Close with RST, not FIN."""
        reset(self.writer)

    def end(self) -> None:
        """Say that nothing more comes; what the client says is still read where that can be."""
        if self.writer.can_write_eof():
            self.writer.write_eof()
        else:
            self.writer.close()

    async def client_leaves(self) -> None:
        """Until the other side closes."""
        with suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Exchange], Awaitable[None]]


@dataclass
class Upstream:
    """A server on loopback. `scripts` maps paths to what happens there, `hasty` to what happens before the request's
    body is read."""

    scripts: Mapping[str, Script] = field(default_factory=dict)
    hasty: Mapping[str, Script] = field(default_factory=dict)
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    open_connections: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __aenter__(self) -> Self:
        self._server = await TcpServer(self._converse, self.host, tls=self.tls).__aenter__()
        self.port: int = self._server.port
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, trace)

    @property
    def base_url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}/v1"

    async def until(self, condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
        async with asyncio.timeout(deadline_s), self.changed:
            await self.changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        number = self.connections
        try:
            while (request := await read_head(reader, number)) is not None:
                if hasty := self.hasty.get(request.path):
                    await hasty(Exchange(request, reader, writer))
                    break
                request.body = await reader.readexactly(int(request.headers.get("content-length", 0)))
                self.received.append(request)
                await self._notify()
                script = self.scripts.get(request.path, good)
                await script(Exchange(request, reader, writer))
                if writer.is_closing():
                    break
        finally:
            self.open_connections -= 1
            writer.close()
            await self._notify()


async def read_head(reader: asyncio.StreamReader, connection: int) -> Received | None:
    """A request without its body; None if there is no more."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    start, *lines = head.decode("latin-1").rstrip().split("\r\n")
    method, path, _ = start.split(" ")
    pairs = [line.split(":", 1) for line in lines]
    headers = {name.lower(): value.strip() for name, value in pairs}
    return Received(method, path, headers, b"", connection, [name.lower() for name, _ in pairs])


def message(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def answer(status: int, body: bytes = GOOD_BODY, headers: Mapping[str, str] | None = None) -> Script:
    async def script(exchange: Exchange) -> None:
        await exchange.send(message(status, body, headers))

    return script


def raw(*pieces: bytes, close: bool = False) -> Script:
    """These bytes, and the end of the connection if `close`."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(*pieces)
        if close:
            exchange.writer.close()

    return script


async def good(exchange: Exchange) -> None:
    await exchange.send(message(200, GOOD_BODY, {"x-request-id": "req_1"}))


async def silence(exchange: Exchange) -> None:
    await exchange.client_leaves()
    exchange.writer.close()


def drip(head: bytes, tail: bytes, pause_s: float) -> Script:
    """The head at once, the tail byte by byte."""

    async def script(exchange: Exchange) -> None:
        await exchange.send(head)
        for byte in tail:
            await exchange.send(bytes([byte]))
            await asyncio.sleep(pause_s)

    return script


def drip_head(pause_s: float) -> Script:
    return drip(b"HTTP/1.1 200 OK\r\n", b"X-Slow: " + b"y" * 10_000, pause_s)


def drip_body(pause_s: float) -> Script:
    return drip(b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n", b" " * 10_000, pause_s)


async def silence_mid_body(exchange: Exchange) -> None:
    await exchange.send(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"half": ')
    await exchange.client_leaves()
    exchange.writer.close()


async def reset_mid_body(exchange: Exchange) -> None:
    await exchange.send(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"half": ')
    exchange.reset()


async def reset_before_answer(exchange: Exchange) -> None:
    exchange.reset()


async def close_before_answer(exchange: Exchange) -> None:
    exchange.writer.close()


async def shorter_than_promised(exchange: Exchange) -> None:
    await exchange.send(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"half": 1}')
    exchange.writer.close()


async def longer_than_promised(exchange: Exchange) -> None:
    await exchange.send(message(200, b"{}") + b'{"surplus": true}')


async def endless_chunks(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    while True:
        await exchange.send(chunk)


async def dust(exchange: Exchange) -> None:
    """Endless, in chunks of one byte."""
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        await exchange.send(b"1\r\n \r\n" * 1000)


async def bad_chunk_size(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")


async def endless_trailers(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    while True:
        await exchange.send(b"X-Trailer: " + b"a" * 65536 + b"\r\n")


def gzip_bomb(plain_mib: int) -> Script:
    packer = zlib.compressobj(1, wbits=31)
    packed = b"".join(packer.compress(bytes(1024 * 1024)) for _ in range(plain_mib)) + packer.flush()
    return answer(200, packed, {"Content-Encoding": "gzip"})


async def false_gzip(exchange: Exchange) -> None:
    await exchange.send(message(200, b"this is not gzip", {"Content-Encoding": "gzip"}))


async def flood_of_1xx(exchange: Exchange) -> None:
    while True:
        await exchange.send(b"HTTP/1.1 102 Processing\r\n\r\n" * 100)


async def garbage_status_line(exchange: Exchange) -> None:
    await exchange.send(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    exchange.writer.close()


async def huge_head(exchange: Exchange) -> None:
    """10 MB of headers."""
    await exchange.send(b"HTTP/1.1 200 OK\r\n")
    for number in range(10_000):
        await exchange.send(b"X-%d: %s\r\n" % (number, b"a" * 1000))
    await exchange.send(b"Content-Length: 2\r\n\r\n{}")


async def switch_protocols(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n")


async def header_not_text(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 200 OK\r\nX-Request-Id: \xff\xfe\r\nContent-Length: 2\r\n\r\n{}")


@contextmanager
def full_backlog(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port that listens and accepts nobody: its queue is full."""
    with socket.socket() as server:
        server.bind((host, port))
        server.listen(0)
        fillers = []
        try:
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                fillers.append(filler)
                with suppress(BlockingIOError):
                    filler.connect(server.getsockname())
            yield server.getsockname()[1]
        finally:
            for filler in fillers:
                filler.close()
