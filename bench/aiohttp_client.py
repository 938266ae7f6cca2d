"""The client that was not chosen, in the place of the one that was, so that the choice can be measured again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic

import aiohttp

from penstock.config import DispatchLimits
from penstock.dispatch.http.answer import Answer
from penstock.dispatch.http.client import HttpClient
from penstock.dispatch.http.connect import ConnectOptions
from penstock.dispatch.http.errors import TransportError


class AiohttpClient(HttpClient):
    """Whole answers only."""

    def __init__(self, limits: DispatchLimits, default_headers: Mapping[str, str], options: ConnectOptions) -> None:
        super().__init__(limits, default_headers, options)
        self._tls = options.tls()
        self._headers = dict(default_headers)
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = self.limits
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, enable_cleanup_closed=False, ssl=self._tls),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(
                    total=limits.attempt_timeout_s,
                    sock_connect=limits.connect_timeout_s,
                    sock_read=limits.idle_timeout_s,
                ),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        started = monotonic()
        head_came = False
        try:
            async with self._open().request(method, url, headers=headers, data=body, allow_redirects=False) as response:
                head_came = True
                content = await self._read(response)
                names = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, content, names, int((monotonic() - started) * 1000))
        except aiohttp.ConnectionTimeoutError as error:
            raise TransportError("connect_timeout", str(error)) from None
        except aiohttp.SocketTimeoutError as error:
            raise TransportError("idle_timeout" if head_came else "first_byte_timeout", str(error)) from None
        except TimeoutError as error:
            raise TransportError("request_timeout", str(error)) from None
        except aiohttp.ClientConnectorCertificateError as error:
            raise TransportError("tls_failed", str(error)) from None
        except aiohttp.ClientConnectorError as error:
            raise TransportError("connect_failed", str(error)) from None
        except aiohttp.ClientPayloadError as error:
            cut = isinstance(error.__cause__, OSError) or "not enough data" in str(error).lower()
            raise TransportError("connection_reset" if cut else "protocol_error", str(error)) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise TransportError("connection_reset", str(error)) from None
        except aiohttp.InvalidURL as error:
            raise TransportError("invalid_request", str(error)) from None
        except (aiohttp.ClientError, asyncio.LimitOverrunError) as error:
            raise TransportError("protocol_error", str(error)) from None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        cap = self.limits.max_response_bytes
        content = bytearray()
        async for piece in response.content.iter_any():
            content += piece
            if len(content) > cap:
                raise TransportError(
                    "response_too_large", f"more than {cap} bytes (max_response_bytes)", response.status
                )
        return bytes(content)
