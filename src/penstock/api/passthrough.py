"""The providers' own API, passed through: at once by model, or in a session's order where `X-Session-Id` names one.

Bodies are passed on byte by byte, both ways. A caller's key stays here; the provider is called with its own. What a
session answers is final: it has been tried as often as it may be, and the official clients are told not to repeat it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from functools import partial
from time import monotonic
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import ApiError, render
from penstock.api.guard import too_large
from penstock.api.multipart import invalid
from penstock.api.sessions import SubmitQuery, give_up, still_waiting, wait
from penstock.api.submitting import ENDPOINTS_OF_SESSIONS, Asked, Submission, checked_key, read_asked, submit
from penstock.api.waiting import Attention, Waiter
from penstock.config import Config
from penstock.dispatch.http import HttpProcessor
from penstock.dispatch.streaming import EVENT_STREAM, StoredStream
from penstock.dispatch.transport import OpenAnswer, TransportError
from penstock.errors import PenstockError
from penstock.providers import Provider
from penstock.work.sessions import RequestRow
from penstock.work.streams import HEAD

# Of a caller's headers, those that say something about the request rather than about the caller.
_ASKED_HEADERS = ("accept", "idempotency-key", "openai-beta", "anthropic-beta", "anthropic-version")
# Of an answer's, those that clients act on.
_TOLD_HEADERS = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "openai-processing-ms")
_TOLD_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-")
_TIMEOUTS = frozenset({"connect_timeout", "first_byte_timeout", "idle_timeout", "request_timeout"})
_NO_BUFFERING = {"cache-control": "no-store", "x-accel-buffering": "no"}
_FINAL = {"x-should-retry": "false"}
_JSON = "application/json"
# How long a call waits for one of its provider's places, and when its caller should come again if there was none.
_PATIENCE_S = 2.0
_COME_AGAIN_S = 1

_stored_stream = msgspec.json.Decoder(StoredStream)


class Upstreams:
    """Connections to the providers, for what is passed on at once. Opened when first needed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._open: dict[str, HttpProcessor] = {}
        self._places: dict[str, asyncio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def place(self, provider: Provider) -> AsyncIterator[None]:
        """One of the calls that this process may have with the provider at a time; 429 if none gets free soon."""
        if provider.max_concurrency is None:
            yield
            return
        places = self._places.setdefault(provider.name, asyncio.Semaphore(provider.max_concurrency))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await places.acquire()
        except TimeoutError:
            raise ApiError(
                429,
                "The provider of this model has as many calls as it may have at a time.",
                code="provider_busy",
                headers={"retry-after": str(_COME_AGAIN_S)},
            ) from None
        try:
            yield
        finally:
            places.release()

    def of(self, provider: Provider) -> HttpProcessor:
        found = self._open.get(provider.name)
        if found is None:
            dispatch = self._config.dispatch
            try:
                found = provider.processor(dispatch, self._config.retry, dispatch.concurrency)
            except PenstockError:
                raise ApiError(
                    503, "The provider of this model is not configured.", type="server_error", code="unavailable"
                ) from None
            self._open[provider.name] = found
        return found

    async def close(self) -> None:
        await asyncio.gather(*(processor.close() for processor in self._open.values()))
        self._open.clear()


# -- one request


async def pass_on(path: str, call: Call[SubmitQuery, None]) -> Response:
    """Read the body as it is, and give it to a session or to the provider."""
    content = await _read(call)
    key = _session_key(call)
    if key is None:
        return await _forward(call, path, content, read_asked(call, content))
    submission = await submit(call, key, path, content, waited=True)
    if submission.answered and submission.row is not None:
        return _answered(submission, submission.row)
    if submission.stream:
        return await _stream(call, submission)
    row = await wait(call, submission, call.query.wait)
    return await still_waiting(call, submission) if row is None else _answered(submission, row)


async def _read(call: Call[Any, Any]) -> bytes:
    limit = call.server.config.sessions.session_max_body_bytes
    pieces: list[bytes] = []
    size = 0
    async for piece in call.request.stream():
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise too_large(limit)
    return b"".join(pieces)


def _session_key(call: Call[Any, Any]) -> str | None:
    key = call.request.headers.get("x-session-id")
    if key is None:
        return None
    try:
        # As in a path, where it can be anything that UTF-8 can say.
        key = key.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise invalid("X-Session-Id", "it is not UTF-8.") from None
    return checked_key(key, "X-Session-Id")


# -- without a session


async def _forward(call: Call[Any, Any], path: str, content: bytes, asked: Asked) -> Response:
    upstream = call.server.upstreams.of(asked.provider)
    given = call.request.headers
    headers = {name: given[name] for name in _ASKED_HEADERS if name in given}
    try:
        async with contextlib.AsyncExitStack() as held:
            await held.enter_async_context(call.server.upstreams.place(asked.provider))
            if not asked.stream:
                answer = await upstream.forward(path, headers, content)
                return Response(answer.body, answer.status, _told(answer.headers))
            opened = await held.enter_async_context(upstream.forward_open(path, headers, content))
            if opened.status >= 400:
                return Response(upstream.redacted(await opened.read()), opened.status, _told(opened.headers))
            headers = _told(opened.headers) | _NO_BUFFERING
            return _Passing(_pieces(call, opened), opened.status, headers, held.pop_all())
    except TransportError as error:
        raise _unreached(error) from None


class _Passing(StreamingResponse):
    """A stream that holds on to its call and its place until it is over, even if nobody reads a piece of it."""

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


async def _pieces(call: Call[Any, Any], opened: OpenAnswer) -> AsyncIterator[bytes]:
    """The answer as it comes. One that breaks off is said to have: an end alone would pass for a whole answer."""
    fault = None
    try:
        async for piece in opened:
            yield piece
    except TransportError as error:
        fault = _unreached(error)
    if fault is not None:
        yield _error_event(call, fault)


def _told(headers: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in headers if name in _TOLD_HEADERS or name.startswith(_TOLD_PREFIXES)]
    told = {name: value for name in names if (value := headers.get(name)) is not None}
    if upstream_id := headers.get("x-request-id") or headers.get("request-id"):
        told["x-upstream-request-id"] = upstream_id
    return told


def _unreached(error: TransportError) -> ApiError:
    status = 504 if error.code in _TIMEOUTS else 502
    return ApiError(status, f"The provider gave no whole answer: {error.message}", type="server_error", code=error.code)


# -- in a session


def _answered(submission: Submission, row: RequestRow) -> Response:
    """The upstream's answer as if it had been asked directly; ours where it gave none."""
    about = {"x-session-request-id": submission.public_id, "x-session-sequence": str(row.sequence)}
    if row.response is not None and row.status_code is not None:
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
    except msgspec.DecodeError:
        return None


async def _stream(call: Call[Any, Any], submission: Submission) -> Response:
    """Wait for the first piece, or for an answer that has none; then pass on what comes."""
    waiters = call.server.waiters
    until = monotonic() + submission.patience_s(call.query.wait)
    waiting = waiters.waiting(submission.request_id, submission.lane_id, since=submission.since, follows=True)
    waiter = waiting.__enter__()
    try:
        with Attention(waiters, waiter, call.request.receive) as attention:
            try:
                begun = await attention.change(until)
            except ClientDisconnect:
                await give_up(call, submission)
                raise
        if waiter.row is None and begun:
            head = waiter.take_piece()
            content_type = head.content.decode("latin-1") if head.number == HEAD else EVENT_STREAM
            headers = {"content-type": content_type, "x-session-request-id": submission.public_id, **_NO_BUFFERING}
            return StreamingResponse(_relay(call, submission, waiter, head.lease_nonce, waiting), 200, headers)
    except BaseException:
        waiting.__exit__(None, None, None)
        raise
    waiting.__exit__(None, None, None)
    return await still_waiting(call, submission) if waiter.row is None else _answered(submission, waiter.row)


async def _relay(
    call: Call[Any, Any], submission: Submission, waiter: Waiter, lease_nonce: int, waiting: Any
) -> AsyncIterator[bytes]:
    """Pieces as they come, and the rest from the recorded answer. Pieces of one call only: never two mixed."""
    sent = 0
    try:
        while True:
            while waiter.pieces:
                piece = waiter.take_piece()
                if piece.lease_nonce != lease_nonce:
                    yield _error_event(call, _broken())
                    return
                sent += len(piece.content)
                yield piece.content
            if waiter.row is not None:
                yield _rest(call, waiter.row, lease_nonce, sent)
                return
            if call.server.waiters.stopping.is_set():
                yield _error_event(call, _broken())
                return
            waiter.changed.clear()
            async with asyncio.timeout(submission.wait_timeout_s):
                await waiter.changed.wait()
    except TimeoutError:
        yield _error_event(call, _broken())
    finally:
        waiting.__exit__(None, None, None)


def _rest(call: Call[Any, Any], row: RequestRow, lease_nonce: int, sent: int) -> bytes:
    """What of a recorded answer has not been passed on yet."""
    if row.status != "completed":
        return _error_event(call, _failure(row))
    stored = _as_stream(row.response) if row.response is not None else None
    if stored is None or row.lease_nonce != lease_nonce:
        return _error_event(call, _broken())
    return stored.text.encode()[sent:]


def _broken() -> ApiError:
    message = "The answer broke off and is not continued here. The request goes on: ask for it by its id."
    return ApiError(502, message, type="server_error", code="stream_broken_off")


def _error_event(call: Call[Any, Any], error: ApiError) -> bytes:
    """An error inside a stream, as the official clients read it."""
    anthropic = call.request.url.path.endswith("/messages")
    body = render(error, "anthropic" if anthropic else "openai", call.request_id)
    return b"event: error\ndata: %b\n\n" % body


_SUMMARIES = {
    "/v1/chat/completions": "Chat completions",
    "/v1/completions": "Completions",
    "/v1/embeddings": "Embeddings",
    "/v1/responses": "Responses",
    "/v1/moderations": "Moderations",
    "/v1/messages": "Messages",
}

ENDPOINTS = tuple(
    Endpoint(
        "POST",
        path,
        partial(pass_on, path),
        f"{_SUMMARIES[path]}, passed on to the model's provider; with `X-Session-Id` in that session's order.",
        query=SubmitQuery,
        stream=_JSON,
        dialect="anthropic" if path == "/v1/messages" else "openai",
        errors=(400, 409, 413, 429, 502, 503, 504),
        name=f"pass_on_{path.removeprefix('/v1/').replace('/', '_')}",
    )
    for path in ENDPOINTS_OF_SESSIONS
)
