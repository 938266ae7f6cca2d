"""One POST over one connection to an address that was checked before. Nothing is followed, kept or retried."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from ipaddress import IPv6Address

import h11

from penstock.config import KIB
from penstock.deliver.addresses import Address, Target

_READ_BYTES = 16 * KIB
# What is read of an answer at most, interim answers and header included: only its status matters.
_MAX_ANSWER_BYTES = 64 * KIB
_LINGER_S = 1.0


class PostError(Exception):
    """No answer came. The text is fit to be shown to the endpoint's owner."""


@cache
def default_tls() -> ssl.SSLContext:
    """The system's certificate authorities, names checked."""
    return ssl.create_default_context()


async def post(
    target: Target,
    addresses: Sequence[Address],
    headers: Mapping[str, str],
    body: bytes,
    *,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Send and return the answer's status. `timeout_s` bounds all of it: connecting, sending, waiting, reading."""
    try:
        async with asyncio.timeout(timeout_s), _connected(target, addresses, tls, timeout_s) as (reader, writer):
            return await _exchange(target, headers, body, reader, writer)
    except TimeoutError:
        raise PostError(f"no answer within {timeout_s:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise PostError(f"certificate refused: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise PostError(f"TLS failed: {error.reason or 'handshake broken off'}") from None
    except h11.ProtocolError:
        raise PostError("the answer is not HTTP/1.1") from None
    except OSError as error:
        # Not the error's own text: it names the address.
        reason = os.strerror(error.errno) if error.errno else "broken off"
        raise PostError(f"connection failed: {reason}") from None


@contextlib.asynccontextmanager
async def _connected(
    target: Target, addresses: Sequence[Address], tls: ssl.SSLContext | None, timeout_s: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    connection = await _connect(addresses, target.port, timeout_s)
    try:
        context = (tls or default_tls()) if target.scheme == "https" else None
        name = target.host if context is not None else None
        reader, writer = await asyncio.open_connection(sock=connection, ssl=context, server_hostname=name)
    except BaseException:
        connection.close()
        raise
    try:
        yield reader, writer
    finally:
        # Not `wait_closed`: a peer that does not answer the end of TLS would hold us.
        writer.transport.abort()


async def _connect(addresses: Sequence[Address], port: int, timeout_s: float) -> socket.socket:
    """The first of the addresses that takes the connection. A silent one leaves time for the others."""
    failure: OSError | None = None
    share_s = timeout_s / (len(addresses) + 1)
    for address in addresses:
        family = socket.AF_INET6 if isinstance(address, IPv6Address) else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            async with asyncio.timeout(share_s):
                await asyncio.get_running_loop().sock_connect(connection, (str(address), port))
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure or ConnectionError("no address to connect to")


async def _exchange(
    target: Target,
    headers: Mapping[str, str],
    body: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> int:
    http = h11.Connection(h11.CLIENT)
    lines = [("host", target.authority), ("content-length", str(len(body))), ("connection", "close"), *headers.items()]
    parts = (
        http.send(h11.Request(method="POST", target=target.path, headers=lines)),
        http.send(h11.Data(data=body)),
        http.send(h11.EndOfMessage()),
    )
    writer.writelines([part for part in parts if part])
    # A receiver may answer and close without reading the body: its answer counts, not our failure to send.
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    status: int | None = None
    received_bytes = 0
    while status is None:
        event = http.next_event()
        if isinstance(event, h11.Response):
            status = event.status_code
        elif event is h11.NEED_DATA:
            if received_bytes >= _MAX_ANSWER_BYTES:
                raise PostError("the answer's header is too long")
            data = await reader.read(_READ_BYTES)
            if not data:
                raise PostError("the connection was closed without an answer")
            received_bytes += len(data)
            http.receive_data(data)
    await _drain(http, reader, received_bytes)
    return status


async def _drain(http: h11.Connection, reader: asyncio.StreamReader, received_bytes: int) -> None:
    """Take the rest of a short answer, so that its sender is not met with a reset. The status stands regardless."""
    with contextlib.suppress(OSError, TimeoutError, h11.ProtocolError):
        async with asyncio.timeout(_LINGER_S):
            while received_bytes < _MAX_ANSWER_BYTES:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    data = await reader.read(_READ_BYTES)
                    received_bytes += len(data)
                    http.receive_data(data)
                elif not isinstance(event, h11.Data):
                    return
