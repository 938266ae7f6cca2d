"""From an address to a connection that requests can be sent on: name, TCP, proxy, TLS, all within one time limit."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple
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
    """Where requests go."""

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
    """An HTTP proxy. It forwards requests for http://, and for https:// a tunnel that it cannot look into."""

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
        """What it is told of us, as lines of a request's head."""
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
            sock = await _open_socket(await _look_up(host, port, addresses), limit_s)
            loop = asyncio.get_running_loop()
            if tls is None:
                return (await loop.create_connection(new_connection, sock=sock))[1]
            if proxy is None:
                awaited, hop = "TLS handshake", ""
                return await _connect_tls(new_connection, sock, tls, origin, limit_s)
            awaited = "tunnel"
            tunnel = await _open_tunnel(new_connection, sock, origin, proxy)
            awaited, hop = "TLS handshake", ""
            return await _start_tls(tunnel, new_connection(), tls, origin, limit_s)
    except TimeoutError:
        raise TransportError("connect_timeout", f"{hop}no {awaited} within {limit_s:g} s (connect_timeout_s)") from None
    except OSError as error:
        if awaited == "TLS handshake":
            raise explain_handshake(error) from None
        raise TransportError("connect_failed", hop + _reason(error)) from None


async def _look_up(host: str, port: int, addresses: Sequence[str] | None) -> list[Any]:
    try:
        # An address needs no resolver, and what was checked must not be asked for again.
        return [
            found
            for address in addresses or [host]
            for found in socket.getaddrinfo(
                address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            )
        ]
    except socket.gaierror:
        if addresses is not None:
            raise
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def _open_socket(found: list[Any], limit_s: float) -> socket.socket:
    """The first of the addresses that takes the connection. A silent one leaves time for the others."""
    failure: OSError | None = None
    ends_at = monotonic() + limit_s
    for number, (family, kind, protocol, _, address) in enumerate(found):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Some networks forget a connection on which an answer is waited for.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            async with asyncio.timeout((ends_at - monotonic()) / (len(found) - number)):
                await asyncio.get_running_loop().sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or ConnectionError


async def _connect_tls(
    new_connection: Callable[[], HttpConnection],
    sock: socket.socket,
    tls: ssl.SSLContext,
    origin: Origin,
    limit_s: float,
) -> HttpConnection:
    _, connection = await asyncio.get_running_loop().create_connection(
        new_connection, sock=sock, ssl=tls, server_hostname=origin.host.rstrip("."), ssl_handshake_timeout=limit_s
    )
    return connection


async def _open_tunnel(
    new_connection: Callable[[], HttpConnection], sock: socket.socket, origin: Origin, proxy: Proxy
) -> HttpConnection:
    """A connection through the proxy. Of the request to come, the proxy learns where it goes and no more."""
    _, tunnel = await asyncio.get_running_loop().create_connection(new_connection, sock=sock)
    try:
        lines = [f"CONNECT {origin.authority} HTTP/1.1", f"host: {origin.authority}", *proxy.headers, "", ""]
        tunnel.send(["\r\n".join(lines).encode()], None)
        while not tunnel.head_came:
            await tunnel.change()
    except TransportError as error:
        raise TransportError("proxy_refused", f"the proxy gave no answer: {error.message}") from None
    except BaseException:
        tunnel.cut()
        raise
    if not 200 <= tunnel.status < 300:
        tunnel.cut()
        raise refused_by_proxy(tunnel.status)
    return tunnel


async def _start_tls(
    tunnel: HttpConnection, connection: HttpConnection, tls: ssl.SSLContext, origin: Origin, limit_s: float
) -> HttpConnection:
    try:
        transport = await asyncio.get_running_loop().start_tls(
            tunnel.transport, connection, tls, server_hostname=origin.host.rstrip("."), ssl_handshake_timeout=limit_s
        )
    except BaseException:
        tunnel.cut()
        raise
    if transport is None:  # lost in the moment when it was ready
        raise ConnectionError
    connection.connection_made(transport)
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
