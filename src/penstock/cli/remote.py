"""The API over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import ConnectError, DetailedPyreqwestError
from pyreqwest.response import Response

from penstock import __version__
from penstock.cli.api import Answer, Body, Request, Unreachable
from penstock.cli.target import checked_url
from penstock.errors import UsageError

_CONNECT_S = 10.0
_SILENCE_S = 90.0
_CONNECTING = "client error (Connect)"


class HttpTransport:
    """Follows no redirect, which could carry the key elsewhere. Time limits are on silence, not on the whole."""

    local = False

    def __init__(self, origin: str, api_key: str | None) -> None:
        self._origin = origin
        self.place = f"the server at {origin}"
        builder = (
            ClientBuilder()
            .connect_timeout(timedelta(seconds=_CONNECT_S))
            .tcp_keepalive(timedelta(seconds=30))
            .follow_redirects(False)
            .referer(False)
            .user_agent(f"penstock/{__version__}")
        )
        if _is_loopback(urlsplit(origin).hostname or ""):
            builder = builder.no_proxy()  # nobody's proxy leads back to this machine
        if api_key is not None:
            builder = builder.default_headers({"authorization": f"Bearer {api_key}"})
        self._client: Client = builder.build()

    @classmethod
    def of(cls, server: str) -> HttpTransport:
        """For a server's address, with the key of PENSTOCK_API_KEY."""
        return cls(_checked_origin(server), _api_key())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def is_served(self) -> bool:
        return True

    @contextlib.asynccontextmanager
    async def send(self, request: Request) -> AsyncIterator[Answer]:
        builder = self._client.request(request.method, self._origin + request.target).headers(request.headers)
        upload: _Upload | None = None
        if callable(request.body):
            upload = _Upload(request.body)
            builder = builder.body_stream(upload.pieces())
        elif request.body is not None:
            builder = builder.body_bytes(request.body)
        # 0: the head as soon as it is there.
        call = builder.streamed_read_buffer_limit(0).build_streamed()
        with self._in_words(upload):
            async with asyncio.timeout(_SILENCE_S) as silence:
                if upload is not None:
                    upload.silence = silence
                response = await call.__aenter__()
        try:
            headers = {name.lower(): value for name, value in response.headers.items()}
            yield Answer(response.status, headers, self._pieces(response))
        finally:
            await call.__aexit__(None, None, None)

    async def _pieces(self, response: Response) -> AsyncIterator[bytes]:
        reader = response.body_reader
        while True:
            with self._in_words():
                async with asyncio.timeout(_SILENCE_S):
                    piece = await reader.read_chunk()
            if piece is None:
                return
            yield piece.to_bytes()

    @contextlib.contextmanager
    def _in_words(self, upload: _Upload | None = None) -> Iterator[None]:
        """The client's errors as ours. An upload whose own source failed fails with that."""
        try:
            yield
        except TimeoutError:
            raise Unreachable(
                f"{self.place} has been silent for {_SILENCE_S:g} s",
                hint="Run the command again; the server's log may say what it is busy with.",
                sent=True,
            ) from None
        except (DetailedPyreqwestError, ValueError) as error:
            if upload is not None and upload.failure is not None:
                raise upload.failure from None
            causes: list[str] = []
            if isinstance(error, DetailedPyreqwestError):
                causes = [cause["message"] for cause in error.details.get("causes") or ()]
            # The last cause is the plainest, and names no URL.
            reason = causes[-1] if causes else str(error)
            if isinstance(error, ConnectError) and _CONNECTING in causes:
                raise Unreachable(
                    f"cannot reach {self.place}: {reason}",
                    hint="Check --server (or PENSTOCK_SERVER) and that `penstock serve` runs there.",
                    sent=False,
                ) from None
            raise Unreachable(
                f"{self.place} broke off: {reason}",
                hint="Run the command again; the server's log may say what happened.",
                sent=True,
            ) from None


class _Upload:
    """A body on its way. Each piece that is taken shows that the server is there."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.silence: asyncio.Timeout | None = None
        self.failure: Exception | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._body():
                if self.silence is not None and not self.silence.expired():
                    self.silence.reschedule(asyncio.get_running_loop().time() + _SILENCE_S)
                yield piece
        except Exception as error:
            self.failure = error
            raise


def _checked_origin(server: str) -> str:
    example = "For example --server http://127.0.0.1:8080 (or PENSTOCK_SERVER)."
    url = checked_url("--server", server, example, "The key comes from the environment: PENSTOCK_API_KEY.")
    # As people have it from their SDK's configuration, or as `penstock serve` prints it.
    return url.removesuffix("/v1")


def _api_key() -> str | None:
    key = os.environ.get("PENSTOCK_API_KEY", "").strip()
    if not key:
        return None
    if not key.isascii() or not key.isprintable():
        raise UsageError("PENSTOCK_API_KEY does not hold a usable key", hint="A key is one line of plain text.")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
