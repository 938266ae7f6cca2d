"""HTTP endpoints as processors: one POST per item, its answer made a verdict."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from time import monotonic, time
from types import TracebackType
from typing import Protocol, Self
from urllib.parse import urlsplit

import msgspec

from penstock import __version__
from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.http.answer import Answer, read_budgets, short
from penstock.dispatch.http.client import HttpClient, OpenAnswer
from penstock.dispatch.http.connect import ConnectOptions, uses_tls
from penstock.dispatch.http.errors import NEVER_SENT, TransportError
from penstock.dispatch.http.redaction import Redactor, key_texts, secret_texts
from penstock.dispatch.http.streaming import Streams, streamed
from penstock.dispatch.retry import Failure, Refusals, judge_answer, judge_failure, limits_for, refuses
from penstock.dispatch.throttle import Throttle
from penstock.errors import PenstockError
from penstock.model import Item, Verdict
from penstock.observe.traces import span, with_traceparent
from penstock.validators import checked_base, checked_headers, checked_value

_log = logging.getLogger("penstock.dispatch")

_UNSAFE_IN_PATH = re.compile(r"[\x00-\x20\x7f\\#]|(?:^|/)(?:\.|%2e){2}(?:/|\?|$)", re.IGNORECASE)
# Anthropic's calls name their version, and some servers look for the key in a header of its own.
_MESSAGES = "/messages"
_ANTHROPIC_VERSION = "2023-06-01"
_MAX_KNOWN_URLS = 1_000
_WARN_EVERY_S = 60.0
_MAX_MODELS = 1_000
_MAX_MODEL_CHARS = 256


class Judge(Protocol):
    """Makes a verdict of a whole answer, as `judge_answer` does."""

    def __call__(
        self,
        answer: Answer,
        attempt: int,
        limits: RetryLimits,
        rng: random.Random,
        *,
        now_s: float,
        refusing_s: float,
        secrets: Sequence[str],
    ) -> Verdict: ...


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


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
        options: ConnectOptions = ConnectOptions(),  # noqa: B008 -- frozen
        name: str = "",
        current_key: Callable[[], str | None] | None = None,
        streams: Streams | None = None,
        throttle: Throttle | None = None,
        client: type[HttpClient] = HttpClient,
        rng: random.Random | None = None,
    ) -> None:
        """`streams` takes the pieces of answers that a caller reads as they come. `current_key` is asked before
        every call, so that a key can be changed. With a `name`, an endpoint that cannot be reached is warned about.
        `throttle` bounds the calls of its dispatchers, and is told what answers say of allowances."""
        self.base_url = checked_base(base_url)
        self._limits = dispatch
        self._retry = retry
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        self.headers = _common_headers(api_key, extra_headers or {})
        self._extra_headers = extra_headers or {}
        self._operators_names = {"authorization", *map(str.lower, self._extra_headers)}
        self._own_headers: dict[str, str] = {}
        """What has changed since the client was given its headers."""
        self._message_headers = _anthropic_headers(api_key, self.headers)
        self._hide(api_key, self._extra_headers)
        self._key = api_key
        self._current_key = current_key
        self.name = name
        self._warn_from = 0.0
        self._refusals = Refusals(retry)
        self._urls: dict[str, str | None] = {}
        self._streams = streams
        self.throttle = throttle
        if uses_tls(self.base_url):
            options.tls()  # fail now, if its files cannot be used, rather than with every call
        self._client = client(dispatch, self.headers, options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    def dispatcher(self, call: Callable[[Item], Awaitable[Verdict]] | None = None) -> Dispatcher:
        """A dispatcher for this endpoint. It needs no time limit: `call`, or what is given in its place, keeps its
        own."""
        call = call or self.call
        return CoroutineDispatcher(each(call), self._limits.most_calls, self._retry, throttle=self.throttle)

    async def call(self, item: Item) -> Verdict:
        """One attempt: the item's bytes are sent to its path."""
        return await self.send(item, "POST", item.url, {}, item.raw, judge_answer)

    async def send(
        self, item: Item, method: str, path: str, headers: Mapping[str, str], body: bytes | None, judge: Judge
    ) -> Verdict:
        """One attempt of an item, with a request that was made for it. The operator's headers win over its own."""
        started = monotonic()
        attempt, limits = item.attempt, limits_for(self._retry, item)
        url = self._url(path)
        if url is None:
            message = f"'{path[:200]}' is not a path below {self.base_url}"
            return judge_failure(Failure("invalid_request", message), attempt, limits, self._rng)
        own = {name: value for name, value in headers.items() if name.lower() not in self._operators_names}
        own = {"Idempotency-Key": item.idempotency_key, **own}
        try:
            with span(method, "CLIENT", route=item.route, attempt=attempt) as called:
                headers = self._headers(path, own)
                if item.stream and self._streams is not None:
                    answer = await streamed(self._client, url, headers, item, self._streams, self._keys)
                else:
                    answer = self._keys.answer(await self._client.request(method, url, headers, body))
                called.set_attribute("http.response.status_code", answer.status)
        except TransportError as error:
            self._warn_if_unreached(error)
            duration_ms = int((monotonic() - started) * 1000)
            failure = Failure(error.code, short(str(error)), duration_ms, error.status_code)
            return judge_failure(failure, attempt, limits, self._rng, refusing_s=self._refusing_s(item, error.code))
        self._note_budgets(item.route, answer)
        return judge(
            answer,
            attempt,
            limits,
            self._rng,
            now_s=time(),
            refusing_s=self._refusing_s(item, answer.status),
            secrets=self._secrets,
        )

    def _note_budgets(self, route: str, answer: Answer) -> None:
        if self.throttle is not None and (budgets := read_budgets(answer.headers, time())):
            self.throttle.note_budgets(route, budgets)

    async def forward(self, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer to a request passed through, as it came but for our secrets. Raises TransportError."""
        answer = await self._client.request("POST", self._known_url(path), self._headers(path, headers), body)
        return self.redacted(answer)

    def forward_open(self, path: str, headers: Mapping[str, str], body: bytes) -> OpenAnswer:
        """The same, to be read as it comes: what is read of it is still to be redacted."""
        return self._client.open("POST", self._known_url(path), self._headers(path, headers), body)

    def redacted(self, answer: Answer) -> Answer:
        """A whole answer without our secrets: some upstreams repeat the key they did not like."""
        return (self._errors if answer.status >= 400 else self._keys).answer(answer)

    def redacted_pieces(self, opened: OpenAnswer) -> AsyncIterator[bytes]:
        """Pieces of an answer as they come, without our secrets."""
        return self._keys.pieces(opened)

    def redacted_headers(self, opened: OpenAnswer) -> Mapping[str, str]:
        return self._keys.headers(opened.headers)

    def _hide(self, api_key: str | None, headers: Mapping[str, str]) -> None:
        """Keep these secrets out of every answer."""
        self._secrets = secret_texts(api_key, headers)
        self._errors = Redactor(self._secrets)
        self._keys = Redactor(key_texts(api_key, headers))

    def _headers(self, path: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        if self._current_key is not None and (key := self._current_key()) != self._key:
            self._change_key(key)
        headers = with_traceparent(headers)
        if self._own_headers:
            headers = {**headers, **self._own_headers}
        return {**headers, **self._message_headers} if path.endswith(_MESSAGES) else headers

    def _change_key(self, key: str | None) -> None:
        self.headers = _common_headers(key, self._extra_headers)
        self._own_headers = {name: self.headers[name] for name in ("authorization",) if name in self.headers}
        self._message_headers = _anthropic_headers(key, self.headers)
        # Calls with the old one are still under way.
        self._hide(key, {**self._extra_headers, "previous api-key": self._key or ""})
        self._key = key

    def _warn_if_unreached(self, error: TransportError) -> None:
        if self.name and error.code in NEVER_SENT and monotonic() >= self._warn_from:
            self._warn_from = monotonic() + _WARN_EVERY_S
            where = (self.name, self.base_url)
            _log.warning("provider %s cannot be reached at %s: %s: %s; trying again", *where, error.code, error)

    def _known_url(self, path: str) -> str:
        url = self._url(path)
        if url is None:
            raise ValueError(f"{path} is not a path")
        return url

    async def probe(self) -> int | None:
        """Make sure that something answers at the base URL; returns the answer's status, None if it took too long."""
        try:
            return (await self._client.request("GET", f"{self.base_url}/models", {}, None)).status
        except TransportError as error:
            if error.code in ("connect_failed", "connect_timeout"):
                raise PenstockError(
                    f"nothing answers at {self.base_url}: {error.message}",
                    hint="Check the URL and that the server is running; it usually ends in /v1.",
                ) from error
            if error.code in NEVER_SENT:
                hint = f"{error.hint[:1].upper()}{error.hint[1:]}." if error.hint else "Ask who runs the proxy."
                raise PenstockError(f"{self.base_url} cannot be called: {error.message}", hint=hint) from error
            if error.code == "protocol_error":
                raise PenstockError(
                    f"what answers at {self.base_url} does not speak HTTP: {error.message}",
                    hint="Check the port, and whether it should be http:// or https://.",
                ) from error
        return None

    async def list_models(self, within_s: float) -> list[str]:
        """Names of the models that the endpoint lists; none if it does not list them in time."""
        try:
            async with asyncio.timeout(within_s):
                url = f"{self.base_url}/models"
                answer = await self._client.request("GET", url, self._headers("/models", {}), None)
                listed = _models.decode(self.redacted(answer).body)
        except (TransportError, TimeoutError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []
        names = [model.id for model in listed.data if 0 < len(model.id) <= _MAX_MODEL_CHARS and model.id.isprintable()]
        return names[:_MAX_MODELS]

    def _refusing_s(self, item: Item, code_or_status: str | int) -> float:
        if refuses(code_or_status):
            return self._refusals.note_refusal(item.route, monotonic())
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


def _common_headers(api_key: str | None, extra: Mapping[str, str]) -> dict[str, str]:
    """The headers of every call; refused if one of them could not be sent."""
    headers = {"content-type": "application/json", "user-agent": f"penstock/{__version__}"}
    if api_key:
        headers["authorization"] = f"Bearer {checked_value(api_key, 'the API key')}"
    return headers | checked_headers(extra)


def _anthropic_headers(api_key: str | None, headers: Mapping[str, str]) -> dict[str, str]:
    """What a call of the Messages API has on top, unless the operator set it."""
    added = {"anthropic-version": _ANTHROPIC_VERSION} | ({"x-api-key": api_key} if api_key else {})
    return {name: value for name, value in added.items() if name not in headers}
