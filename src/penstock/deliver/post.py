"""One POST over one connection to an address that was checked before. Nothing is followed, kept or retried."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping, Sequence

from penstock.config import KIB, DispatchLimits
from penstock.deliver.addresses import Address, Target
from penstock.dispatch.http.connect import Origin, connect
from penstock.dispatch.http.connection import HttpConnection, checked_text
from penstock.dispatch.http.countdown import Countdown
from penstock.dispatch.http.errors import TransportError
from penstock.dispatch.http.tls import tls_context

# What is read of an answer at most, beside its header: only its status matters.
_LIMITS = DispatchLimits(max_response_bytes=64 * KIB)
_LINGER_S = 1.0


class PostError(Exception):
    """No answer came. The text is fit to be shown to the endpoint's owner."""


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
        message = [_head(target, headers, len(body)), body]
        async with asyncio.timeout(timeout_s):
            connection = await connect(
                Origin(target.scheme, target.host, target.port),
                _new_connection,
                timeout_s,
                tls=(tls or tls_context()) if target.scheme == "https" else None,
                addresses=[str(address) for address in addresses],
            )
            try:
                connection.send(message, None)
                await _wait_for_head(connection)
                await _take_rest(connection)
                return connection.status
            finally:
                connection.cut()
    except TimeoutError:
        raise PostError(f"no answer within {timeout_s:g} s") from None
    except TransportError as error:
        raise PostError(_in_words(error, timeout_s)) from None


def _head(target: Target, headers: Mapping[str, str], size: int) -> bytes:
    ours = {"host": target.authority, "content-length": str(size), "connection": "close"}
    lines = [f"{checked_text(name)}: {checked_text(value)}" for name, value in {**headers, **ours}.items()]
    return "\r\n".join([f"POST {target.path} HTTP/1.1", *lines, "", ""]).encode()


def _new_connection() -> HttpConnection:
    unused = Countdown(0)  # those of many calls at once; here `post` keeps the time
    return HttpConnection(_LIMITS, unused, unused, lambda _: None)


async def _wait_for_head(connection: HttpConnection) -> None:
    try:
        while not connection.head_came:
            await connection.change()
    except TransportError:
        if not connection.head_came:  # what is wrong with the rest of an answer does not undo it
            raise


async def _take_rest(connection: HttpConnection) -> None:
    """Of a short answer, so that its sender is not met with a reset. The status stands regardless."""
    with contextlib.suppress(TransportError, TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while not connection.whole:
                connection.content()
                await connection.change()


def _in_words(error: TransportError, timeout_s: float) -> str:
    if error.code == "connect_timeout":
        return f"no answer within {timeout_s:g} s"
    if error.code == "connect_failed":
        return f"connection failed: {error.message}"
    if error.code == "protocol_error":
        return "the answer is not HTTP/1.1"
    if error.code == "connection_reset":
        return "the connection was closed without an answer"
    return error.message
