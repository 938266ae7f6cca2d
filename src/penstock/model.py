"""The words of the engine: states, items, verdicts, ids. One word per thing, here and in SQL."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID

import msgspec

ROWS = "rows"
"""Endpoint of a lane whose inputs are the rows of a job."""

MAX_DISCOVERED_ROWS = 1_000
"""Rows that one item may add to its job."""
MAX_ROW_KEY_CHARS = 512

_S = TypeVar("_S")

_log = logging.getLogger("penstock.processor")
_encoder = msgspec.json.Encoder()


class OutcomeState(StrEnum):
    """The terminal states of one (lane, ordinal). The schema admits no others."""

    COMPLETED = "completed"
    FAILED = "failed"
    NOT_FOUND = "not_found"
    SKIPPED = "skipped"


class BatchState(StrEnum):
    """A batch's state; a generated column derives it from the batch's timestamps."""

    VALIDATING = "validating"
    FAILED = "failed"
    """The batch cannot run at all: nothing of it was started. Failed requests do not make a failed batch."""
    IN_PROGRESS = "in_progress"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self in (BatchState.COMPLETED, BatchState.FAILED, BatchState.CANCELLED, BatchState.EXPIRED)


class Lease(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A numbered hold of one worker on some ordinals of one lane. The nonce is the fencing token: it is random, so that
    no restore can give it out again, as it can the id."""

    id: int
    nonce: int
    lane_id: int
    batch_id: UUID
    """The batch, or the session (see `session`): the schema has one column for both."""
    route: str
    endpoint: str
    source_id: int
    source_lane: int
    attempt: int
    ranges: tuple[tuple[int, int], ...]
    """Half-open ordinal ranges, ascending."""
    reclaims: int = 0
    """How often these ordinals were lost with their worker."""
    session: bool = False
    """Its one ordinal is a session's request."""
    generation: int = 0
    """How often these ordinals were run to their end before they were asked to run again."""
    spent: int = 0
    """Attempts that the earlier generations took."""

    @property
    def suspect(self) -> bool:
        """Lost twice: the worker takes no second suspect while it holds this one."""
        return self.reclaims > 1

    @property
    def begins_lane(self) -> bool:
        """Whether a batch's first input is called for the first time."""
        again = self.session or self.generation or self.reclaims or self.attempt > 1
        return not again and self.ranges[0][0] == 0


def session_source(lane_id: int) -> int:
    """The source id under which a session's inputs are stored. Sources of files are positive, so none is shared."""
    return -lane_id


class ClaimPermit(msgspec.Struct, frozen=True, gc=False):
    """Permit to claim for a worker in the statement that stores sessions' requests."""

    worker_id: UUID
    room: int
    """Requests that the worker can call at once."""
    closed: frozenset[str] = frozenset()
    """Routes of which nothing may be claimed now."""


class SessionRequest(msgspec.Struct, frozen=True, gc=False):
    """A session's request, besides its body."""

    id: UUID
    endpoint: str
    stream: bool
    """The caller wants the answer in pieces."""
    waited: bool
    """A caller waits for the answer: it is recorded at once, and notified."""
    cancelled: bool
    """The request is not to be sent."""


class NewRow(msgspec.Struct, frozen=True, gc=False):
    """Row that a processor adds to its own job. A job takes each key once."""

    key: str
    row: bytes
    """The row as a JSON object."""


class CallCancelled(BaseException):
    """Raised by `item.cancel.raise_if_requested()`. No Exception, so that `except Exception` lets it pass."""


class CancelToken:
    """Whether the call was given up: its time ran out, or its worker stops. Its result is dropped then. Nothing can
    stop a function that runs on a thread, so it should look here now and then."""

    __slots__ = ("_item",)

    def __init__(self, item: Item) -> None:
        self._item = item

    @property
    def requested(self) -> bool:
        return getattr(self._item, "_cancelled", False)

    def request(self) -> None:
        """Give the call up. For the dispatcher that runs it."""
        self._item._cancelled = True

    def raise_if_requested(self) -> None:
        if self.requested:
            raise CallCancelled


class _ItemLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{(self.extra or {})['prefix']}: {msg}", kwargs


def _check_new_row(key: object, row: object) -> None:
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_ROW_KEY_CHARS:
        raise ValueError(f"add(key=...) takes a text of 1 to {MAX_ROW_KEY_CHARS} characters, not {key!r:.100}")
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise TypeError(f"add(row=...) takes a mapping of column names to values, not {row!r:.100}")


