"""What `server/listener.py` leans on in uvicorn beyond its documentation; `pyproject.toml` caps it for that."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState


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
