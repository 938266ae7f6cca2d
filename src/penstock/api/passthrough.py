"""Providers' own API, passed through: at once by model, or in a session's order where `X-Session-Id` names one.

Bodies are passed on byte by byte, both ways. A caller's key stays here; the provider is called with its own. An answer
of a session is final: the request has been tried as often as it may be, and a header tells the official clients not to
repeat it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping
from functools import partial
from http import HTTPStatus
from itertools import islice
from time import monotonic, time
from typing import Any

import msgspec
import psycopg
from psycopg_pool import PoolTimeout
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.api.answer_wait import AnswerWait, while_caller_stays
from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import ApiError, render
from penstock.api.guard import read_body
from penstock.api.multipart import idempotency_key, invalid
from penstock.api.sessions import SubmitQuery, give_up, still_waiting, wait
from penstock.api.submitting import ENDPOINTS_OF_SESSIONS, BodyTarget, Submission, check_key, read_target, submit
from penstock.claim import gates
from penstock.config import Config
from penstock.db.pool import Pool, borrowed
from penstock.dispatch.http.answer import Answer, error_of, json_with_usage, read_budgets, wait_hint_s
from penstock.dispatch.http.errors import TransportError
from penstock.dispatch.http.processor import HttpProcessor
from penstock.dispatch.http.streaming import EVENT_STREAM, StoredStream
from penstock.dispatch.providers import Provider
from penstock.dispatch.retry import needs_a_person
from penstock.dispatch.throttle import Callers
from penstock.errors import PenstockError
from penstock.limits.sharing import ProviderLimits
from penstock.model import Again
from penstock.observe.logs import plain_code
from penstock.server.waiters import Waiter
from penstock.sessions.answers import RequestRow
from penstock.sessions.streams import HEAD

_log = logging.getLogger("penstock.passthrough")

# A caller's headers that are passed on: those about the request, not about the caller.
_ASKED_HEADERS = ("accept", "openai-beta", "anthropic-beta", "anthropic-version")
# An answer's headers that are passed on: those that clients act on.
_PASSED_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "openai-processing-ms")
_PASSED_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-")
# Bounds of what is passed on: providers state a dozen limits, each in a few characters.
_MAX_PASSED_HEADERS = 40
_MAX_HEADER_CHARS = 200
_MAX_HEADER_NAME_CHARS = 100
# Types by which a browser would run what an upstream wrote, as if it were a page of this server. Of several it takes
# the last.
_ACTIVE_TYPE = re.compile(r"html|xml|xsl|svg|script|multipart|,", re.IGNORECASE)
_TIMEOUTS = frozenset({"connect_timeout", "first_byte_timeout", "idle_timeout", "request_timeout"})
_NO_BUFFERING = {"cache-control": "no-store", "x-accel-buffering": "no"}
_FINAL = {"x-should-retry": "false"}
_JSON = "application/json"
# Seconds that a call waits for a slot of its provider, and after which its caller should come again if none got free.
_SLOT_WAIT_S = 2.0
_MODELS_WITHIN_S = 5.0
_MODELS_KEPT_S = 60.0
_COME_AGAIN_S = 1

_stored_stream = msgspec.json.Decoder(StoredStream)


class Upstreams:
    """Connections to the providers, for calls without a session. Opened when first needed."""

    def __init__(self, config: Config, limits: ProviderLimits) -> None:
        self._config = config
        self._limits = limits
        self._open: dict[str, HttpProcessor] = {}
        self._callers: dict[str, Callers] = {}
        self._models: dict[str, tuple[float, list[str]]] = {}
        """Models that a provider listed, and when."""

    @contextlib.asynccontextmanager
    async def slot(self, provider: Provider, model: str) -> AsyncIterator[None]:
        """Hold one of the slots that all calls to the provider share; 429 if none gets free soon."""
        throttle = self._limits.of_provider(provider)
        callers = self._callers.get(provider.name)
        if callers is None:
            callers = self._callers[provider.name] = Callers(throttle)
        closed_s = throttle.route(model).held_until - monotonic()
        try:
            await callers.take(model, 0.0 if closed_s > _SLOT_WAIT_S else _SLOT_WAIT_S)
        except TimeoutError:
            raise ApiError(
                429,
                "The provider of this model takes no more calls just now. Try again.",
                code="provider_busy",
                headers={"retry-after": str(max(_COME_AGAIN_S, math.ceil(closed_s)))},
            ) from None
        try:
            yield
        finally:
            callers.free(model)

    async def note(self, provider: Provider, model: str, answer: Answer, database: Pool) -> None:
        """Take what an answer says of the provider's limits. One that asks to be left alone is, by every process."""
        throttle = self._limits.of_provider(provider)
        throttle.note_budgets(model, read_budgets(answer.headers, time()))
        route = throttle.route(model)
        if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
            wait_s = wait_hint_s(answer, self._config.retry, time(), with_budgets=True)
            error = error_of(answer)
            throttle.note(model, Again(error.code, error.message, 0.0, False, answer.status, gate_s=wait_s))
            if wait_s > 0:
                throttle.hold(model, wait_s)
                with contextlib.suppress(psycopg.Error, PoolTimeout):
                    async with borrowed(database) as connection:
                        await gates.close(connection, provider.pool, model, wait_s, error.code, error.message)
        elif answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            route.failed += 1
        elif answer.status < HTTPStatus.MULTIPLE_CHOICES:
            usage = json_with_usage(answer.body)[1] if answer.body else None
            tokens = (usage.output_tokens, usage.input_tokens) if usage is not None else (0, 0)
            route.succeed(answer.duration_ms / 1000, *tokens)

    def of(self, provider: Provider) -> HttpProcessor:
        found = self._open.get(provider.name)
        if found is None:
            dispatch = self._config.dispatch
            try:
                found = provider.processor(dispatch, self._config.retry)
            except PenstockError:
                raise ApiError(
                    503, "The provider of this model is not configured.", type="server_error", code="unavailable"
                ) from None
            self._open[provider.name] = found
        return found

    async def list_models(self, provider: Provider) -> list[str]:
        """Names of the models that a provider lists, of late."""
        read_at, names = self._models.get(provider.name, (-math.inf, []))
        if monotonic() - read_at > _MODELS_KEPT_S:
            names = [name for name in await self.of(provider).list_models(_MODELS_WITHIN_S) if provider.serves(name)]
            self._models[provider.name] = (monotonic(), names)
        return names

    async def close(self) -> None:
        await asyncio.gather(*(processor.close() for processor in self._open.values()))
        self._open.clear()


