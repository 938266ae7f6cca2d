"""Result lines: outcomes as JSONL, as OpenAI's and Anthropic's clients expect them, and the length of each line.

The length is counted when an outcome is settled (`settle/write.py`), so that a result file's size is known without
reading it, and when it is run again (`batches/run_again.py`): the counted and the written length must be the same to
the byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from penstock.anthropic_errors import ERROR_TYPES, error_type
from penstock.model import BatchState, Outcome, OutcomeState, request_public_id

_encode = msgspec.json.encode

# Raw line breaks inside valid JSON are white space between tokens; in JSONL they would break the line.
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
# Three characters that JSON allows raw but that many clients take for line ends: the first byte of each in UTF-8, the
# whole of it, and its escape. Looking for the first byte alone is ten times faster and mostly enough.
_LINE_ENDS = (
    (0xE2, "\u2028".encode(), b"\\u2028"),
    (0xE2, "\u2029".encode(), b"\\u2029"),
    (0xC2, "\x85".encode(), b"\\u0085"),
)

_ANSWERED = b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":%b}\n'
_UNANSWERED = b'{"id":"%b","custom_id":%b,"response":null,"error":%b}\n'
_ID_BYTES = len(request_public_id(UUID(int=0), 1)) - 1
"""Bytes of a request's public id without the digits of the line."""
_ANSWERED_BYTES = len(_ANSWERED % (b"", b"", 200, b"", b"", b"null")) + _ID_BYTES
_UNANSWERED_BYTES = len(_UNANSWERED % (b"", b"", b"")) + _ID_BYTES

NOT_RUN = {
    BatchState.CANCELLED: ("batch_cancelled", "This request was not executed: the batch was cancelled."),
    BatchState.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
}
"""Error code and message of the lines that a batch which ended so never ran."""

_COMPLETED = OutcomeState.COMPLETED

# An honest error is far smaller; decoding takes many times the bytes.
_MAX_ERROR_BYTES = 64 * 1024


class OutcomeRow(NamedTuple):
    """Outcome as a result line needs it: its columns, in the order in which they are read."""

    line: int
    state: str
    custom_id: str
    status_code: int | None
    request_id: str | None
    error_code: str | None
    error_message: str | None
    response: bytes | None


def openai_line(batch_id: UUID, result: OutcomeRow) -> bytes:
    """Result line as the Batch API has it: the answer, or why there is none."""
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
        b"null" if completed or _status_tells(status_code) else _error(error_code or state, error_message or state),
    )


def openai_error_line(batch_id: UUID, line: int, custom_id: str, code: str, message: str) -> bytes:
    """Result line of a request that got no answer: `response` is null and `error` says why."""
    public_id = request_public_id(batch_id, line).encode()
    return _UNANSWERED % (public_id, _text(custom_id), _error(code, message))


def openai_bytes(line: int, custom_id: str, outcome: Outcome) -> int:
    """Length of `openai_line`, without making the line: every outcome that is settled needs it."""
    body, request_id, status = outcome.body, outcome.request_id, outcome.status_code
    if outcome.state is not _COMPLETED and (body is None or not _status_tells(status)):
        return _bytes_with_error(line, custom_id, outcome)
    digits = len(str(line))
    name = _encode(custom_id)
    size = _ANSWERED_BYTES + digits + (len(name) if name.isascii() else len(_one_line(name)))
    size += len(_text(request_id)) if request_id else _ID_BYTES + digits + 2
    if status and not 99 < status < 1000:
        size += len(str(status)) - 3
    if body is None:
        return size + 4
    return size + (len(body) if body.isascii() else _one_line_bytes(body))


def _bytes_with_error(line: int, custom_id: str, outcome: Outcome) -> int:
    """Length of `openai_line` where `error` says what happened."""
    state = str(outcome.state)
    error = len(_error(outcome.error_code or state, outcome.error_message or state))
    if outcome.body is None:
        return _UNANSWERED_BYTES + len(str(line)) + len(_text(custom_id)) + error
    answered = Outcome(_COMPLETED, outcome.body, outcome.status_code, outcome.request_id)
    return openai_bytes(line, custom_id, answered) - 4 + error


def _status_tells(status_code: int | None) -> bool:
    """Whether the status tells the failure by itself, and so leaves `error` null, as the Batch API has it."""
    return (status_code or 200) >= 300


def _error(code: str, message: str) -> bytes:
    return b'{"code":%b,"message":%b}' % (_text(code), _text(message))


def _text(text: str) -> bytes:
    encoded = _encode(text)
    return encoded if encoded.isascii() else _one_line(encoded)


def _one_line(value: bytes) -> bytes:
    """The same JSON without anything a reader could take for the end of the line."""
    value = escape_line_ends(value)
    if b"\n" in value or b"\r" in value:
        value = value.translate(_ONE_LINE)
    return value


def escape_line_ends(value: bytes) -> bytes:
    """The same JSON with escapes for the characters in text that many clients take for line ends."""
    if not value.isascii():
        for first, raw, escaped in _LINE_ENDS:
            if first in value and raw in value:
                value = value.replace(raw, escaped)
    return value


def _one_line_bytes(value: bytes) -> int:
    size = len(value)
    if not value.isascii():
        for first, raw, escaped in _LINE_ENDS:
            if first in value:
                size += value.count(raw) * (len(escaped) - len(raw))
    return size


# -- Anthropic


def anthropic_line(result: OutcomeRow) -> bytes:
    """Result line of a message batch. Whatever the upstream answered, the line is one valid JSON object."""
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


def _anthropic_error(result: OutcomeRow) -> Any:
    answered = _error_in(result.response)
    if answered is not None and answered.get("type") in ERROR_TYPES:
        return answered
    message = answered.get("message") if answered is not None else None
    if not isinstance(message, str) or not message:
        message = result.error_message or result.error_code or result.state
    return {"type": _anthropic_type(result), "message": message}


def _anthropic_type(result: OutcomeRow) -> str:
    status = result.status_code
    if status is None:
        return "timeout_error" if result.error_code == "request_timeout" else "api_error"
    # An upstream's 503 may mean anything; only Penstock's own means that it is overloaded.
    return "api_error" if status == 503 else error_type(status)


def _error_in(body: bytes | None) -> dict[str, Any] | None:
    """The `error` of an upstream's error body, if it has one that can be sent on as it is."""
    if body is None or len(body) > _MAX_ERROR_BYTES:
        return None
    try:
        whole = msgspec.json.decode(body)
        error = whole.get("error") if isinstance(whole, dict) else None
        if isinstance(error, dict) and (isinstance(error.get("message"), str) or error.get("type") not in ERROR_TYPES):
            _encode(error)
            return error
    except (ValueError, TypeError, RecursionError):
        pass
    return None
