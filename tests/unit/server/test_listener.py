"""What `server/listener.py` leans on in uvicorn beyond its documentation; `pyproject.toml` caps it for that."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.config import Config
from penstock.server.listener import Listener, Protocol
from penstock.server.memory import STRANGER, MemoryBudget


async def _serve_nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError(scope, receive, send)


def test_the_server_is_stopped_by_two_flags() -> None:
    server = uvicorn.Server(uvicorn.Config(_serve_nothing))
    assert (server.should_exit, server.force_exit) == (False, False)
    assert list(inspect.signature(server.startup).parameters) == ["sockets"]
    assert not inspect.signature(server.capture_signals).parameters


@pytest.mark.parametrize(
    "callback",
    [
        "connection_made",
        "connection_lost",
        "data_received",
        "send_400_response",
        "on_message_begin",
        "on_url",
        "on_header",
        "on_headers_complete",
        "on_body",
        "on_message_complete",
    ],
)
def test_the_protocol_has_its_callbacks(callback: str) -> None:
    assert inspect.isfunction(vars(HttpToolsProtocol)[callback])


def test_the_protocol_tells_a_request_under_way() -> None:
    async def look() -> None:
        config = uvicorn.Config(_serve_nothing)
        config.load()
        protocol = HttpToolsProtocol(config, ServerState(), {})
        assert protocol.loop is asyncio.get_running_loop()
        cycle: object = protocol.cycle
        assert cycle is None
        assert protocol.timeout_keep_alive_task is None
        assert not protocol.pipeline

    asyncio.run(look())
    for name in ("response_started", "response_complete"):
        assert f"self.{name} = False" in inspect.getsource(RequestResponseCycle.__init__)


class _Transport(asyncio.Transport):
    """Notes whether it is read from."""

    reads = True

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.closed = False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def _connect(listener: Listener, transport: _Transport) -> Protocol:
    listener.config.load()
    kind = listener.config.http_protocol_class
    assert issubclass(kind, Protocol)
    protocol = kind(listener.config, ServerState(), {})
    protocol.connection_made(transport)
    return protocol


def test_nothing_is_read_while_requests_wait_behind_another() -> None:
    request = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx"

    async def look() -> None:
        go_on = asyncio.Semaphore(0)

        async def serve(_scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            gone = asyncio.ensure_future(receive())
            await go_on.acquire()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
            await gone

        async def answered(count: int) -> None:
            async with asyncio.timeout(30):
                while transport.written.count(b"HTTP/1.1 204") < count:
                    await asyncio.sleep(0)
            for _ in range(10):  # the next one begins
                await asyncio.sleep(0)

        transport = _Transport()
        protocol = _connect(Listener(serve, Config()), transport)
        protocol.data_received(3 * request)
        for waiting in (2, 1):
            await answered(2 - waiting)
            assert not transport.reads
            assert len(protocol.pipeline) == waiting
            go_on.release()
        await answered(2)
        assert transport.reads, "the last one is read for"
        go_on.release()
        await answered(3)
        assert transport.reads
        protocol.connection_lost(None)

    asyncio.run(look())


def test_a_connection_queues_few_requests_and_what_they_hold_is_counted() -> None:
    request = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx"

    async def look() -> None:
        memory = MemoryBudget(100_000)
        transport = _Transport()
        protocol = _connect(Listener(_serve_nothing, Config(), memory=memory), transport)
        protocol.data_received(9 * request)
        assert memory.held_by(STRANGER) > 8 * 4_096
        assert not transport.is_closing()
        protocol.data_received(70 * request)
        assert transport.is_closing()
        assert len(protocol.pipeline) <= 64
        protocol.connection_lost(None)
        assert memory.held_by(STRANGER) == 0

    asyncio.run(look())
