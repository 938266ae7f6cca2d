"""The API over HTTP."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from penstock import __version__
from penstock.client.api import Answer, Purged, Request, Unreachable
from penstock.config import DispatchLimits
from penstock.dispatch.http.client import HttpClient, OpenAnswer
from penstock.dispatch.http.connect import ConnectOptions, Proxy
from penstock.dispatch.http.errors import NEVER_SENT, TransportError
from penstock.errors import UsageError
from penstock.validators import checked_url, names_this_machine

_CONNECT_S = 10.0
_SILENCE_S = 90.0
_FOR_EVER_S = 1e9
_LIMITS = DispatchLimits(
    connect_timeout_s=_CONNECT_S,
    first_byte_timeout_s=_SILENCE_S,
    idle_timeout_s=_SILENCE_S,
    attempt_timeout_s=_FOR_EVER_S,
    max_response_bytes=sys.maxsize,
)


class HttpTransport:
    """Follows no redirect, which could carry the key elsewhere. Time limits are on silence, not on the whole."""

    local = False

    def __init__(self, origin: str, api_key: str | None) -> None:
        self._origin = origin
        self.place = f"the server at {origin}"
        headers = {"user-agent": f"penstock/{__version__}"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._client = HttpClient(_LIMITS, headers, ConnectOptions(proxy=_environments_proxy(origin)))

    @classmethod
    def of(cls, server: str, api_key: str | None = None) -> HttpTransport:
        """For a server's address, with this key, or that of PENSTOCK_API_KEY."""
        return cls(_checked_origin(server), api_key or _api_key())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def is_served(self) -> bool:
        return True

    async def say_idle(self, name: str) -> str | None:  # noqa: ARG002 -- the server works everything off
        return None

    async def retry_run(self, name: str) -> int | None:  # noqa: ARG002 -- the server works everything off
        return None

    async def purge(self) -> Purged | None:
        return None

    @contextlib.asynccontextmanager
    async def send(self, request: Request) -> AsyncIterator[Answer]:
        body = request.body() if callable(request.body) else request.body
        with self._in_words():
            call = self._client.open(request.method, self._origin + request.target, request.headers, body)
            await call.__aenter__()
        try:
            yield Answer(call.status, call.headers, self._pieces(call))
        finally:
            await call.__aexit__(None, None, None)

    async def _pieces(self, call: OpenAnswer) -> AsyncIterator[bytes]:
        with self._in_words():
            async for piece in call:
                yield piece

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except TransportError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: TransportError) -> Unreachable:
        if error.code == "tls_certificate_untrusted":
            hint = "If you trust its authority, name that one's file in the environment: SSL_CERT_FILE=ca.pem"
            return Unreachable(f"cannot reach {self.place}: {error.message}", hint=hint, sent=False)
        if error.code in NEVER_SENT:
            hint = "Check --server (or PENSTOCK_SERVER) and that `penstock serve` runs there."
            return Unreachable(f"cannot reach {self.place}: {error.message}", hint=hint, sent=False)
        if error.code in ("first_byte_timeout", "idle_timeout"):
            hint = "Run the command again; the server's log may say what it is busy with."
            return Unreachable(f"{self.place} has been silent for {_SILENCE_S:g} s", hint=hint, sent=True)
        hint = "Run the command again; the server's log may say what happened."
        return Unreachable(f"{self.place} broke off: {error.message}", hint=hint, sent=True)


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


def _environments_proxy(origin: str) -> str | None:
    """The proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, unless NO_PROXY names the host."""
    parts = urlsplit(origin)
    if names_this_machine(parts.hostname or "") or proxy_bypass(parts.netloc):
        return None  # a proxy would look for the server on its own machine
    found = getproxies()
    proxy = found.get(parts.scheme) or found.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        Proxy.parse(proxy)
    except UsageError as error:
        raise UsageError(
            f"{parts.scheme.upper()}_PROXY or ALL_PROXY: {error.message}",
            hint=f"{error.hint} Without a proxy: NO_PROXY={parts.hostname}",
        ) from None
    return proxy
