"""Sessions: requests answered one at a time, in the order they came, by any worker.

A call stores its request and then waits; workers, in this process or another, call the upstream. A caller that goes
away, or whose time is up, cancels nothing: its request keeps its place in the queue and can be read by its id.
"""

from __future__ import annotations

from time import monotonic
from typing import Annotated, Any, Literal
from urllib.parse import quote
from uuid import UUID

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from penstock.api.answer_wait import AnswerWait
from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import OpenAIErrorDetail, check_priority, conflict, not_found
from penstock.api.files import cursor
from penstock.api.multipart import idempotency_key, invalid
from penstock.api.preferences import read_preferences, wait_s_of
from penstock.api.session_objects import (
    OnDeadHead,
    Session,
    SessionDeleted,
    SessionList,
    SessionRequest,
    SessionRequestList,
    Status,
    StillWaiting,
    asked_request_object,
    request_object,
    session_object,
)
from penstock.api.submitting import ENDPOINTS_OF_SESSIONS, Submission, check_key, submit
from penstock.db.pool import borrowed
from penstock.erase import erase
from penstock.model import public_id
from penstock.sessions import sessions
from penstock.sessions.answers import RequestRow, get_request, get_request_and_body, list_requests
from penstock.sessions.sessions import SessionRow, cancel_request, get_session
from penstock.settle.write import pass_over

WaitS = Annotated[float, msgspec.Meta(ge=0, le=3_600)]
SessionEndpoint = Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ENDPOINTS_OF_SESSIONS)})]

_RETRY_AFTER_S = 1


# -- bodies and queries


class RequestBody(msgspec.Struct, forbid_unknown_fields=True):
    endpoint: SessionEndpoint
    body: msgspec.Raw
    """Body for the endpoint, passed on byte by byte."""


class SettingsBody(msgspec.Struct, forbid_unknown_fields=True):
    on_dead_head: OnDeadHead = "continue"
    max_queued: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] | None = None
    wait_timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=3_600)] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0


class ResumeBody(msgspec.Struct, forbid_unknown_fields=True):
    retry_head: bool = False


class SubmitQuery(msgspec.Struct):
    wait: WaitS | None = None
    cancel_on_disconnect: bool = False


class RequestQuery(msgspec.Struct):
    wait: WaitS = 0
    include: Annotated[Literal["request"] | None, msgspec.Meta(description="`request`: also what it asks.")] = None


class RequestsQuery(msgspec.Struct):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    status: Status | None = None
    order: Annotated[Literal["asc", "desc"], msgspec.Meta(description="As they were sent, or the newest first.")] = (
        "asc"
    )


class SessionsQuery(msgspec.Struct):
    after: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


# -- sending


async def create_session_request(call: Call[SubmitQuery, RequestBody]) -> Response | SessionRequest:
    """Waits for the answer. `Prefer: respond-async` does not wait; `wait=N` waits N seconds at most."""
    key = check_key(call.path["key"], "key")
    if call.body.endpoint not in ENDPOINTS_OF_SESSIONS:
        raise invalid("endpoint", f"it is one of {', '.join(ENDPOINTS_OF_SESSIONS)}.")
    preferences = read_preferences(call.request.headers.getlist("prefer"))
    wait_s = call.query.wait if call.query.wait is not None else wait_s_of(preferences)
    asynchronous = "respond-async" in preferences
    at_once = asynchronous and not wait_s
    content = bytes(call.body.body)
    submission = await submit(call, key, call.body.endpoint, content, waited=not at_once, inside="body.")
    row = submission.row if submission.answered or at_once else await wait(call, submission, wait_s)
    if row is not None and row.status in ("completed", "failed", "cancelled"):
        return request_object(row)
    if not asynchronous:
        return await still_waiting(call, submission)
    if row is None:
        row = await _find(call, submission.public_id)
    headers = {
        "location": _location(call, submission),
        "preference-applied": "respond-async",
        "retry-after": str(_RETRY_AFTER_S),
    }
    return Response(msgspec.json.encode(request_object(row)), 202, headers, "application/json")


async def wait(call: Call[Any, Any], submission: Submission, wait_s: float | None = None) -> RequestRow | None:
    """Wait for the answer. None if it does not come in time."""
    waiters = call.server.waiters
    until = monotonic() + submission.limit_wait_s(wait_s)
    with (
        waiters.waiting(
            submission.request_id, submission.lane_id, since=submission.since, stored=submission.stored
        ) as waiter,
        AnswerWait(waiters, waiter, call.request.receive) as awaited,
    ):
        try:
            return await awaited.wait_for_answer(until)
        except ClientDisconnect:
            await give_up(call, submission)
            raise