# -- one request


async def pass_on(path: str, call: Call[SubmitQuery, None]) -> Response:
    """Read the body as it is, and give it to a session or to the provider."""
    content = await read_body(call.request, call.server.config.sessions.session_max_body_bytes, call.memory)
    key = _session_key(call)
    if key is None:
        return await _forward(call, path, content, read_target(call, content))
    submission = await submit(call, key, path, content, waited=True)
    if submission.answered and submission.row is not None:
        return _answer_response(submission, submission.row)
    if submission.stream:
        return await _stream(call, submission)
    row = await wait(call, submission, call.query.wait)
    return await still_waiting(call, submission) if row is None else _answer_response(submission, row)


def _session_key(call: Call[Any, Any]) -> str | None:
    key = call.request.headers.get("x-session-id")
    if key is None:
        return None
    try:
        # As in a path, where a key can be any UTF-8 text.
        key = key.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise invalid("X-Session-Id", "it is not UTF-8.") from None
    return check_key(key, "X-Session-Id")


# -- without a session


async def _forward(call: Call[Any, Any], path: str, content: bytes, asked: BodyTarget) -> Response:
    upstream = call.server.upstreams.of(asked.provider)
    given = call.request.headers
    headers = {name: given[name] for name in _ASKED_HEADERS if name in given}
    if (key := idempotency_key(given)) is not None:
        headers["idempotency-key"] = bound_key(call.caller.owner, key)
    upstreams, database = call.server.upstreams, call.server.database
    stays = partial(while_caller_stays, call.request.receive)
    try:
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(upstreams.slot(asked.provider, asked.model))
            if not asked.stream:
                answer = await stays(upstream.forward(path, headers, content))
                await upstreams.note(asked.provider, asked.model, answer, database)
                return _passed(call, asked, answer)
            opened = await stays(held.enter_async_context(upstream.forward_open(path, headers, content)))
            if opened.status >= 400:
                refusal = upstream.redacted(Answer(opened.status, await stays(opened.read()), opened.headers))
                await upstreams.note(asked.provider, asked.model, refusal, database)
                return _passed(call, asked, refusal)
            headers = _answer_headers(upstream.redacted_headers(opened)) | _NO_BUFFERING
            pieces = _pieces(call, upstream.redacted_pieces(opened))
            return _PassedStream(pieces, opened.status, headers, held.pop_all())
    except TransportError as error:
        raise _to_api_error(error) from None


