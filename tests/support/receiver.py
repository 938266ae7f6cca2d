"""A webhook receiver: keeps what it got and answers as told."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from tests.support.tcp_server import LoopThread, TcpServer

Answer = bytes | None
"""What is sent back, head and all; None for silence."""

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def status(code: int, headers: str = "") -> bytes:
    return f"HTTP/1.1 {code} Status\r\ncontent-length: 0\r\n{headers}\r\n".encode()


@dataclass
class Message:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """Serves on the loopback; `answer` decides what each message gets."""

    answer: Callable[[Message], Answer] = lambda _: OK
    messages: list[Message] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}/hook"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        headers = {name.lower(): value for name, value in pairs}
        body = await reader.readexactly(int(headers["content-length"]))
        message = Message(first.split(" ")[1], headers, body)
        self.messages.append(message)
        answer = self.answer(message)
        if answer is None:
            await reader.read()  # until the other side gives up
        else:
            writer.write(answer)
            await writer.drain()


@contextlib.asynccontextmanager
async def receiving(receiver: Receiver, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    async with TcpServer(receiver.serve, receiver.host, tls=tls) as server:
        receiver.port = server.port
        receiver.scheme = "https" if tls else "http"
        yield receiver


@contextlib.contextmanager
def background_receiver() -> Iterator[Receiver]:
    """A receiver with a thread of its own, for tests that wait for other things."""
    with LoopThread("receiver") as thread, thread.entered(receiving(Receiver())) as receiver:
        yield receiver
