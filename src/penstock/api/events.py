"""CloudEvents in: an event brings a request to a session, like one that came over REST.

    type     com.penstock.session.request
    subject  the session's key, unless the data names it
    data     {"session": KEY, "endpoint": "/v1/chat/completions", "body": {"model": ...}}

An event is identified by its source and its id: the same one again is answered with the request it became. A batch is
taken whole or not at all. The answers go to the configured sinks, and can be read by the requests' ids.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote
from uuid import UUID

import msgspec
from starlette.responses import Response

from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import ApiError, conflict
from penstock.api.guard import read_body
from penstock.api.session_objects import request_object
from penstock.api.submitting import ENDPOINTS_OF_SESSIONS, check_key, read_target
from penstock.db.pool import Connection, borrowed
from penstock.deliver.sink_config import REQUEST_TYPE, any_wants
from penstock.deliver.sinks import Announcement
from penstock.model import public_id
from penstock.sessions.accept import NewRequest
from penstock.sessions.answers import get_request
from penstock.sessions.cloudevents import STRUCTURED, Event, EventError, read
from penstock.sessions.events import EventRequest, NotTaken, accept_events

_MAX_EVENTS = 1_000
_DECIDED = ("completed", "failed", "cancelled")


class EventData(msgspec.Struct, forbid_unknown_fields=True):
    """Data of an event: the request it brings."""

    endpoint: str
    body: msgspec.Raw
    session: str | None = None


class EventAccepted(msgspec.Struct, kw_only=True):
    """Request that an event became."""

    id: str
    object: Literal["event.accepted"] = "event.accepted"
    session: str
    event_id: str
    event_source: str
    url: str


_data = msgspec.json.Decoder(EventData)


async def receive_events(call: Call[None, None]) -> Response:
    """202 with the request of each event: an object for one event, an array for a batch."""
    headers = {name.lower(): value for name, value in call.request.headers.items()}
    content = await read_body(call.request, call.server.config.serve.max_json_bytes, call.memory)
    try:
        found, batched = read(headers, content)
    except EventError as error:
        raise _refusal(error, error.index) from None
    if len(found) > _MAX_EVENTS:
        raise ApiError(413, f"A batch has at most {_MAX_EVENTS:,} events.", code="too_many_events")
    askings = [_asking(call, event, index if batched else None) for index, event in enumerate(found)]
    limits = call.server.config.sessions
    try:
        async with borrowed(call.database) as connection:
            taken = await accept_events(connection, askings, max_queued=limits.session_max_queued)
    except NotTaken as refusal:
        raise _not_taken(refusal, askings[refusal.index], batched=batched) from None
    answers = [_accepted(call, asking, request_id) for asking, request_id in zip(askings, taken, strict=True)]
    if batched:
        return Response(msgspec.json.encode(answers), 202, media_type="application/json")
    (answer,) = answers
    return Response(msgspec.json.encode(answer), 202, {"location": answer.url}, "application/json")


def _asking(call: Call[None, None], event: Event, index: int | None) -> EventRequest:
    where = "" if index is None else f"[{index}]."
    try:
        return EventRequest(event.source, event.id, _request(call, event, where))
    except EventError as error:
        raise _refusal(error, index) from None


def _request(call: Call[None, None], event: Event, where: str) -> NewRequest:
    if event.type != REQUEST_TYPE:
        raise EventError(f"Events of the type '{event.type[:100]}' are not accepted here: send {REQUEST_TYPE}.", "type")
    if event.data is None or not event.has_json:
        raise EventError("The event's data must be JSON: an object with 'endpoint' and 'body'.", "data")
    try:
        data = _data.decode(event.data)
    except msgspec.ValidationError as error:
        raise EventError(f"The event's data has the wrong shape: {error}.", "data") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EventError("The event's data is not valid JSON.", "data") from None
    if data.endpoint not in ENDPOINTS_OF_SESSIONS:
        raise EventError(f"'data.endpoint' is one of {', '.join(ENDPOINTS_OF_SESSIONS)}.", "data.endpoint")
    if data.session is not None and event.subject is not None and data.session != event.subject:
        raise EventError("'subject' and 'data.session' name different sessions.", "subject")
    key = data.session or event.subject
    if key is None:
        raise EventError("The event names no session: give its key as 'subject' or 'data.session'.", "subject")
    check_key(key, f"{where}subject" if data.session is None else f"{where}data.session")
    content = bytes(data.body)
    most = call.server.config.sessions.session_max_body_bytes
    if len(content) > most:
        raise ApiError(413, f"The body is larger than {most:,} bytes.", code="request_too_large")
    asked = read_target(call, content, f"{where}data.body.")
    owner = call.caller.owner
    return NewRequest(
        owner=owner,
        session_key=key,
        pool=asked.provider.session_pool,
        route=asked.model,
        endpoint=data.endpoint,
        body=content,
        stream=asked.stream,
        announce=any_wants(call.server.config.sinks, owner, from_event=True),
    )


def _refusal(error: EventError, index: int | None) -> ApiError:
    which = "" if index is None else f"Event {index}: "
    param = None
    if error.attribute is not None:
        param = error.attribute if index is None else f"[{index}].{error.attribute}"
    status = 415 if error.unsupported else 400
    return ApiError(
        status,
        f"{which}{error.message}",
        param=param,
        code="unsupported_media_type" if status == 415 else "invalid_event",
    )


def _not_taken(refusal: NotTaken, asking: EventRequest, *, batched: bool) -> ApiError:
    which = f"Event {refusal.index}: " if batched else ""
    if refusal.code == "event_conflict":
        return conflict(
            f"{which}an event of this source with this id brought another request.", param="id", code=refusal.code
        )
    return ApiError(
        429,
        f"{which}the queue of the session '{asking.request.session_key}' is full.",
        type="rate_limit_error",
        code="session_queue_full",
        headers={"retry-after": "1"},
    )


def _accepted(call: Call[Any, Any], asking: EventRequest, request_id: UUID) -> EventAccepted:
    key, name = asking.request.session_key, public_id("session_request", request_id)
    return EventAccepted(
        id=name,
        session=key,
        event_id=asking.event_id,
        event_source=asking.source,
        url=call.link(f"/v1/sessions/{quote(key, safe='')}/requests/{name}"),
    )


async def describe_request(connection: Connection, session_key: str, request_id: UUID) -> Announcement | None:
    """Announcement of a request to sinks: the same object that the API shows."""
    row = await get_request(connection, None, session_key, request_id)
    if row is None or row.status not in _DECIDED:
        return None
    return Announcement(row.status, msgspec.json.encode(request_object(row)))


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/events",
        receive_events,
        "Send a CloudEvent, or a batch of them, that bring requests to sessions.",
        stream=STRUCTURED,
        answer=EventAccepted | list[EventAccepted],
        status=202,
        errors=(400, 409, 413, 415, 422, 429),
    ),
)
