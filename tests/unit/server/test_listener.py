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


REQUEST = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
WITH_BODY = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx"


class _Turns:
    """An application that answers a request when it is told to."""

    def __init__(self, transport: _Transport) -> None:
        self._transport = transport
        self._go_on = asyncio.Semaphore(0)
        self._answered = 0
        self.begun = 0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        await receive()
        await self._go_on.acquire()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def answer(self, count: int) -> None:
        """Have so many more answered, and the next one begun if there is any."""
        self._answered += count
        for _ in range(count):
            self._go_on.release()
        async with asyncio.timeout(30):
            while self._transport.written.count(b"HTTP/1.1 204") < self._answered:
                await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.mark.parametrize("owner", [STRANGER, "bob"])
@pytest.mark.parametrize("request_", [REQUEST, WITH_BODY], ids=["get", "post"])
def test_a_pipeline_that_is_kept_full_holds_no_more_than_one_round(request_: bytes, owner: str) -> None:
    async def look() -> None:
        memory = MemoryBudget(1_000_000)
        transport = _Transport()
        turns = _Turns(transport)
        protocol = _connect(Listener(turns, Config(), memory=memory), transport)
        protocol.data_received(request_)
        if owner:
            protocol.trust(owner)
        held = []
        for _ in range(20):
            protocol.data_received(9 * request_)
            held.append(memory.held_by(owner))
            await turns.answer(9)
            assert memory.held_by(owner) == 0, "what is left is small"
            assert protocol.answering
        assert max(held) == held[0]
        assert held[0] > 9 * 4_096
        protocol.connection_lost(None)

    asyncio.run(look())


def test_what_a_stranger_still_sends_is_counted_when_its_queue_is_empty() -> None:
    body = b"x" * 50_000
    request = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 60000\r\n\r\n" + body

    async def look() -> None:
        memory = MemoryBudget(1_000_000)
        transport = _Transport()
        go_on = asyncio.Event()

        async def serve(scope: Scope, _receive: Receive, send: Send) -> None:
            if scope["method"] == "POST":
                await go_on.wait()  # it has not taken its body
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        protocol = _connect(Listener(serve, Config(), memory=memory), transport)
        protocol.data_received(5 * REQUEST + request)
        queued = memory.held_by(STRANGER)
        assert queued > len(body) + 5 * 4_096
        async with asyncio.timeout(30):
            while protocol.pipeline:
                await asyncio.sleep(0)
        assert len(body) < memory.held_by(STRANGER) < len(body) + 4_096
        go_on.set()
        protocol.connection_lost(None)
        assert memory.held_by(STRANGER) == 0

    asyncio.run(look())


def _statuses(transport: _Transport) -> list[bytes]:
    return [line.split()[1] for line in transport.written.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@pytest.mark.parametrize("rest", [5 * REQUEST, REQUEST[:9]], ids=["more", "half-of-one"])
@pytest.mark.parametrize("request_", [REQUEST, WITH_BODY], ids=["get", "post"])
def test_requests_beyond_those_that_may_wait_are_not_begun_and_all_others_answered(
    request_: bytes, rest: bytes
) -> None:
    async def look() -> None:
        transport = _Transport()
        turns = _Turns(transport)
        protocol = _connect(Listener(turns, Config()), transport)
        protocol.data_received(65 * request_ + request_ + rest)
        assert len(protocol.pipeline) == 64
        assert not transport.reads
        await turns.answer(64)
        assert not transport.is_closing()
        assert not transport.reads, "it would only be dropped"
        assert b"connection: close" not in transport.written
        await turns.answer(1)
        assert transport.is_closing()
        assert _statuses(transport) == 65 * [b"204"]
        assert transport.written.count(b"connection: close") == 1
        assert turns.begun == 65
        protocol.connection_lost(None)

    asyncio.run(look())


def test_as_many_as_may_wait_leave_the_connection_open() -> None:
    async def look() -> None:
        transport = _Transport()
        turns = _Turns(transport)
        protocol = _connect(Listener(turns, Config()), transport)
        for _ in range(3):
            protocol.data_received(65 * REQUEST)
            await turns.answer(65)
            assert transport.reads
        assert not transport.is_closing()
        assert b"connection: close" not in transport.written
        protocol.connection_lost(None)

    asyncio.run(look())


LARGE = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 90000\r\n\r\n" + 90_000 * b"x"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        ([40 * REQUEST], 13),
        ([REQUEST, 40 * REQUEST], 13),
        ([3 * REQUEST + LARGE + REQUEST], 3),
        ([3 * REQUEST + LARGE[:80_000]], 3),
        ([REQUEST + LARGE], 1),
        ([3 * REQUEST + REQUEST[:-2] + b"x-a: " + 60_000 * b"a"], 3),
    ],
    ids=["many", "behind-one", "body", "half-a-body", "body-behind-one", "half-a-head"],
)
def test_requests_that_there_is_no_memory_for_are_not_begun_and_all_others_answered(
    sent: list[bytes], answered: int
) -> None:
    async def look() -> None:
        memory = MemoryBudget(100_000)  # of which one may hold half
        transport = _Transport()
        turns = _Turns(transport)
        protocol = _connect(Listener(turns, Config(), memory=memory), transport)
        for data in sent:
            protocol.data_received(data)
        assert not transport.is_closing()
        assert not transport.reads
        assert memory.held_by(STRANGER) <= 50_000
        await turns.answer(answered)
        assert transport.is_closing()
        assert _statuses(transport) == answered * [b"204"]
        assert transport.written.count(b"connection: close") == 1
        assert turns.begun == answered
        protocol.connection_lost(None)
        assert memory.held_by(STRANGER) == 0

    asyncio.run(look())


def test_a_connection_queues_few_requests_and_what_they_hold_is_counted() -> None:
    async def look() -> None:
        memory = MemoryBudget(100_000)
        transport = _Transport()
        protocol = _connect(Listener(_serve_nothing, Config(), memory=memory), transport)
        protocol.data_received(9 * WITH_BODY)
        assert memory.held_by(STRANGER) > 8 * 4_096
        protocol.data_received(70 * WITH_BODY)
        assert not transport.is_closing()
        assert len(protocol.pipeline) <= 64
        assert memory.held_by(STRANGER) <= 50_000
        protocol.connection_lost(None)
        assert memory.held_by(STRANGER) == 0

    asyncio.run(look())