async def give_up(call: Call[Any, Any], submission: Submission) -> None:
    """Note that the caller has gone. Its request is cancelled only if the caller asked for that."""
    if getattr(call.query, "cancel_on_disconnect", False):
        async with borrowed(call.database) as connection:
            await cancel_request(connection, call.caller.owner, submission.key, submission.request_id)
            if (session := await get_session(connection, call.caller.owner, submission.key)) is not None:
                await pass_over(connection, [session.id])


async def still_waiting(call: Call[Any, Any], submission: Submission) -> Response:
    """503: the caller's time is up, or the server stops. A repeat with the same Idempotency-Key gets this request."""
    has_key = idempotency_key(call.request.headers) is not None
    message = (
        f"No answer yet{await _describe_halt(call, submission)}. The request keeps its place in the queue: ask for "
        + (
            f"{submission.public_id}, or repeat the call with the same Idempotency-Key."
            if has_key
            else f"{submission.public_id}."
        )
    )
    headers = {"retry-after": str(_RETRY_AFTER_S), "location": _location(call, submission)}
    if not has_key:
        # The official clients would repeat the call, and without a key that is another request.
        headers["x-should-retry"] = "false"
    error = OpenAIErrorDetail(message, "server_error", None, "wait_timeout")
    body = StillWaiting(error=error, id=submission.public_id, status="pending")
    return Response(msgspec.json.encode(body), 503, headers, "application/json")


async def _describe_halt(call: Call[Any, Any], submission: Submission) -> str:
    """Text about a halted provider, if the request waits for one: an operator has to act first."""
    provider, model = submission.asked.provider, submission.asked.model
    code = await call.server.halts.why(provider.session_pool, model)
    if code is None:
        return ""
    return (
        f": the provider '{provider.name}' refuses calls of {model} ({code}), so nobody's are made until an operator"
        " has mended it. It is not your API key that was refused"
    )


def _location(call: Call[Any, Any], submission: Submission) -> str:
    return call.link(f"/v1/sessions/{quote(submission.key, safe='')}/requests/{submission.public_id}")


# -- looking


async def retrieve_session_request(call: Call[RequestQuery, None]) -> SessionRequest:
    """With `wait`, answers as soon as the request has ended or the time is up."""
    text = call.path["request_id"]
    row = await _find(call, text)
    if call.query.wait > 0 and row.status in ("pending", "processing"):
        waiters = call.server.waiters
        with (
            waiters.waiting(row.id, None) as waiter,
            AnswerWait(waiters, waiter, call.request.receive) as awaited,
        ):
            await awaited.wait_for_answer(monotonic() + call.query.wait)
        row = await _find(call, text)
    if call.query.include is None:
        return request_object(row)
    # What it asks is read at the end: callers may wait by the thousands.
    return asked_request_object(*await _find_with_body(call, text))


async def list_session_requests(call: Call[RequestsQuery, None]) -> SessionRequestList:
    key, query = check_key(call.path["key"], "key"), call.query
    after = 0
    if query.after is not None:
        after_id = cursor("session_request", query.after)
        async with borrowed(call.database) as connection:
            place = await get_request(connection, call.caller.owner, key, after_id)
        if place is None:
            raise invalid("after", "it is the 'last_id' of the page before.")
        after = place.sequence
    async with borrowed(call.database) as connection:
        if await get_session(connection, call.caller.owner, key) is None:
            raise not_found("Session", key, "key")
        rows = await list_requests(
            connection,
            call.caller.owner,
            key,
            after_sequence=after,
            limit=query.limit + 1,
            status=query.status,
            newest_first=query.order == "desc",
        )
    data = [request_object(row) for row in rows[: query.limit]]
    return SessionRequestList.of(data, has_more=len(rows) > query.limit)


async def _find(call: Call[Any, Any], text: str) -> RequestRow:
    key, request_id = _request_place(call, text)
    async with borrowed(call.database) as connection:
        row = await get_request(connection, call.caller.owner, key, request_id)
    if row is None:
        raise not_found("SessionRequest", text)
    return row


async def _find_with_body(call: Call[Any, Any], text: str) -> tuple[RequestRow, bytes | None]:
    key, request_id = _request_place(call, text)
    async with borrowed(call.database) as connection:
        found = await get_request_and_body(connection, call.caller.owner, key, request_id)
    if found is None:
        raise not_found("SessionRequest", text)
    return found


