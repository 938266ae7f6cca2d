"""Submission of a request to a session, over whichever route: checked, stored, and known by its id."""

from __future__ import annotations

import hashlib
from time import monotonic
from typing import Any
from uuid import UUID

import msgspec
import psycopg

from penstock.api.batches import ENDPOINTS_OF_BATCHES
from penstock.api.endpoint import Call
from penstock.api.errors import ApiError, busy, conflict
from penstock.api.multipart import idempotency_key, invalid, missing
from penstock.deliver.sink_config import any_wants
from penstock.dispatch.providers import Provider
from penstock.model import new_id, public_id
from penstock.sessions.accept import Existing, NewRequest, Refused, Stored
from penstock.sessions.answers import RequestRow

ENDPOINTS_OF_SESSIONS = (*ENDPOINTS_OF_BATCHES, "/v1/messages")
_MAX_KEY_CHARS = 256
_MAX_MODEL_CHARS = 256
_ANSWERED = ("completed", "failed", "cancelled")


class _ModelFields(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None


_model_fields = msgspec.json.Decoder(_ModelFields)


class BodyTarget(msgspec.Struct, frozen=True):
    """Target of a body: the model it names, that model's provider, and whether the answer is streamed."""

    model: str
    stream: bool
    provider: Provider


class Submission(msgspec.Struct, frozen=True):
    """Submission: a stored request, as its caller waits for it."""

    key: str
    asked: BodyTarget
    request_id: UUID
    lane_id: int | None
    stream: bool
    wait_timeout_s: float
    row: RequestRow | None
    """The request as it was found, if it had been sent before under the same Idempotency-Key."""
    since: float
    """Time of submission, on the monotonic clock."""
    stored: Stored | None = None
    """The stored request, if this call stored it."""

    @property
    def public_id(self) -> str:
        return public_id("session_request", self.request_id)

    @property
    def answered(self) -> bool:
        return self.row is not None and self.row.status in _ANSWERED

    def limit_wait_s(self, wait_s: float | None) -> float:
        """Seconds the caller waits: what it asked for, at most the session's `wait_timeout_s`."""
        return self.wait_timeout_s if wait_s is None else min(wait_s, self.wait_timeout_s)


def check_key(key: str, name: str) -> str:
    """Check that a session's key can be stored, shown, and written in a path."""
    if not 1 <= len(key) <= _MAX_KEY_CHARS or not key.isprintable() or "/" in key or key in (".", ".."):
        raise invalid(name, f"a session's key has 1 to {_MAX_KEY_CHARS} printable characters and no slash.")
    return key


def read_target(call: Call[Any, Any], content: bytes, inside: str = "") -> BodyTarget:
    """Read the model that a body names, and find its provider."""
    try:
        asked = _model_fields.decode(content)
    except msgspec.ValidationError as error:
        words, _, place = str(error).partition(" - at `$")
        name = (inside + place.strip("`.")).rstrip(".") or "body"
        raise ApiError(400, f"Invalid '{name}': {words}.", param=name, code="invalid_type") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(400, "The request's body is not valid JSON.", code="invalid_json") from None
    if not asked.model:
        raise missing(f"{inside}model")
    provider = call.server.providers.provider_of(asked.model)
    if provider is None or len(asked.model) > _MAX_MODEL_CHARS or not asked.model.isprintable():
        raise ApiError(
            400,
            f"The model '{asked.model[:100]}' is served by none of the providers.",
            param=f"{inside}model",
            code="model_not_found",
        )
    return BodyTarget(asked.model, bool(asked.stream), provider)


async def submit(
    call: Call[Any, Any], key: str, endpoint: str, content: bytes, *, waited: bool, inside: str = ""
) -> Submission:
    """Store a request at the end of its session. Raises ApiError if the session refuses it."""
    server, limits = call.server, call.server.config.sessions
    if len(content) > limits.session_max_body_bytes:
        raise ApiError(
            413, f"The body is larger than {limits.session_max_body_bytes:,} bytes.", code="request_too_large"
        )
    asked = read_target(call, content, inside)
    repeat_key = idempotency_key(call.request.headers)
    # Only a request with a key may come again and has to be recognised.
    fingerprint = hashlib.sha256(endpoint.encode() + b"\0" + content).digest() if repeat_key is not None else None
    request = NewRequest(
        id=new_id(),
        owner=call.caller.owner,
        session_key=key,
        pool=asked.provider.session_pool,
        route=asked.model,
        endpoint=endpoint,
        body=content,
        stream=asked.stream,
        waited=waited,
        announce=any_wants(server.config.sinks, call.caller.owner, from_event=False),
        idempotency_key=repeat_key,
        fingerprint=fingerprint,
    )
    since = monotonic()
    try:
        taken = await server.acceptor.accept(request)
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        if error.sqlstate is not None or repeat_key is not None:
            raise
        # Without a key the same call would be another request.
        raise busy(
            "The database went away: it is not known whether the request was stored. Look among the session's"
            " requests before you repeat it; with an Idempotency-Key it can simply be repeated.",
            repeatable=False,
        ) from error
    if isinstance(taken, Refused):
        raise _refused(taken, key)
    limit_wait_s = limits.session_wait_timeout_s if taken.wait_timeout_s is None else taken.wait_timeout_s
    if isinstance(taken, Existing):
        row = taken.request
        if row.fingerprint is not None and bytes(row.fingerprint) != fingerprint:
            raise conflict(
                "This Idempotency-Key was used for another request of this session.",
                param="Idempotency-Key",
                code="idempotency_conflict",
            )
        return Submission(key, asked, row.id, taken.lane_id, row.stream, limit_wait_s, row, since)
    stored = Stored(msgspec.structs.replace(request, body=b""), taken)
    return Submission(key, asked, request.id, taken.lane_id, asked.stream, limit_wait_s, None, since, stored)


def _refused(refused: Refused, key: str) -> ApiError:
    if refused.code == "queue_full":
        return ApiError(
            429,
            f"The queue of the session '{key}' is full.",
            type="rate_limit_error",
            code="session_queue_full",
            headers={"retry-after": "1"},
        )
    return conflict(f"The session '{key}' does not take requests: {refused.code}.", code=refused.code)
