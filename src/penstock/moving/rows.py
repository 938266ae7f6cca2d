"""Rows on their way in: the order of a file's lines, what an old request becomes, and outcomes packed for COPY."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct

import msgspec

from penstock.dispatch.http.answer import json_with_usage
from penstock.export.result_lines import openai_bytes
from penstock.model import Outcome, OutcomeState, Usage
from penstock.moving.source import RequestState, SourceRequest

SEPARATOR = "\x1f"
"""Between path, model and method, as the source sends them."""

CANCELLED = ("cancelled", "This request was cancelled before it was sent.")
NO_REQUEST = ("not_imported", "The database this batch was imported from had no request for this line.")
NO_INPUT = ("not_imported", "The input of this request was deleted before the batch was imported.")
"""Error code and message of requests that were never run, and never will be."""

_FIELDS = 12
_NULL = Struct("!i").pack(-1)
_LENGTH = Struct("!i")
_STATUS = Struct("!ii")
_NUMBERS = Struct("!iiiqiq")

IMPORTED = 0
"""Lease of an outcome that no worker of Penstock's has settled. Leases count from 1."""


class LineOrder:
    """Numbers the lines of a file as Penstock has them: from 1 on, each greater than the one before.

    They are the source's own numbers, but for files that count from 0, and lines that share a number.
    """

    def __init__(self) -> None:
        self._shift: int | None = None
        self._last = 0

    def next(self, number: int) -> int:
        if self._shift is None:
            self._shift = max(0, 1 - number)
        self._last = max(number + self._shift, self._last + 1)
        return self._last


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What an old request becomes: the columns of an outcome that come from its row."""

    state: OutcomeState
    custom_id: bytes
    status: int | None
    attempts: int
    finished_at: int
    error_code: str | None
    error_message: str | None
    response: bytes | None
    usage: Usage | None


def custom_id_of(given: bytes | None, line: int) -> bytes:
    """The custom id; of a line without one, its number: Penstock's lines all have one."""
    return given if given is not None else b"line-%d" % line


def answer_of(request: SourceRequest, line: int, not_run: tuple[str, str] | None) -> Answer | None:
    """What a request's outcome is; None if it has none. `not_run` says why one that will not be run is skipped; without
    it such a request is derived: pending, or cancelled with its batch."""
    custom_id = custom_id_of(request.custom_id, line)
    state = request.state
    if state in (RequestState.COMPLETED, RequestState.FAILED):
        response, usage = _response_of(request.response)
        return Answer(
            OutcomeState.COMPLETED if state == RequestState.COMPLETED else OutcomeState.FAILED,
            custom_id,
            request.status if request.status >= 0 else None,
            request.retries + 1,
            request.finished_at,
            None,
            None if request.error is None else request.error.decode(),
            response,
            usage,
        )
    if not_run is None:
        return None
    code, message = not_run
    retries, at = request.retries, request.finished_at
    return Answer(OutcomeState.SKIPPED, custom_id, None, retries, at, code, message, None, None)


def _response_of(text: bytes | None) -> tuple[bytes | None, Usage | None]:
    """The answer as Penstock stores it: JSON as it is, anything else as a JSON string."""
    if text is None:
        return None, None
    valid, usage = json_with_usage(text)
    return (text, usage) if valid else (msgspec.json.encode(text.decode()), None)


def line_bytes(line: int, answer: Answer) -> int:
    """Bytes of the answer's line in a result file."""
    outcome = Outcome(
        answer.state,
        answer.response,
        answer.status,
        error_code=answer.error_code,
        error_message=answer.error_message,
    )
    return openai_bytes(line, answer.custom_id.decode(), outcome)


@lru_cache(maxsize=1_000)
def _start(state: str, id_bytes: int) -> Callable[..., bytes]:
    """Packs the beginning of a row: lane, ordinal, line, state, custom id."""
    return Struct(f"!hiqiiiii{len(state)}si{id_bytes}s").pack


def pack_outcome(pieces: list[bytes], lane_id: int, ordinal: int, line: int, answer: Answer) -> None:
    """Add a row of `copy_outcomes`."""
    custom_id, status, response = answer.custom_id, answer.status, answer.response
    code, message = answer.error_code, answer.error_message
    pack = _start(answer.state, len(custom_id))
    label = answer.state.encode()
    pieces += (
        pack(_FIELDS, 8, lane_id, 4, ordinal, 4, line, len(label), label, len(custom_id), custom_id),
        _NULL if status is None else _STATUS.pack(4, status),
        _NUMBERS.pack(4, answer.attempts, 8, IMPORTED, 8, answer.finished_at),
        _NULL if code is None else _text(code.encode()),
        _NULL if message is None else _text(message.encode()),
    )
    if response is None:
        pieces.append(_NULL)
    else:
        pieces += (_LENGTH.pack(len(response)), response)


_ATTEMPT = Struct("!hiqiiiiiqi16siqiii?")
_ATTEMPT_FIELDS = 11
NOBODY = bytes(16)
"""Worker of attempts that the old system made."""


def pack_attempt(pieces: list[bytes], lane_id: int, ordinal: int, answer: Answer, duration_ms: int) -> None:
    """Add a row of `copy_attempts`: how an input failed for good."""
    status = answer.status
    pieces += (
        _ATTEMPT.pack(
            *(_ATTEMPT_FIELDS, 8, lane_id, 4, ordinal, 4, answer.attempts, 8, IMPORTED, 16, NOBODY),
            *(8, answer.finished_at, 4, duration_ms, 1, True),
        ),
        _NULL if status is None else _STATUS.pack(4, status),
        _text((answer.error_code or answer.state).encode()),
        _text((answer.error_message or "").encode()),
    )


def _text(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value
