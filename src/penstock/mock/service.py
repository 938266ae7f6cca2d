"""Rules of the mock: a request is answered at once, or becomes a call to work on. Knows no sockets and no timers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import msgspec

from penstock.anthropic_errors import error_type
from penstock.errors import UsageError
from penstock.mock import answers, streams
from penstock.mock.answers import Ask, Envelope, Stream, UnanswerableError, encode_json
from penstock.mock.behaviour import Behaviour, Fate, LimitHeaders
from penstock.mock.counts import DROPPED, HUNG, OTHER, Counts, Stats
from penstock.mock.limit_headers import Headers, retry_headers, state_headers
from penstock.mock.limits import Clock, Gate, RateLimits
from penstock.mock.wire import Request

KEY_MAX_CHARS = 200
PAGE_MAX = 10_000
PAGE_DEFAULT = 1_000

_decode_values = msgspec.json.Decoder(dict[str, str | int | float | None]).decode


@dataclass(slots=True)
class Answer:
    """Answer, ready to be sent. With `events` the body comes piece by piece."""

    status: int
    headers: Headers
    body: bytes = b""
    events: Iterable[bytes] = ()


class Endpoint:
    """Endpoint of the imitated API: how its requests are read and its answers made."""

    def __init__(self, path: str, ask: type[Ask], envelope: Envelope, stream: Stream | None = None) -> None:
        self.path = path
        self.decode = msgspec.json.Decoder(ask).decode
        self.envelope = envelope
        self.stream = stream
        self.generates = stream is not None
        """Whether its answers are made of output tokens."""
        self.anthropic = path == "/v1/messages"


ENDPOINTS = {
    endpoint.path: endpoint
    for endpoint in (
        Endpoint("/v1/chat/completions", answers.ChatAsk, answers.chat, streams.chat),
        Endpoint("/v1/completions", answers.CompletionAsk, answers.completion, streams.completion),
        Endpoint("/v1/responses", answers.ResponseAsk, answers.response, streams.response),
        Endpoint("/v1/messages", answers.ChatAsk, answers.message, streams.message),
        Endpoint("/v1/embeddings", answers.EmbeddingAsk, answers.embeddings),
        Endpoint("/v1/moderations", answers.ModerationAsk, answers.moderation),
    )
}


@dataclass(slots=True)
class Call:
    """Admitted call: its fate is decided, its answer is made when it is due."""

    service: Service
    request: Request
    endpoint: Endpoint
    ask: Ask
    digest: str
    arrived_at: float
    tokens: int | None
    """Output tokens; None until the answer is made, if its text decides."""
    fate: Fate
    delay_s: float
    headers: Headers

    @property
    def streams(self) -> bool:
        return self.fate is Fate.ANSWER and bool(self.ask.stream) and self.endpoint.generates

    @property
    def work_s(self) -> float:
        """Seconds of work, at the load of this moment: to the first token, and for each of them."""
        behaviour = self.service.behaviour
        if not behaviour.token_time_s or not self.tokens or self.fate is not Fate.ANSWER:
            return self.delay_s
        return self.delay_s + self.tokens * behaviour.token_time_at(self.service.gate.working)

    def answer(self) -> Answer:
        if self.fate is Fate.ERROR:
            return self.service.error(self.endpoint, HTTPStatus.INTERNAL_SERVER_ERROR, self.digest, self.headers)
        reply = answers.reply_to(self.ask, self.digest, self.service.behaviour.response_bytes, self.tokens)
        self.tokens = reply.tokens_out if self.endpoint.generates else 0
        if self.endpoint.stream is not None and self.streams:
            headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), *self.headers]
            return Answer(200, headers, events=self.endpoint.stream(reply))
        return _json(200, self.endpoint.envelope(reply), self.headers)

    def count_served(self) -> None:
        """Count the call, whose whole answer has been sent."""
        if self.fate is Fate.ANSWER:
            self.service.counts.count_served(self.arrived_at, self.tokens or 0)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Wording of an error status: OpenAI's type and code, and the message."""

    type: str
    code: str | None
    message: str