def _request_place(call: Call[Any, Any], text: str) -> tuple[str, UUID]:
    key = check_key(call.path["key"], "key")
    request_id = cursor("session_request", text) if text.startswith("sreq_") and len(text) == 37 else None
    if request_id is None:
        raise not_found("SessionRequest", text)
    return key, request_id


async def list_sessions(call: Call[SessionsQuery, None]) -> SessionList:
    query = call.query
    after = cursor("session", query.after)
    async with borrowed(call.database) as connection:
        rows = await sessions.list_sessions(connection, call.caller.owner, after=after, limit=query.limit + 1)
    data = [session_object(row) for row in rows[: query.limit]]
    return SessionList.of(data, has_more=len(rows) > query.limit)


async def retrieve_session(call: Call[None, None]) -> Session:
    return session_object(await _find_session(call))


async def _find_session(call: Call[Any, Any]) -> SessionRow:
    key = check_key(call.path["key"], "key")
    async with borrowed(call.database) as connection:
        row = await get_session(connection, call.caller.owner, key)
    if row is None:
        raise not_found("Session", key, "key")
    return row


# -- steering


async def put_session(call: Call[None, SettingsBody]) -> Session:
    """Sets a session's settings. Those that are not given get their defaults again."""
    key = check_key(call.path["key"], "key")
    body = call.body
    check_priority(body.priority, await call.quota())
    async with borrowed(call.database) as connection:
        row = await sessions.put_session(
            connection,
            call.caller.owner,
            key,
            on_dead_head=body.on_dead_head,
            max_queued=body.max_queued,
            wait_timeout_s=body.wait_timeout_s,
            priority=body.priority,
        )
    return session_object(row)


async def resume_session(call: Call[None, ResumeBody | None]) -> Session:
    key = check_key(call.path["key"], "key")
    retry_head = call.body is not None and call.body.retry_head
    async with borrowed(call.database) as connection:
        if await get_session(connection, call.caller.owner, key) is None:
            raise not_found("Session", key, "key")
        if not await sessions.resume_session(connection, call.caller.owner, key, retry_head=retry_head):
            raise conflict("The session is not blocked.", code="not_blocked")
    return session_object(await _find_session(call))


async def cancel_session_request(call: Call[None, None]) -> SessionRequest:
    row = await _find(call, call.path["request_id"])
    if row.status != "cancelled":
        async with borrowed(call.database) as connection:
            cancelled = await cancel_request(connection, call.caller.owner, row.session_key, row.id)
            await pass_over(connection, [row.session_id])
        row = await _find(call, call.path["request_id"])
        if not cancelled and row.status != "cancelled":
            raise conflict(f"Cannot cancel a request with status '{row.status}'.")
    return request_object(row)


async def delete_session(call: Call[None, None]) -> SessionDeleted:
    row = await _find_session(call)
    async with borrowed(call.database) as connection:
        if not await erase.delete_session(connection, call.caller.owner, row.key):
            raise not_found("Session", row.key, "key")
    call.server.background.wake("purge")
    return SessionDeleted(id=public_id("session", row.id))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/sessions/{key}/requests",
        create_session_request,
        "Send a request to a session and wait for its answer; `Prefer: respond-async` does not wait.",
        errors=(409, 429),
    ),
    Endpoint(
        "GET",
        "/v1/sessions/{key}/requests",
        list_session_requests,
        "The requests of a session, in order.",
        errors=(404,),
    ),
    Endpoint(
        "GET",
        "/v1/sessions/{key}/requests/{request_id}",
        retrieve_session_request,
        "One request, at once or, with `wait`, when it has ended.",
        errors=(404,),
    ),
    Endpoint(
        "DELETE",
        "/v1/sessions/{key}/requests/{request_id}",
        cancel_session_request,
        "Cancel a request that waits.",
        errors=(404, 409),
    ),
    Endpoint("GET", "/v1/sessions", list_sessions, "The sessions, newest first."),
    Endpoint("GET", "/v1/sessions/{key}", retrieve_session, "One session.", errors=(400, 404)),
    Endpoint(
        "PUT",
        "/v1/sessions/{key}",
        put_session,
        "Set a session's settings; the session is made if there is none.",
        errors=(403,),
    ),
    Endpoint(
        "DELETE",
        "/v1/sessions/{key}",
        delete_session,
        "Cancel the waiting requests of a session and erase it.",
        errors=(400, 404),
    ),
    Endpoint(
        "POST",
        "/v1/sessions/{key}/resume",
        resume_session,
        "Go on after a request that failed for good, or run it again.",
        errors=(404, 409),
    ),
)
