"""An HTTP proxy: tunnels for CONNECT, and requests in absolute form forwarded. It keeps all that it could read."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from tests.support.tcp_server import TcpServer

_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


@dataclass
class ForwardProxy:
    """`answer` is sent in place of a tunnel; empty, the proxy is silent."""

    answer: bytes | None = None
    heads: list[str] = field(default_factory=list)
    """Of the requests to the proxy itself."""
    seen: bytearray = field(default_factory=bytearray)
    """Every byte that clients sent."""
    open_connections: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def __aenter__(self) -> Self:
        self._server = await TcpServer(self._serve).__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, trace)

    @property
    def authority(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    async def until_open(self, connections: int) -> None:
        """Until clients hold so many connections."""
        async with asyncio.timeout(3), self.changed:
            await self.changed.wait_for(lambda: self.open_connections == connections)

    async def _count(self, change: int) -> None:
        self.open_connections += change
        async with self.changed:
            self.changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.seen += head
        self.heads.append(head.decode())
        await self._count(1)
        try:
            if self.answer is not None:
                writer.write(self.answer)
                await self._listen(reader, None)
            else:
                await self._pass_on(head, reader, writer)
        finally:
            await self._count(-1)

    async def _pass_on(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start, _, rest = head.partition(b"\r\n")
        method, target, _ = start.decode().split(" ")
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        there, back = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            if method == "CONNECT":
                writer.write(_ESTABLISHED)
            else:
                lines = [line for line in rest.split(b"\r\n") if not line.lower().startswith(b"proxy-")]
                back.write(f"{method} {parts.path} HTTP/1.1\r\n".encode() + b"\r\n".join(lines))
            ways = {asyncio.ensure_future(self._listen(reader, back)), asyncio.ensure_future(_copy(there, writer))}
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            back.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
        while data := await reader.read(65536):
            self.seen += data
            if writer is not None:
                writer.write(data)
                await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