_INVALID = Refusal("invalid_request_error", None, "The request cannot be served.")
_REFUSALS = {
    HTTPStatus.BAD_REQUEST: Refusal("invalid_request_error", "mock_rejected", "This input is one the mock rejects."),
    HTTPStatus.UNAUTHORIZED: Refusal("invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    HTTPStatus.TOO_MANY_REQUESTS: Refusal("requests", "rate_limit_exceeded", "Rate limit reached for requests."),
    HTTPStatus.INTERNAL_SERVER_ERROR: Refusal("server_error", None, "The mock fails this call on purpose."),
    HTTPStatus.SERVICE_UNAVAILABLE: Refusal("server_error", "overloaded", "The queue is full."),
}
_TOKENS = Refusal("tokens", "rate_limit_exceeded", "Rate limit reached for tokens.")
_QUOTA = Refusal("insufficient_quota", "insufficient_quota", "You exceeded your current quota.")
_FATE_STATUS = {Fate.ANSWER: "200", Fate.ERROR: "500", Fate.DROP: DROPPED, Fate.HANG: HUNG}


class Service:
    """Service: the mock's state and its rules, in the order a real API applies them."""

    def __init__(self, behaviour: Behaviour, clock: Clock = time.monotonic) -> None:
        self.behaviour = behaviour
        self.gate = Gate(behaviour.capacity, behaviour.queue_limit)
        self._clock = clock
        self.reset()

    def handle(self, request: Request) -> Answer | Call:
        path = request.path if request.path.startswith("/v1/") else "/v1" + request.path
        endpoint = ENDPOINTS.get(path)
        if endpoint is None:
            return self._own(request, path)
        if request.method != "POST":
            return _not_allowed("POST")
        if not request.has_body:
            return plain_error(HTTPStatus.LENGTH_REQUIRED, "Send a Content-Length or a chunked body.")
        return self._call(endpoint, request)

    def _call(self, endpoint: Endpoint, request: Request) -> Answer | Call:
        """Answer a call of the imitated API, or admit it."""
        now = self._clock()
        digest = answers.digest_of(request.body)
        ask, problem = _read(endpoint, request.body)
        key = key_of(request, ask, digest)
        self.counts.count_arrival(endpoint.path, ask.model if ask else OTHER, now)
        tokens = self.behaviour.tokens_of(key) if endpoint.generates else None
        refused = self._refuse_invalid(endpoint, request, digest, problem)
        if refused is None and ask is not None:
            refused = self._refuse_limited(endpoint, ask, digest, key, tokens)
        if refused is not None:
            self.counts.count_decision(key, str(refused.status))
            return refused
        assert ask is not None  # noqa: S101  (a body that cannot be read has been refused)
        fate, delay_s = self.behaviour.decide(key, self.counts.next_attempt(key))
        self.counts.count_decision(key, _FATE_STATUS[fate])
        self.counts.served += fate is Fate.ANSWER
        headers = self._headers(endpoint, digest)
        return Call(self, request, endpoint, ask, digest, now, tokens, fate, delay_s, headers)

    def _refuse_invalid(self, endpoint: Endpoint, request: Request, digest: str, problem: str | None) -> Answer | None:
        required = self.behaviour.require_key
        if required is not None and not _authorised(request.headers, required):
            return self.error(endpoint, HTTPStatus.UNAUTHORIZED, digest)
        if problem is not None:
            return self.error(endpoint, HTTPStatus.BAD_REQUEST, digest, message=problem)
        return None

    def _refuse_limited(self, endpoint: Endpoint, ask: Ask, digest: str, key: str, tokens: int | None) -> Answer | None:
        behaviour = self.behaviour
        if behaviour.quota is not None and self.counts.served >= behaviour.quota:
            status = HTTPStatus.PAYMENT_REQUIRED if endpoint.anthropic else HTTPStatus.TOO_MANY_REQUESTS
            return self.error(endpoint, status, digest, refusal=_QUOTA)
        charged = 0
        if behaviour.token_limit is not None:
            reply = answers.reply_to(ask, digest, behaviour.response_bytes, tokens)
            charged = reply.tokens_in + (reply.tokens_out if endpoint.generates else 0)
        excess = self.limits.admit(charged)
        if excess is not None:
            headers = self._headers(endpoint, digest) + retry_headers(excess.wait_s, behaviour.limit_headers)
            refusal = _TOKENS if excess.kind == "tokens" else None
            return self.error(endpoint, HTTPStatus.TOO_MANY_REQUESTS, digest, headers, refusal=refusal)
        if behaviour.rejects(key):
            return self.error(endpoint, HTTPStatus.BAD_REQUEST, digest)
        if self.gate.full:
            return self.error(endpoint, HTTPStatus.SERVICE_UNAVAILABLE, digest)
        return None

    def error(
        self,
        endpoint: Endpoint,
        status: HTTPStatus,
        digest: str,
        headers: Headers | None = None,
        *,
        refusal: Refusal | None = None,
        message: str | None = None,
    ) -> Answer:
        """Error in the dialect of its endpoint."""
        refusal = refusal or (_INVALID if message else _REFUSALS[status])
        message = message or refusal.message
        if headers is None:
            headers = self._headers(endpoint, digest)
        if endpoint.anthropic:
            error = {"type": error_type(status), "message": message}
            body = {"type": "error", "error": error, "request_id": f"req_{digest}"}
            return _json(status, body, headers)
        return _json(status, _openai_error(message, refusal.type, refusal.code), headers)

    def _headers(self, endpoint: Endpoint, digest: str) -> Headers:
        headers = [("request-id" if endpoint.anthropic else "x-request-id", f"req_{digest}")]
        if self.limits.buckets and self.behaviour.limit_headers is LimitHeaders.FULL:
            for kind, bucket in self.limits.buckets.items():
                headers += state_headers(kind, bucket, anthropic=endpoint.anthropic)
        return headers

    def _own(self, request: Request, path: str) -> Answer:
        """Answer of a page beside the imitated API."""
        changes: dict[str, Callable[[Request], Answer]] = {"/v1/mock/reset": self._reset, "/v1/mock/set": self._set}
        if path in changes:
            return changes[path](request) if request.method == "POST" else _not_allowed("POST")
        pages: dict[str, Callable[[Request], Answer]] = {
            "/v1/models": lambda _: _json(200, answers.models()),
            "/v1/healthz": lambda _: _json(200, {"status": "ok"}),
            "/v1/mock/stats": lambda _: _json(200, self.stats()),
            "/v1/mock/rate": lambda _: _json(200, self.counts.rate()),
            "/v1/mock/calls": self._calls_page,
        }
        if self.behaviour.vllm_metrics and request.path == "/metrics":
            pages[path] = lambda _: self._metrics()
        page = pages.get(path)
        if page is None:
            return plain_error(HTTPStatus.NOT_FOUND, f"Nothing is served at {request.path}.")
        if request.method not in ("GET", "HEAD"):
            return _not_allowed("GET, HEAD")
        return page(request)

    def _reset(self, _: Request) -> Answer:
        self.reset()
        return _json(200, {"reset": True})

    def _set(self, request: Request) -> Answer:
        try:
            values = _decode_values(request.body)
            self.set(values)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return plain_error(HTTPStatus.BAD_REQUEST, f"Send a JSON object of names and values: {error}.")
        except UsageError as error:
            return plain_error(HTTPStatus.BAD_REQUEST, f"{error.message}. {error.hint or ''}".rstrip())
        return _json(200, {"set": values})

    def set(self, values: Mapping[str, str | float | None]) -> None:
        """Change options, all of them or none; calls that were admitted before keep their fate."""
        self.behaviour = self.behaviour.with_values(values)
        self.limits.change(self.behaviour)
        self.gate.resize(self.behaviour.capacity)

    def reset(self) -> None:
        """Reset all counts and refill the buckets; calls in flight go on, and options stay as they are."""
        self.counts = Counts(track=self.behaviour.track, clock=self._clock)
        self.limits = RateLimits(self.behaviour, self._clock)
        self.gate.max_working = self.gate.working
        self.gate.max_waiting = self.gate.waiting

    def _calls_page(self, request: Request) -> Answer:
        try:
            query = {name: int(values[-1]) for name, values in parse_qs(request.query).items()}
        except ValueError:
            return plain_error(HTTPStatus.BAD_REQUEST, "after and limit are whole numbers.")
        after, limit = query.get("after", 0), query.get("limit", PAGE_DEFAULT)
        if after < 0 or not 1 <= limit <= PAGE_MAX:
            return plain_error(HTTPStatus.BAD_REQUEST, f"after is 0 or more, limit is 1 to {PAGE_MAX}.")
        return _json(200, self.counts.page(after, limit))

    def _metrics(self) -> Answer:
        """Load under the names of vLLM. Its cache is as full as its slots."""
        gate, capacity = self.gate, self.gate.capacity
        values = {
            "num_requests_running": float(gate.working),
            "num_requests_waiting": float(gate.waiting),
            "kv_cache_usage_perc": min(1.0, gate.working / capacity) if capacity else 0.0,
        }
        labels = f'{{engine="0",model_name="{answers.MODELS[0]}"}}'
        lines = (f"# TYPE vllm:{name} gauge\nvllm:{name}{labels} {value}\n" for name, value in values.items())
        return Answer(200, [("content-type", "text/plain; version=0.0.4; charset=utf-8")], "".join(lines).encode())

    def stats(self) -> Stats:
        counts, gate = self.counts, self.gate
        return Stats(
            calls=counts.calls,
            by_status=dict(counts.by_status),
            by_path=dict(counts.by_path),
            by_model=dict(counts.by_model),
            in_flight=gate.working,
            waiting=gate.waiting,
            max_in_flight=gate.max_working,
            max_waiting=gate.max_waiting,
            abandoned=counts.abandoned,
            ignored_waits=self.limits.ignored_waits,
            completion_tokens=counts.completion_tokens,
            latency_p50_ms=counts.latencies.percentile_ms(50),
            latency_p95_ms=counts.latencies.percentile_ms(95),
            keys=counts.keys,
            max_calls_per_key=counts.max_calls_per_key,
            untracked_calls=counts.untracked_calls,
            bytes_in=counts.bytes_in,
            bytes_out=counts.bytes_out,
            connections=counts.connections,
            elapsed_s=round(counts.elapsed_s, 3),
        )


def _read(endpoint: Endpoint, body: bytes) -> tuple[Ask | None, str | None]:
    """The decoded body, or the text of its error."""
    try:
        ask = endpoint.decode(body)
        ask.check()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UnanswerableError) as error:
        return None, f"The body cannot be read: {error}"
    return ask, None


