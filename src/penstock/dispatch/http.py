"""HTTP endpoints as processors: one POST per item, its answer made a verdict."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Mapping
from time import monotonic, time
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import msgspec

from penstock import __version__
from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.answer import Answer, short
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.dispatch.direct import DirectTransport
from penstock.dispatch.pool import Dispatcher
from penstock.dispatch.retry import Failure, Refusals, judge_answer, judge_failure, refuses
from penstock.dispatch.slots import Slots
from penstock.dispatch.streaming import Streams, streamed
from penstock.dispatch.transport import OpenAnswer, PyreqwestTransport, StreamingTransport, Transport, TransportError
from penstock.errors import PenstockError, UsageError
from penstock.model import Item, Verdict

_log = logging.getLogger("penstock.dispatch")

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Ours to set, or not to be set by anyone: they say where a message ends and whom it is for.
_RESERVED_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "idempotency-key",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_UNSAFE_IN_PATH = re.compile(r"[\x00-\x20\x7f\\#]|(?:^|/)(?:\.|%2e){2}(?:/|\?|$)", re.IGNORECASE)
_MIN_SECRET_CHARS = 8
# Anthropic's calls name their version, and some servers look for the key in a header of its own.
_MESSAGES = "/messages"
_ANTHROPIC_VERSION = "2023-06-01"
_MAX_KNOWN_URLS = 1_000
_UNREACHED = frozenset({"connect_failed", "connect_timeout"})
_WARN_EVERY_S = 60.0


class HttpProcessor:
    """POSTs each item's bytes to `base_url` and its path, and judges the answer."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        dispatch: DispatchLimits,
        retry: RetryLimits,
        extra_headers: Mapping[str, str] | None = None,
        *,
        name: str = "",
        current_key: Callable[[], str | None] | None = None,
        streams: Streams | None = None,
        transport: Callable[[DispatchLimits, Mapping[str, str]], Transport] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`streams` takes the pieces of answers that somebody wants to read as they come. `current_key` is asked before
        every call, so that a key can be changed. With a `name`, an endpoint that cannot be reached is warned about."""
        self.base_url = checked_base(base_url)
        self._limits = dispatch
        self._retry = retry
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        self.headers = checked_headers(api_key, extra_headers or {})
        self._extra_headers = extra_headers or {}
        self._own_headers: dict[str, str] = {}
        """What has changed since the transport was given its headers."""
        self._message_headers = _anthropic_headers(api_key, self.headers)
        self._secrets = tuple(_secrets(api_key, self._extra_headers))
        self._key = api_key
        self._current_key = current_key
        self._name = name
        self._warn_from = 0.0
        self._refusals = Refusals(retry)
        self._urls: dict[str, str | None] = {}
        self._streams = streams
        self._transport = (transport or _transport_to(self.base_url))(dispatch, self.headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.close()

    def dispatcher(self, slots: Slots | None = None) -> Dispatcher:
        """A dispatcher for this endpoint, alone or sharing. It needs no time limit: `call` keeps its own."""
        return CoroutineDispatcher(each(self.call), self._limits.concurrency, self._retry, slots=slots)

    async def call(self, item: Item) -> Verdict:
        """One attempt."""
        started = monotonic()
        attempt, limits = item.attempt, self._retry.after(item.spent)
        url = self._url(item.url)
        if url is None:
            message = f"'{item.url[:200]}' is not a path below {self.base_url}"
            return judge_failure(Failure("invalid_request", message), attempt, limits, self._rng)
        headers = self._headers(item.url, {"Idempotency-Key": item.idempotency_key})
        try:
            if item.stream and self._streams is not None:
                answer = await streamed(self._streaming, url, headers, item, self._streams)
            else:
                answer = await self._transport.request("POST", url, headers, item.raw)
        except TransportError as error:
            self._warn_if_unreached(error.code)
            duration_ms = int((monotonic() - started) * 1000)
            failure = Failure(error.code, short(error.message), duration_ms, error.status_code)
            return judge_failure(failure, attempt, limits, self._rng, refusing_s=self._refusing_s(item, error.code))
        return judge_answer(
            answer,
            attempt,
            limits,
            self._rng,
            now_s=time(),
            refusing_s=self._refusing_s(item, answer.status),
            secrets=self._secrets,
        )

    async def forward(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer to somebody else's request, as it came; of an error, without our secrets. Or TransportError."""
        answer = await self._transport.request("POST", self._known_url(path), self._headers(path, headers), body)
        return answer if answer.status < 400 else msgspec.structs.replace(answer, body=self.redacted(answer.body))

    def forward_open(self, path: str, headers: Mapping[str, str], body: bytes) -> OpenAnswer:
        """The same, to be read as it comes."""
        return self._streaming.open("POST", self._known_url(path), self._headers(path, headers), body)

    def redacted(self, body: bytes) -> bytes:
        """An error's body: some upstreams repeat the key they did not like."""
        for secret in self._secrets:
            body = body.replace(secret.encode(), b"[redacted]")
        return body

    @property
    def _streaming(self) -> StreamingTransport:
        if not isinstance(self._transport, StreamingTransport):
            raise TypeError("this transport gives whole answers only")
        return self._transport

    def _headers(self, path: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        if self._current_key is not None and (key := self._current_key()) != self._key:
            self._change_key(key)
        if self._own_headers:
            headers = {**headers, **self._own_headers}
        return {**headers, **self._message_headers} if path.endswith(_MESSAGES) else headers

    def _change_key(self, key: str | None) -> None:
        self.headers = checked_headers(key, self._extra_headers)
        self._own_headers = {name: self.headers[name] for name in ("authorization",) if name in self.headers}
        self._message_headers = _anthropic_headers(key, self.headers)
        # Calls with the old one are still under way.
        self._secrets = tuple(_secrets(key, {**self._extra_headers, "": self._key or ""}))
        self._key = key

    def _warn_if_unreached(self, code: str) -> None:
        if self._name and code in _UNREACHED and monotonic() >= self._warn_from:
            self._warn_from = monotonic() + _WARN_EVERY_S
            _log.warning("provider %s cannot be reached at %s: %s; trying again", self._name, self.base_url, code)

    def _known_url(self, path: str) -> str:
        url = self._url(path)
        if url is None:
            raise ValueError(f"{path} is not a path")
        return url

    async def probe(self) -> None:
        """Make sure that something answers at the base URL; what it answers does not matter."""
        try:
            await self._transport.request("GET", f"{self.base_url}/models", {}, None)
        except TransportError as error:
            if error.code in ("connect_failed", "connect_timeout"):
                raise PenstockError(
                    f"nothing answers at {self.base_url}: {error.message}",
                    hint="Check the URL and that the server is running; it usually ends in /v1.",
                ) from error
            if error.code == "protocol_error":
                raise PenstockError(
                    f"what answers at {self.base_url} does not speak HTTP: {error.message}",
                    hint="Check the port, and whether it should be http:// or https://.",
                ) from error

    def _refusing_s(self, item: Item, code_or_status: str | int) -> float:
        if refuses(code_or_status):
            return self._refusals.lasting_s(item.route, monotonic())
        self._refusals.end(item.route)
        return 0.0

    def _url(self, path: str) -> str | None:
        try:
            return self._urls[path]
        except KeyError:
            if len(self._urls) >= _MAX_KNOWN_URLS:
                self._urls.clear()
            self._urls[path] = joined = join_url(self.base_url, path)
            return joined


def _transport_to(base_url: str) -> type[DirectTransport] | type[PyreqwestTransport]:
    return DirectTransport if urlsplit(base_url).scheme == "http" else PyreqwestTransport


def join_url(base_url: str, path: str) -> str | None:
    """`path` below `base_url`, with a segment such as `/v1` that both name kept once.

    None if the path is not one: a URL of its own, or a way out of the base.
    """
    if not path.startswith("/") or path.startswith("//") or _UNSAFE_IN_PATH.search(path):
        return None
    base_path = urlsplit(base_url).path
    shared = base_path[base_path.rfind("/") :] if base_path else ""
    if shared and (path == shared or path.startswith(f"{shared}/")):
        path = path[len(shared) :]
    return base_url + path


def checked_base(base_url: str) -> str:
    """The URL without a slash at its end; refused if it could not be called, or holds a secret."""
    trimmed = base_url.strip().rstrip("/")
    try:
        parts = urlsplit(trimmed)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        valid = False
    if not valid or re.search(r"[\x00-\x20]", trimmed):
        raise UsageError(f"'{base_url}' is not an http:// or https:// URL", hint="Write it as https://host/v1")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "the base URL contains a user name or password",
            hint="The key comes from the environment (--api-key-env) or a file (--api-key-file).",
        )
    if parts.query or parts.fragment:
        raise UsageError(f"'{base_url}' has a query or a fragment", hint="Write it as https://host/v1")
    return trimmed


