"""Rules of the mock: a request is answered at once, or becomes a call to work on. Knows no sockets and no timers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hmac import compare_digest
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import msgspec

from penstock.anthropic_errors import error_type
from penstock.mock import answers, streams
from penstock.mock.answers import Ask, Envelope, Stream, UnanswerableError, encode_json
from penstock.mock.behaviour import Behaviour, Fate
from penstock.mock.counts import DROPPED, HUNG, OTHER, Counts, Stats
from penstock.mock.limits import Gate, TokenBucket
from penstock.mock.wire import Request

KEY_MAX_CHARS = 200
PAGE_MAX = 10_000
PAGE_DEFAULT = 1_000

Headers = list[tuple[str, str]]


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
    fate: Fate
    delay_s: float
    headers: Headers

    @property
    def streams(self) -> bool:
        return self.fate is Fate.ANSWER and bool(self.ask.stream) and self.endpoint.stream is not None

    def answer(self) -> Answer:
        if self.fate is Fate.ERROR:
            return self.service.error(self.endpoint, HTTPStatus.INTERNAL_SERVER_ERROR, self.digest, self.headers)
        reply = answers.reply_to(self.ask, self.digest, self.service.behaviour.response_bytes)
        if self.endpoint.stream is not None and self.streams:
            headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache"), *self.headers]
            return Answer(200, headers, events=self.endpoint.stream(reply))
        return _json(200, self.endpoint.envelope(reply), self.headers)


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
_QUOTA = Refusal("insufficient_quota", "insufficient_quota", "You exceeded your current quota.")
_FATE_STATUS = {Fate.ANSWER: "200", Fate.ERROR: "500", Fate.DROP: DROPPED, Fate.HANG: HUNG}


class Service:
    """Service: the mock's state and its rules, in the order a real API applies them."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.gate = Gate(behaviour.capacity, behaviour.queue_limit)
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
        digest = answers.digest_of(request.body)
        ask, problem = _read(endpoint, request.body)
        key = key_of(request, ask, digest)
        self.counts.count_arrival(endpoint.path, ask.model if ask else OTHER)
        refused = self._refuse(endpoint, request, key, digest, problem)
        if refused is not None:
            self.counts.count_decision(key, str(refused.status))
            return refused
        assert ask is not None  # noqa: S101  (a body that cannot be read has been refused)
        fate, delay_s = self.behaviour.decide(key, self.counts.next_attempt(key))
        self.counts.count_decision(key, _FATE_STATUS[fate])
        self.counts.served += fate is Fate.ANSWER
        return Call(self, request, endpoint, ask, digest, fate, delay_s, self._headers(endpoint, digest))

    def _refuse(
        self, endpoint: Endpoint, request: Request, key: str, digest: str, problem: str | None
    ) -> Answer | None:
        behaviour = self.behaviour
        if behaviour.require_key is not None and not _authorised(request.headers, behaviour.require_key):
            return self.error(endpoint, HTTPStatus.UNAUTHORIZED, digest)
        if problem is not None:
            return self.error(endpoint, HTTPStatus.BAD_REQUEST, digest, message=problem)
        if behaviour.quota is not None and self.counts.served >= behaviour.quota:
            status = HTTPStatus.PAYMENT_REQUIRED if endpoint.anthropic else HTTPStatus.TOO_MANY_REQUESTS
            return self.error(endpoint, status, digest, refusal=_QUOTA)
        if self.bucket is not None and not self.bucket.take():
            headers = self._headers(endpoint, digest) + _retry_headers(self.bucket.wait_s)
            return self.error(endpoint, HTTPStatus.TOO_MANY_REQUESTS, digest, headers)
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
        if self.bucket is not None:
            headers += _rate_headers(self.bucket, anthropic=endpoint.anthropic)
        return headers

    def _own(self, request: Request, path: str) -> Answer:
        """Answer of a page beside the imitated API."""
        if path == "/v1/mock/reset":
            if request.method != "POST":
                return _not_allowed("POST")
            self.reset()
            return _json(200, {"reset": True})
        pages: dict[str, Callable[[Request], Answer]] = {
            "/v1/models": lambda _: _json(200, answers.models()),
            "/v1/healthz": lambda _: _json(200, {"status": "ok"}),
            "/v1/mock/stats": lambda _: _json(200, self.stats()),
            "/v1/mock/calls": self._calls_page,
        }
        page = pages.get(path)
        if page is None:
            return plain_error(HTTPStatus.NOT_FOUND, f"Nothing is served at {request.path}.")
        if request.method not in ("GET", "HEAD"):
            return _not_allowed("GET, HEAD")
        return page(request)

    def reset(self) -> None:
        """Reset all counts and refill the bucket; calls in flight go on."""
        self.counts = Counts(track=self.behaviour.track)
        self.bucket = TokenBucket(self.behaviour.rate_limit) if self.behaviour.rate_limit else None
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
            keys=counts.keys,
            max_calls_per_key=counts.max_calls_per_key,
            untracked_calls=counts.untracked_calls,
            bytes_in=counts.bytes_in,
            bytes_out=counts.bytes_out,
            connections=counts.connections,
            elapsed_s=round(time.monotonic() - counts.started_at, 3),
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


def _retry_headers(wait_s: float) -> Headers:
    return [("retry-after", str(math.ceil(wait_s))), ("retry-after-ms", str(math.ceil(wait_s * 1000)))]


def _rate_headers(bucket: TokenBucket, *, anthropic: bool) -> Headers:
    limit, remaining = str(int(bucket.size)), str(bucket.remaining)
    if anthropic:
        reset = datetime.now(UTC) + timedelta(seconds=bucket.full_s)
        values = (limit, remaining, reset.isoformat(timespec="seconds").replace("+00:00", "Z"))
        names = ("limit", "remaining", "reset")
        return [(f"anthropic-ratelimit-requests-{name}", value) for name, value in zip(names, values, strict=True)]
    return [
        ("x-ratelimit-limit-requests", limit),
        ("x-ratelimit-remaining-requests", remaining),
        ("x-ratelimit-reset-requests", go_duration(bucket.full_s)),
    ]


def go_duration(seconds: float) -> str:
    """Duration as Go prints it, which is how OpenAI states them: `12ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


def _json(status: int, value: Any, headers: Headers | None = None) -> Answer:
    return Answer(status, [("content-type", "application/json"), *(headers or ())], encode_json(value))


def _openai_error(message: str, kind: str, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def plain_error(status: HTTPStatus, message: str, headers: Headers | None = None) -> Answer:
    """Error that belongs to no endpoint."""
    return _json(status, _openai_error(message, "invalid_request_error", None), headers)


def _not_allowed(allow: str) -> Answer:
    return plain_error(HTTPStatus.METHOD_NOT_ALLOWED, f"Only {allow} is served here.", [("allow", allow)])
