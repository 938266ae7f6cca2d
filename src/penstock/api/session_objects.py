"""Objects that clients read of sessions and their requests."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from penstock.api.errors import OpenAIErrorDetail
from penstock.api.objects import Page, Seconds, seconds, seconds_or_none
from penstock.model import public_id
from penstock.sessions.answers import RequestRow
from penstock.sessions.sessions import SessionRow

Status = Literal["pending", "processing", "completed", "failed", "cancelled"]
OnDeadHead = Literal["continue", "block"]


class Answer(msgspec.Struct, kw_only=True):
    status_code: int | None
    body: Any


class RequestError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class Question(msgspec.Struct, kw_only=True):
    """Endpoint and body of a request, as they were accepted."""

    endpoint: str
    body: Any


class SessionRequest(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session.request"] = "session.request"
    session: str
    sequence: int
    status: Status
    response: Answer | None
    error: RequestError | None
    attempts: int
    created_at: Seconds
    completed_at: Seconds | None
    request: Question | UnsetType | None = UNSET
    """With `include=request`; None once it is erased."""


class SessionRequestList(Page[SessionRequest]): ...


class Session(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session"] = "session"
    key: str
    status: Literal["open", "blocked"]
    queued: int
    in_flight: int
    on_dead_head: OnDeadHead
    max_queued: int | None
    wait_timeout_s: float | None
    priority: int
    created_at: Seconds


class SessionList(Page[Session]): ...


class SessionDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["session"] = "session"
    deleted: bool = True


class StillWaiting(msgspec.Struct, kw_only=True):
    """Body of a 503 whose request is stored: the request beside the error."""

    error: OpenAIErrorDetail
    id: str
    status: Status


def request_object(row: RequestRow) -> SessionRequest:
    response = error = None
    if row.response is not None or row.status_code is not None:
        body = msgspec.Raw(row.response) if row.response is not None else None
        response = Answer(status_code=row.status_code, body=body)
    if row.error_code is not None:
        error = RequestError(code=row.error_code, message=row.error_message or "")
    return SessionRequest(
        id=public_id("session_request", row.id),
        session=row.session_key,
        sequence=row.sequence,
        status=cast(Status, row.status),
        response=response,
        error=error,
        attempts=row.attempts,
        created_at=seconds(row.accepted_at),
        completed_at=seconds_or_none(row.completed_at),
    )


def asked_request_object(row: RequestRow, body: bytes | None) -> SessionRequest:
    found = request_object(row)
    found.request = None if body is None else Question(endpoint=row.endpoint, body=msgspec.Raw(body))
    return found


def session_object(row: SessionRow) -> Session:
    return Session(
        id=public_id("session", row.id),
        key=row.key,
        status="open" if row.open else "blocked",
        queued=row.queued,
        in_flight=row.in_flight,
        on_dead_head=cast(OnDeadHead, row.on_dead_head),
        max_queued=row.max_queued,
        wait_timeout_s=row.wait_timeout_s,
        priority=row.priority,
        created_at=seconds(row.created_at),
    )
