"""The server under every other server of the tests: whatever order things end in, it leaves nothing open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.support.certificates import make_certificate
from tests.support.tcp_server import LoopThread, TcpServer, reset

LARGE = b"x" * 50_000_000
"""More than the kernel takes at once."""

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario and closes its loop right after the last line, with no turn in which things could still close."""

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        loop = request.param()
        try:
            loop.run_until_complete(asyncio.wait_for(scenario, 60))
        finally:
            loop.close()
        gc.collect()  # what is left open warns here, and warnings are errors

    return run


@contextlib.contextmanager
def dialled(server: TcpServer) -> Iterator[socket.socket]:
    """A client past the loop, which closes when told to and not a turn later."""
    with socket.create_connection((server.host, server.port)) as client:
        client.setblocking(False)
        yield client


async def receive(client: socket.socket) -> bytes:
    """All there is until the other side ends the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(client, 1_000_000):
            received += data
    return bytes(received)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1000):
        writer.write(data)
        await writer.drain()


async def converse(client: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client, b"hello")
    assert await loop.sock_recv(client, 5) == b"hello"


def test_the_client_leaves_first(run: Run) -> None:
    async def scenario() -> None:
        async with TcpServer(echo) as server:
            with dialled(server) as client:
                await converse(client)

    run(scenario())


def test_the_server_leaves_first(run: Run) -> None:
    async def scenario() -> None:
        async with TcpServer(echo) as server:
            context = dialled(server)
            client = context.__enter__()
            await converse(client)
        assert await receive(client) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((server.host, server.port))
        context.__exit__(None, None, None)

    run(scenario())


def test_what_was_written_is_sent_before_the_connection_closes(run: Run) -> None:
    """And to end a connection that has closed so, with its task still there, is nothing."""
    closed = asyncio.Event()

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LARGE)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()
        reset(writer)
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with TcpServer(pour) as server:
            with dialled(server) as client:
                assert len(await receive(client)) == len(LARGE)
                await closed.wait()

    run(scenario())


def test_a_client_that_does_not_read_keeps_nobody(run: Run) -> None:
    pouring = asyncio.Event()

    async def pour(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(LARGE)
        pouring.set()

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(TcpServer(pour))
            with dialled(server) as client:
                await pouring.wait()
                await stack.aclose()
                assert len(await receive(client)) < len(LARGE)

    run(scenario())


@pytest.mark.parametrize("turns", range(6))
def test_connections_that_were_just_being_accepted_are_closed_too(run: Run, turns: int) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(TcpServer(echo))
            clients = [stack.enter_context(dialled(server)) for _ in range(20)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()
            for client in clients:
                assert await receive(client) == b""

    run(scenario())


def test_a_handshake_that_never_ends_keeps_nobody(run: Run, tmp_path: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*make_certificate(tmp_path, "localhost"))

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(TcpServer(echo, tls=tls))
            silent, rude = (stack.enter_context(dialled(server)) for _ in range(2))
            await asyncio.get_running_loop().sock_sendall(rude, b"GET / HTTP/1.1\r\n\r\n")
            await receive(rude)
            await server.close()
            assert await receive(silent) == b""

    run(scenario())


def test_refusing_leaves_the_connections_there_are(run: Run) -> None:
    async def scenario() -> None:
        async with TcpServer(echo) as server:
            with dialled(server) as client:
                await converse(client)
                server.refuse()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection((server.host, server.port))
                await converse(client)

    run(scenario())


def test_a_mistake_in_a_server_is_raised_at_the_end(run: Run) -> None:
    async def mistaken(*_: object) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with TcpServer(mistaken) as server:
            with dialled(server) as client:
                assert await receive(client) == b""

    with pytest.raises(ZeroDivisionError):
        run(scenario())


def test_in_a_thread_of_its_own() -> None:
    with LoopThread("echo") as thread, thread.entered(TcpServer(echo)) as server, dialled(server) as client:
        client.setblocking(True)
        client.sendall(b"hello")
        assert client.recv(5) == b"hello"
    gc.collect()