def _passed(call: Call[Any, Any], asked: BodyTarget, answer: Answer) -> Response:
    """The provider's answer as it came. Raises ApiError if it refuses the operator's key: its words would read as if
    the caller's own were refused. They are told to admins, and not logged, as they may quote the request."""
    if answer.status >= HTTPStatus.BAD_REQUEST and needs_a_person(answer.status, error := error_of(answer)):
        provider, code = asked.provider.name, plain_code(error.code)
        _log.warning(
            "provider %s refuses calls of %s that are passed on: HTTP %d %s", provider, asked.model, answer.status, code
        )
        words = f"{code}: {error.message}" if call.caller.role == "admin" and error.message else code
        message = (
            f"The provider '{provider}' refuses calls of {asked.model} ({words}) until an operator has mended it."
            " It is not your API key that was refused."
        )
        raise ApiError(502, message, type="server_error", code="provider_refused", headers=_FINAL)
    return Response(answer.body, answer.status, _answer_headers(answer.headers))


class _PassedStream(StreamingResponse):
    """Stream that holds its call and slot, or its wait, until it is over, even if the client reads nothing of it."""

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        status: int,
        headers: Mapping[str, str],
        held: contextlib.AsyncExitStack,
    ) -> None:
        super().__init__(pieces, status, headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


async def _pieces(call: Call[Any, Any], opened: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pieces of the answer as they come. If it breaks off, an error event says so: an end alone would pass for a whole
    answer."""
    fault = None
    try:
        async for piece in opened:
            yield piece
    except TransportError as error:
        fault = _to_api_error(error)
    if fault is not None:
        yield _error_event(call, fault)


def bound_key(owner: str, key: str) -> str:
    """The caller's Idempotency-Key as the provider sees it. All owners call under one credential: under a key that two
    of them chose, the provider would answer one with what it answered the other."""
    return hashlib.sha256(f"{owner}\0{key}".encode()).hexdigest()


def _answer_headers(headers: Mapping[str, str]) -> dict[str, str]:
    names = (name for name in headers if name in _PASSED_HEADERS or name.startswith(_PASSED_PREFIXES))
    names = (name for name in names if len(name) <= _MAX_HEADER_NAME_CHARS)
    told = ((name, headers[name]) for name in names)
    passed = dict(islice(((name, value) for name, value in told if _is_passable(value)), _MAX_PASSED_HEADERS))
    if _ACTIVE_TYPE.search(passed.get("content-type", "")):
        passed["content-type"] = "text/plain"
    upstream_id = headers.get("x-request-id") or headers.get("request-id") or ""
    if _is_passable(upstream_id):
        passed["x-upstream-request-id"] = upstream_id
    return passed


def _is_passable(value: str) -> bool:
    return 0 < len(value) <= _MAX_HEADER_CHARS and value.isprintable()


def _to_api_error(error: TransportError) -> ApiError:
    if error.code == "invalid_request":  # a header of the caller's
        return ApiError(400, f"The request cannot be passed on: {error.message}.", code=error.code)
    status = 504 if error.code in _TIMEOUTS else 502
    return ApiError(status, f"The provider gave no whole answer: {error.message}", type="server_error", code=error.code)


# -- in a session


def _answer_response(submission: Submission, row: RequestRow) -> Response:
    """The upstream's answer as if it had been called directly; Penstock's error where there is none, or where the
    upstream called a success what is none: a failed request is never answered like one that succeeded."""
    about = {"x-session-request-id": submission.public_id, "x-session-sequence": str(row.sequence)}
    tells = row.status == "completed" or (row.status_code is not None and row.status_code >= 400)
    if row.response is not None and row.status_code is not None and tells:
        headers = about | (_FINAL if row.status_code >= 400 else {})
        if row.stream and (stored := _as_stream(row.response)) is not None:
            return Response(stored.text.encode(), row.status_code, headers | {"content-type": stored.content_type})
        return Response(row.response, row.status_code, headers, _JSON)
    error = _failure(row)
    error.headers |= about | _FINAL
    raise error


def _failure(row: RequestRow) -> ApiError:
    if row.status == "cancelled":
        return ApiError(409, "The request was cancelled before its turn came.", code="cancelled")
    status = row.status_code if row.status_code is not None and row.status_code >= 400 else 502
    if row.error_code in _TIMEOUTS:
        status = 504
    message = row.error_message or "The request failed."
    return ApiError(status, message, type="server_error", code=row.error_code or "failed")


def _as_stream(content: bytes) -> StoredStream | None:
    try:
        return _stored_stream.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return None


async def _stream(call: Call[Any, Any], submission: Submission) -> Response:
    """Wait for the first piece, or for an answer that has none; then pass the pieces on as they come."""
    waiters = call.server.waiters
    until = monotonic() + submission.limit_wait_s(call.query.wait)
    waiting = waiters.waiting(submission.request_id, submission.lane_id, since=submission.since, follows=True)
    waiter = waiting.__enter__()
    try:
        with AnswerWait(waiters, waiter, call.request.receive) as awaited:
            try:
                begun = await awaited.wait_for_change(until)
            except ClientDisconnect:
                await give_up(call, submission)
                raise
        if waiter.row is None and begun:
            head = waiter.take_piece()
            content_type = head.content.decode("latin-1") if head.number == HEAD else EVENT_STREAM
            headers = {"content-type": content_type, "x-session-request-id": submission.public_id, **_NO_BUFFERING}
            held = contextlib.AsyncExitStack()
            held.push(waiting.__exit__)
            return _PassedStream(_relay(call, submission, waiter, head.lease_nonce), 200, headers, held)
    except BaseException:
        waiting.__exit__(None, None, None)
        raise
    waiting.__exit__(None, None, None)
    return await still_waiting(call, submission) if waiter.row is None else _answer_response(submission, waiter.row)


async def _relay(
    call: Call[Any, Any], submission: Submission, waiter: Waiter, lease_nonce: int
) -> AsyncIterator[bytes]:
    """Pieces as they come, and the rest from the recorded answer. Pieces of one call only: never two mixed."""
    sent = 0
    try:
        while True:
            while waiter.pieces:
                piece = waiter.take_piece()
                if piece.lease_nonce != lease_nonce:
                    yield _error_event(call, _broken_off())
                    return
                sent += len(piece.content)
                yield piece.content
            if waiter.row is not None:
                yield _rest(call, waiter.row, lease_nonce, sent)
                return
            if call.server.waiters.stopping.is_set():
                yield _error_event(call, _broken_off())
                return
            waiter.changed.clear()
            async with asyncio.timeout(submission.wait_timeout_s):
                await waiter.changed.wait()
    except TimeoutError:
        yield _error_event(call, _broken_off())


def _rest(call: Call[Any, Any], row: RequestRow, lease_nonce: int, sent: int) -> bytes:
    """The part of a recorded answer that has not been passed on yet."""
    if row.status != "completed":
        return _error_event(call, _failure(row))
    stored = _as_stream(row.response) if row.response is not None else None
    if stored is None or row.lease_nonce != lease_nonce:
        return _error_event(call, _broken_off())
    return stored.text.encode()[sent:]


def _broken_off() -> ApiError:
    message = "The answer broke off and is not continued here. The request goes on: ask for it by its id."
    return ApiError(502, message, type="server_error", code="stream_broken_off")


def _error_event(call: Call[Any, Any], error: ApiError) -> bytes:
    """An error inside a stream, as the official clients read it."""
    anthropic = call.request.url.path.endswith("/messages")
    body = render(error, "anthropic" if anthropic else "openai", call.request_id)
    return b"event: error\ndata: %b\n\n" % body


ENDPOINTS = tuple(
    Endpoint(
        "POST",
        path,
        partial(pass_on, path),
        f"{path.removeprefix('/v1/').replace('/', ' ').capitalize()}, passed on to the model's provider;"
        " with `X-Session-Id` in that session's order.",
        stream=_JSON,
        dialect="anthropic" if path == "/v1/messages" else "openai",
        errors=(409, 413, 429, 502, 504),
        name=f"pass_on_{path.removeprefix('/v1/').replace('/', '_')}",
    )
    for path in ENDPOINTS_OF_SESSIONS
)