MAX_STRATEGIES = 20
"""Strategies of one processor."""


def strategy_of(strategies: Sequence[_S], attempt: int) -> _S | None:
    """The strategy of an attempt: each in turn, from the first again after the last. None if there are none."""
    return strategies[(attempt - 1) % len(strategies)] if strategies else None


class RowJob(msgspec.Struct, frozen=True):
    """Job of a row, as far as those who work it off need it."""

    definition: Any
    """What is asked of an upstream for each row (`dispatch.rows.definition`); None for Python functions."""
    max_attempts: int | None = None
    """Attempts of a row before it fails for good; None for as many as the worker allows."""
    images: bool = False
    """Whether its rows stand for images."""


class Item:
    """One input, as a processor sees it."""

    __slots__ = (
        *("_added", "_body", "_cancelled", "custom_id", "image", "job", "lease", "line", "ordinal", "raw", "request"),
        "strategy",
    )
    _added: list[NewRow]
    _cancelled: bool

    def __init__(
        self,
        lease: Lease,
        ordinal: int,
        line: int,
        custom_id: str,
        raw: bytes,
        request: SessionRequest | None = None,
    ) -> None:
        self.lease = lease
        self.ordinal = ordinal
        self.line = line
        self.custom_id = custom_id
        self.raw = raw
        self.request = request
        """The session's request; None for a line of a batch."""
        self.job: RowJob | None = None
        """The row's job; None for an input that is no row, and where a run tells the processor itself."""
        self.strategy: str | None = None
        """Name of the attempt's strategy, if the processor has strategies."""
        self.image: bytes | None = None
        """Bytes of the image, if that is what the row stands for."""

    @property
    def body(self) -> Any:
        """The input's body, decoded on first use; of a row, its columns. `raw` holds its exact bytes."""
        try:
            return self._body
        except AttributeError:
            decoded = msgspec.json.decode(self.raw)
            self._body: Any = decoded["row"] if self.is_row else decoded
            return self._body

    @property
    def size(self) -> int:
        """Bytes that the item holds in memory: its body, and its image."""
        return len(self.raw) + (0 if self.image is None else len(self.image))

    @property
    def is_row(self) -> bool:
        """Whether the input is a row of a job."""
        return self.lease.endpoint == ROWS

    @property
    def source_row(self) -> Any:
        """The row as it came: the cells of a table, the object of a JSON line. None for an input that is no row."""
        return msgspec.json.decode(self.raw)["raw"] if self.is_row else None

    @property
    def cancel(self) -> CancelToken:
        """Tells whether the call was given up."""
        return CancelToken(self)

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """Logger whose messages begin with the batch and the line."""
        kind = "session" if self.lease.session else "batch"
        return _ItemLog(_log, {"prefix": f"{public_id(kind, self.lease.batch_id)} line {self.line}"})

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Add a row to the item's own job, if that has none of this key. It is taken over when the item is done."""
        if not self.is_row:
            raise TypeError("add() is for the rows of a job")
        _check_new_row(key, row)
        added = self.added
        if len(added) >= MAX_DISCOVERED_ROWS:
            raise ValueError(f"an item can add {MAX_DISCOVERED_ROWS:,} rows")
        # Encoded now: a value that is not JSON is an error of this line, and the caller may go on to change the row.
        added.append(NewRow(key, _encoder.encode(dict(row))))

    @property
    def added(self) -> list[NewRow]:
        """Rows that were added so far."""
        try:
            return self._added
        except AttributeError:
            self._added = []
            return self._added

    @property
    def url(self) -> str:
        """The endpoint the input asked for, such as `/v1/chat/completions`."""
        return self.lease.endpoint if self.request is None else self.request.endpoint

    @property
    def session_request_id(self) -> UUID | None:
        return None if self.request is None else self.request.id

    @property
    def stream(self) -> bool:
        """Whether the caller wants the answer in pieces, as they come."""
        return self.request is not None and self.request.stream

    @property
    def cancelled(self) -> bool:
        """Whether the request is not to be sent."""
        return self.request is not None and self.request.cancelled

    @property
    def waited(self) -> bool:
        """Whether a caller waits for the answer."""
        return self.request is not None and self.request.waited

    @property
    def route(self) -> str:
        return self.lease.route

    @property
    def attempt(self) -> int:
        """Number of the attempt: 1 on the first try. An item that is run again begins at 1 if it has all its attempts
        again, else goes on counting."""
        return self.lease.attempt

    @property
    def spent(self) -> int:
        """Attempts that the item took before it was run again."""
        return self.lease.spent

    @property
    def max_attempts(self) -> int | None:
        """Attempts that its job allows it; None for as many as the worker does."""
        return None if self.job is None else self.job.max_attempts

    @property
    def idempotency_key(self) -> str:
        """Key that is the same on every attempt of this input, and of no other. A rerun has another key, so that an
        upstream does not repeat its old answer."""
        lease = self.lease
        again = f"-{lease.generation}" if lease.generation else ""
        return f"{lease.batch_id.hex}-{self.line}{again}"

    def __repr__(self) -> str:
        return f"Item(custom_id={self.custom_id!r}, line={self.line}, attempt={self.attempt})"


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens that an answer, or a whole batch, took, as the upstream reported them."""

    input_tokens: int = 0
    cached_tokens: int = 0
    """Of the input tokens."""
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Of the output tokens."""


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The item is decided: `body` is the JSON that was answered, exactly as received."""

    state: OutcomeState
    body: bytes | None = None
    status_code: int | None = None
    request_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    duration_ms: int = 0
    usage: Usage | None = None
    discovered: tuple[NewRow, ...] = ()
    """Rows that the item adds to its job."""


class Again(msgspec.Struct, frozen=True, gc=False):
    """The attempt failed and may be repeated, not before `delay_s` from now."""

    error_code: str
    error_message: str
    delay_s: float
    counts: bool
    """Whether the attempt is charged to the item. Not being admitted (429, 503) is not."""
    status_code: int | None = None
    duration_ms: int = 0
    gate_s: float = 0.0
    """Seconds that the whole route should wait: the upstream asked for it (Retry-After), or refused the call."""


class Halt(msgspec.Struct, frozen=True, gc=False):
    """The route cannot go on until a person acts (401, 402, quota exhausted). No attempt is charged."""

    error_code: str
    error_message: str
    status_code: int | None = None
    duration_ms: int = 0


Verdict = Outcome | Again | Halt


@dataclass(slots=True)
class Counts:
    """A batch's figures at one instant: they always add up to `total`."""

    total: int
    pending: int = 0
    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    not_found: int = 0
    skipped: int = 0
    cancelled: int = 0
    expired: int = 0
    retried: int = 0
    """Attempts that failed and were repeated; not part of the sum."""

    @property
    def settled(self) -> int:
        return self.completed + self.failed + self.not_found + self.skipped


