"""How a result looks as a line of JSONL, as OpenAI's clients and as Anthropic's expect it, and how long the line is.

The length is counted when an outcome is settled, so that a result file's size is known without reading it: what is
counted here and what is written here must be the same to the byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from penstock.model import BatchState, Outcome, OutcomeState, request_public_id

_encode = msgspec.json.encode

# Raw line breaks inside valid JSON are white space between tokens; in JSONL they would break the line.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
# Three characters that JSON allows raw but that many clients take for line ends: how each begins, in UTF-8, what it
# is, and what to write in its place. Looking for the first byte alone is ten times faster and mostly enough.
_LINE_ENDS = (
    (0xE2, "\u2028".encode(), b"\\u2028"),
    (0xE2, "\u2029".encode(), b"\\u2029"),
    (0xC2, "\x85".encode(), b"\\u0085"),
)

_ANSWERED = b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":%b}\n'
_UNANSWERED = b'{"id":"%b","custom_id":%b,"response":null,"error":%b}\n'
_ID_BYTES = len(request_public_id(UUID(int=0), 1)) - 1
"""Without the digits of the line."""
_ANSWERED_BYTES = len(_ANSWERED % (b"", b"", 200, b"", b"", b"null")) + _ID_BYTES
_UNANSWERED_BYTES = len(_UNANSWERED % (b"", b"", b"")) + _ID_BYTES

NOT_RUN = {
    BatchState.CANCELLED: ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    BatchState.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}
"""What is said of the lines that a batch, ended so, never ran."""

_COMPLETED = OutcomeState.COMPLETED

# An honest error is far smaller; decoding takes many times the bytes.
_MAX_ERROR_BYTES = 64 * 1024
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_KNOWN_TYPES = frozenset({*_ANTHROPIC_TYPES.values(), "api_error"})


class Result(NamedTuple):
    """What a line is made of: the columns of an outcome, in the order in which they are read."""

    line: int
    state: str
    custom_id: str
    status_code: int | None
    request_id: str | None
    error_code: str | None
    error_message: str | None
    response: bytes | None


def openai_line(batch_id: UUID, result: Result) -> bytes:
    """A result as the Batch API has it: what was answered, or why nothing was."""
    line, state, custom_id, status_code, request_id, error_code, error_message, response = result
    completed = state == "completed"
    if response is None:
        if not completed:
            return openai_error_line(batch_id, line, custom_id, error_code or state, error_message or state)
        response = b"null"  # clients of an output file look into `response` unasked
    public_id = request_public_id(batch_id, line).encode()
    return _ANSWERED % (
        public_id,
        _text(custom_id),
        status_code or 200,
        _text(request_id) if request_id else b'"%b"' % public_id,
        _one_line(response),
        b"null" if completed or _told(status_code) else _error(error_code or state, error_message or state),
    )


def openai_error_line(batch_id: UUID, line: int, custom_id: str, code: str, message: str) -> bytes:
    """A request that got no answer: `response` is null and `error` says why."""
    public_id = request_public_id(batch_id, line).encode()
    return _UNANSWERED % (public_id, _text(custom_id), _error(code, message))


def openai_bytes(line: int, custom_id: str, outcome: Outcome) -> int:
    """The length of `openai_line`, without making it: one is counted for every outcome there is."""
    body, request_id, status = outcome.body, outcome.request_id, outcome.status_code
    if outcome.state is not _COMPLETED and (body is None or not _told(status)):
        return _untold_bytes(line, custom_id, outcome)
    digits = len(str(line))
    name = _encode(custom_id)
    size = _ANSWERED_BYTES + digits + (len(name) if name.isascii() else len(_one_line(name)))
    size += len(_text(request_id)) if request_id else _ID_BYTES + digits + 2
    if status and not 99 < status < 1000:
        size += len(str(status)) - 3
    if body is None:
        return size + 4
    return size + (len(body) if body.isascii() else _one_line_bytes(body))


def _untold_bytes(line: int, custom_id: str, outcome: Outcome) -> int:
    """The same where `error` says what happened."""
    state = str(outcome.state)
    error = len(_error(outcome.error_code or state, outcome.error_message or state))
    if outcome.body is None:
        return _UNANSWERED_BYTES + len(str(line)) + len(_text(custom_id)) + error
    answered = Outcome(_COMPLETED, outcome.body, outcome.status_code, outcome.request_id)
    return openai_bytes(line, custom_id, answered) - 4 + error


def _told(status_code: int | None) -> bool:
    """A status that tells the failure by itself leaves `error` null, as the Batch API has it."""
    return (status_code or 200) >= 300


def _error(code: str, message: str) -> bytes:
    return b'{"code":%b,"message":%b}' % (_text(code), _text(message))


def _text(text: str) -> bytes:
    encoded = _encode(text)
    return encoded if encoded.isascii() else _one_line(encoded)


def _one_line(value: bytes) -> bytes:
    """The same JSON without anything a reader could take for the end of the line."""
    if not value.isascii():
        for first, raw, escaped in _LINE_ENDS:
            if first in value and raw in value:
                value = value.replace(raw, escaped)
    if b"\n" in value or b"\r" in value:
        value = value.translate(_ONE_LINE)
    return value


def _one_line_bytes(value: bytes) -> int:
    size = len(value)
    if not value.isascii():
        for first, raw, escaped in _LINE_ENDS:
            if first in value:
                size += value.count(raw) * (len(escaped) - len(raw))
    return size


# -- Anthropic


def anthropic_line(result: Result) -> bytes:
    """A result of a message batch. Whatever the upstream answered, the line is one valid JSON object."""
    if result.state == "completed":
        message = b"null" if result.response is None else _one_line(result.response)
        return b'{"custom_id":%b,"result":{"type":"succeeded","message":%b}}\n' % (_text(result.custom_id), message)
    error: dict[str, Any] = {"type": "error", "error": _anthropic_error(result)}
    if result.request_id:
        error["request_id"] = result.request_id
    return b'{"custom_id":%b,"result":{"type":"errored","error":%b}}\n' % (
        _text(result.custom_id),
        _one_line(_encode(error)),
    )


def anthropic_not_run_line(custom_id: str, state: BatchState) -> bytes:
    kind = b"expired" if state is BatchState.EXPIRED else b"canceled"
    return b'{"custom_id":%b,"result":{"type":"%b"}}\n' % (_text(custom_id), kind)


def _anthropic_error(result: Result) -> Any:
    told = _told_error(result.response)
    if told is not None and told.get("type") in _KNOWN_TYPES:
        return told
    message = told.get("message") if told is not None else None
    if not isinstance(message, str) or not message:
        message = result.error_message or result.error_code or result.state
    return {"type": _anthropic_type(result), "message": message}


def _anthropic_type(result: Result) -> str:
    status = result.status_code
    if status is None:
        return "timeout_error" if result.error_code == "request_timeout" else "api_error"
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")


def _told_error(body: bytes | None) -> dict[str, Any] | None:
    """The `error` of an error body, if it has one that can be sent on as it is."""
    if body is None or len(body) > _MAX_ERROR_BYTES:
        return None
    try:
        whole = msgspec.json.decode(body)
        told = whole.get("error") if isinstance(whole, dict) else None
        if isinstance(told, dict) and (isinstance(told.get("message"), str) or told.get("type") not in _KNOWN_TYPES):
            _encode(told)
            return told
    except (ValueError, TypeError, RecursionError):
        pass
    return None
