"""From an address to a connection that requests can be sent on: name, TCP, proxy, TLS, all within one time limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from time import monotonic
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from penstock.dispatch.http.connection import HttpConnection
from penstock.dispatch.http.errors import TransportError
from penstock.dispatch.http.tls import explain_handshake, tls_context
from penstock.errors import UsageError

_KEEPALIVE_S = 60


def uses_tls(url: str) -> bool:
    return urlsplit(url).scheme == "https"


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How one upstream is reached: the files of its TLS, and a proxy. Everything is the operator's word; what the
    environment says of proxies is not asked."""

    ca_file: str | None = None
    client_cert_file: str | None = None
    client_key_file: str | None = None
    proxy: str | None = field(default=None, repr=False)
    """Its URL, which may hold a password."""

    def tls(self) -> ssl.SSLContext:
        """UsageError if one of the files cannot be used."""
        return tls_context(self.ca_file, self.client_cert_file, self.client_key_file)


class Origin(NamedTuple):
    """Origin of a URL: what a connection is opened to."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """Host and port, as a proxy is told them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def host_header(self) -> str:
        return self.authority.removesuffix(":443" if self.scheme == "https" else ":80")


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy. It forwards requests for http://; for https:// it opens a tunnel that it cannot look into."""

    host: str
    port: int
    authorization: str | None = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> Proxy:
        """UsageError, which does not repeat the URL: it may hold a password."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode(), parts.port or 80
        except ValueError:
            host = ""
        if not host or parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.fragment:
            raise UsageError(
                "the proxy's URL is not http://host:port",
                hint="A proxy is spoken to in HTTP, for https:// upstreams too; not over TLS, and not in SOCKS.",
            )
        if parts.username is None:
            return cls(host, port, None)
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return cls(host, port, "Basic " + b64encode(secret.encode()).decode())

    @property
    def headers(self) -> list[str]:
        """Credentials for the proxy, as lines of a request's head."""
        return [] if self.authorization is None else [f"proxy-authorization: {self.authorization}"]


async def connect(
    origin: Origin,
    new_connection: Callable[[], HttpConnection],
    limit_s: float,
    *,
    tls: ssl.SSLContext | None,
    proxy: Proxy | None = None,
    addresses: Sequence[str] | None = None,
) -> HttpConnection:
    """A new connection. With `addresses`, only those are tried and the host is not looked up."""
    hop = "" if proxy is None else f"the proxy at {proxy.host}:{proxy.port}: "
    awaited = "connection"
    try:
        async with asyncio.timeout(limit_s):
            host, port = (origin.host, origin.port) if proxy is None else (proxy.host, proxy.port)
            if addresses is None:
                addresses = await _look_up(host, port)
            connection = await _connect_first(addresses, port, new_connection, limit_s)
            if tls is None:
                return connection
            try:
                if proxy is not None:
                    awaited = "tunnel"
                    await _open_tunnel(connection, origin, proxy)
                awaited, hop = "TLS handshake", ""
                return await _start_tls(connection.transport, new_connection(), tls, origin, limit_s)
            except BaseException:
                connection.cut()
                raise
    except TimeoutError:
        raise TransportError("connect_timeout", f"{hop}no {awaited} within {limit_s:g} s (connect_timeout_s)") from None
    except OSError as error:
        if awaited == "TLS handshake":
            raise explain_handshake(error) from None
        raise TransportError("connect_failed", hop + _reason(error)) from None


async def _look_up(host: str, port: int) -> Sequence[str]:
    try:
        ip_address(host)
    except ValueError:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return [host]


async def _connect_first(
    addresses: Sequence[str], port: int, new_connection: Callable[[], HttpConnection], limit_s: float
) -> HttpConnection:
    """To the first address that takes the connection. A silent one leaves time for the others."""
    ends_at = monotonic() + limit_s
    for number, address in enumerate(addresses[:-1]):
        with contextlib.suppress(OSError):
            async with asyncio.timeout((ends_at - monotonic()) / (len(addresses) - number)):
                return await _connect_to(address, port, new_connection)
    return await _connect_to(addresses[-1], port, new_connection)


async def _connect_to(address: str, port: int, new_connection: Callable[[], HttpConnection]) -> HttpConnection:
    transport, connection = await asyncio.get_running_loop().create_connection(new_connection, address, port)
    # Some networks forget a connection on which nothing is sent while an answer is waited for.
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    return connection


async def _open_tunnel(connection: HttpConnection, origin: Origin, proxy: Proxy) -> None:
    """Of the requests to come, the proxy learns where they go and no more."""
    lines = [f"CONNECT {origin.authority} HTTP/1.1", f"host: {origin.authority}", *proxy.headers, "", ""]
    connection.send(["\r\n".join(lines).encode()], None)
    try:
        while not connection.head_came:
            await connection.change()
    except TransportError as error:
        raise TransportError("proxy_refused", f"the proxy gave no answer: {error.message}") from None
    if not 200 <= connection.status < 300:
        raise refused_by_proxy(connection.status)


async def _start_tls(
    transport: asyncio.Transport, connection: HttpConnection, tls: ssl.SSLContext, origin: Origin, limit_s: float
) -> HttpConnection:
    secured = await asyncio.get_running_loop().start_tls(
        transport, connection, tls, server_hostname=origin.host.rstrip("."), ssl_handshake_timeout=limit_s
    )
    if secured is None:  # lost in the moment when it was ready
        raise ConnectionError
    connection.connection_made(secured)
    return connection


def refused_by_proxy(status: int) -> TransportError:
    """Its answer in place of the upstream's."""
    hint = "write its credentials into its URL: http://user:password@host:port" if status == 407 else ""
    return TransportError("proxy_refused", f"the proxy answered HTTP {status}", hint=hint)


def _reason(error: OSError) -> str:
    """Without the address, which asyncio puts into the error's text."""
    if isinstance(error, socket.gaierror):
        return error.strerror or "the name cannot be resolved"
    return os.strerror(error.errno) if error.errno else "broken off"