# Public ids: a prefix for the kind, and 32 hexadecimal digits.
ID_PREFIX = {
    "file": "file-",
    "batch": "batch_",
    "msgbatch": "msgbatch_",
    "upload": "upload_",
    "part": "part_",
    "webhook": "whe_",
    "key": "key_",
    "erasure": "erase_",
    "event": "evt_",
    "session": "session_",
    "session_request": "sreq_",
    "ingested": "ingested_",
    "job": "job_",
    "operation": "op_",
}
_HEX, _DASHED = re.compile(r"[0-9a-f]{32}"), re.compile(r"(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def new_id() -> UUID:
    """A random id that sorts by the time it was made (UUID version 7, to a quarter of a microsecond)."""
    milliseconds, rest_ns = divmod(time.time_ns(), 1_000_000)
    fraction = (rest_ns << 12) // 1_000_000
    return UUID(int=milliseconds << 80 | 7 << 76 | fraction << 64 | 2 << 62 | secrets.randbits(62))


def public_id(kind: str, uuid: UUID) -> str:
    return ID_PREFIX[kind] + uuid.hex


def parse_id(kind: str, text: str) -> UUID | None:
    """Parse an id that `public_id` wrote, or a UUID with dashes, as of imported objects; None for anything else."""
    prefix = ID_PREFIX[kind]
    digits = text.removeprefix(prefix)
    written = text.startswith(prefix) and _HEX.fullmatch(digits)
    return UUID(hex=digits) if written or _DASHED.fullmatch(digits) else None


def batch_public_id(batch_id: UUID) -> str:
    return public_id("batch", batch_id)


def request_public_id(batch_id: UUID, line: int) -> str:
    return f"batch_req_{batch_id.hex}_{line}"
