"""Errors as clients see them: OpenAI's shape, or Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from penstock.anthropic_errors import error_type
from penstock.quotas.quotas import Quota, QuotaExceeded

Dialect = Literal["openai", "anthropic"]

_MAX_ID_CHARS = 100


class ApiError(Exception):
    """Answer other than success. Everything in it is shown to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 -- the wire's word
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


class OpenAIErrorDetail(msgspec.Struct, rename={"kind": "type"}):
    message: str
    kind: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct):
    error: OpenAIErrorDetail


class AnthropicErrorDetail(msgspec.Struct, rename={"kind": "type"}):
    kind: str
    message: str


class AnthropicError(msgspec.Struct, rename={"kind": "type"}):
    kind: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


ERROR_TYPES: Mapping[Dialect, Any] = {"openai": OpenAIError, "anthropic": AnthropicError}


def render(error: ApiError, dialect: Dialect, request_id: str) -> bytes:
    """The body of the answer."""
    if dialect == "anthropic":
        named = AnthropicErrorDetail(error_type(error.status), error.message)
        return msgspec.json.encode(AnthropicError("error", named, request_id))
    detail = OpenAIErrorDetail(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(OpenAIError(detail))


def refusal(error: ApiError, dialect: Dialect, request_id: str) -> Response:
    return Response(render(error, dialect, request_id), error.status, error.headers, "application/json")


def not_found(kind_word: str, public_id: str, param: str | None = "id") -> ApiError:
    """404: the one answer for an object that does not exist, was deleted, or is another owner's."""
    return ApiError(404, f"No such {kind_word} object: {public_id[:_MAX_ID_CHARS]}", param=param)


def no_work(public_id: str, param: str = "id") -> ApiError:
    """404 where the id may be a batch's or a job's."""
    return ApiError(404, f"No such batch or job: {public_id[:_MAX_ID_CHARS]}", param=param)


def conflict(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """409. The official clients would repeat the call; a header tells them not to."""
    return ApiError(409, message, param=param, code=code, headers={"x-should-retry": "false"})


def busy(message: str = "The database cannot be reached at the moment.", *, repeatable: bool = True) -> ApiError:
    """503, with the time to come again. For calls that must not be repeated, a header tells the official clients so."""
    headers = {"retry-after": "1"}
    if not repeatable:
        headers["x-should-retry"] = "false"
    return ApiError(503, message, type="server_error", code="unavailable", headers=headers)


def out_of_memory() -> ApiError:
    """503: as much as one owner may hold is held. Clients that send or read slowly hold the most."""
    return ApiError(
        503,
        "As much memory as your requests may hold is held by those under way (request_memory_bytes). Try again when"
        " some of them have ended.",
        type="server_error",
        code="request_memory_used_up",
        headers={"retry-after": "1"},
    )


def too_many_connections() -> ApiError:
    """503: the owner has as many connections as it leaves room for, and this one is closed."""
    return ApiError(
        503,
        "You have as many connections as you may beside others (max_connections). Use those again, or close some.",
        type="server_error",
        code="too_many_connections",
        headers={"retry-after": "1", "connection": "close"},
    )


def over_quota(error: QuotaExceeded) -> ApiError:
    """429, with the time to come again; 413 for what can never fit. A file is not to be sent again at once: a header
    tells the official clients so."""
    message = f"{error.message} {error.hint}"
    if error.never:
        return ApiError(413, message, code="file_too_large")
    headers = {"retry-after": str(error.retry_after_s)}
    if error.limit == "stored_bytes":
        headers["x-should-retry"] = "false"
    return ApiError(429, message, type="rate_limit_error", code=f"{error.limit}_limit", headers=headers)


def check_priority(priority: int, quota: Quota) -> None:
    """Refuse a priority above the owner's highest."""
    if priority > quota.max_priority:
        raise ApiError(
            403,
            f"Priority {priority} is above {quota.max_priority}, the highest that you may ask for (max_priority)."
            " Ask for less, or ask the operator for more.",
            type="permission_error",
            param="priority",
            code="priority_too_high",
        )


def disk_full() -> ApiError:
    """507: nothing more can be stored until the operator makes room."""
    headers = {"retry-after": "10"}
    return ApiError(507, "The database's disk is full.", type="server_error", code="disk_full", headers=headers)