def checked_headers(api_key: str | None, extra: Mapping[str, str]) -> dict[str, str]:
    """The headers of every call; refused if one of them could not be sent."""
    headers = {"content-type": "application/json", "user-agent": f"penstock/{__version__}"}
    if api_key:
        headers["authorization"] = f"Bearer {_checked_value('the API key', api_key)}"
    for name, value in extra.items():
        if not _HEADER_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not a header name")
        if name.lower() in _RESERVED_HEADERS:
            raise UsageError(f"the header {name} cannot be set", hint="Penstock or the connection sets it.")
        headers[name.lower()] = _checked_value(f"the header {name}", value)
    return headers


def checked_key(key: str, place: str) -> str:
    """An API key that can be sent; `place` is named if not, the key never."""
    if not key or not key.isascii() or not key.isprintable():
        raise UsageError(f"{place}: does not hold a usable API key", hint="A key is one line of plain text.")
    return key


def _anthropic_headers(api_key: str | None, headers: Mapping[str, str]) -> dict[str, str]:
    """What a call of the Messages API has on top, unless the operator set it."""
    added = {"anthropic-version": _ANTHROPIC_VERSION} | ({"x-api-key": api_key} if api_key else {})
    return {name: value for name, value in added.items() if name not in headers}


def _checked_value(what: str, value: str) -> str:
    # The value is not shown: it may be a secret.
    if not value.isascii() or not value.isprintable():
        raise UsageError(f"{what} contains a line break or another character that a header cannot hold")
    return value


def _secrets(api_key: str | None, extra: Mapping[str, str]) -> list[str]:
    """What an upstream may echo and a message must not: longest first, as one may contain another."""
    values = [api_key or "", *extra.values()]
    values += [word for value in values for word in value.split()]
    return sorted({value for value in values if len(value) >= _MIN_SECRET_CHARS}, key=len, reverse=True)