def key_of(request: Request, ask: Ask | None, digest: str) -> str:
    """Key under which a call is counted: every attempt of one input should have the same."""
    named = request.headers.get(b"idempotency-key") or request.headers.get(b"x-custom-id")
    if named:
        return named.decode("latin-1")[:KEY_MAX_CHARS]
    custom_id = ask and ((ask.metadata or {}).get("custom_id") or ask.user)
    return custom_id[:KEY_MAX_CHARS] if isinstance(custom_id, str) else f"body:{digest}"


def _authorised(headers: dict[bytes, bytes], key: str) -> bool:
    bearer = headers.get(b"authorization", b"")
    given = (
        bearer[7:].strip() if bearer[:7].lower() == b"bearer " else b"",
        headers.get(b"x-api-key", b""),
        headers.get(b"api-key", b""),
    )
    return any(compare_digest(value, key.encode()) for value in given)


def _json(status: int, value: Any, headers: Headers | None = None) -> Answer:
    return Answer(status, [("content-type", "application/json"), *(headers or ())], encode_json(value))


def _openai_error(message: str, kind: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def plain_error(status: HTTPStatus, message: str, headers: Headers | None = None) -> Answer:
    """Error that belongs to no endpoint."""
    return _json(status, _openai_error(message, "invalid_request_error", None), headers)


def _not_allowed(allow: str) -> Answer:
    return plain_error(HTTPStatus.METHOD_NOT_ALLOWED, f"Only {allow} is served here.", [("allow", allow)])
