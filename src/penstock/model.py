"""The words of the engine: states, items, verdicts, ids. One word per thing, here and in SQL."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec


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


class Item:
    """One input, as a processor sees it."""

    __slots__ = ("_body", "custom_id", "lease", "line", "ordinal", "raw", "request")

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

    @property
    def body(self) -> Any:
        """The input's body, decoded on first use. `raw` holds its exact bytes."""
        try:
            return self._body
        except AttributeError:
            self._body: Any = msgspec.json.decode(self.raw)
            return self._body

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
        """Number of the attempt: 1 on the first try, and on the first of each time the item is run again."""
        return self.lease.attempt

    @property
    def spent(self) -> int:
        """Attempts that the item took before it was run again."""
        return self.lease.spent

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
}
_HEX = re.compile(r"[0-9a-f]{32}")


def new_id() -> UUID:
    """A random id that sorts by the time it was made (UUID version 7, to a quarter of a microsecond)."""
    milliseconds, rest_ns = divmod(time.time_ns(), 1_000_000)
    fraction = (rest_ns << 12) // 1_000_000
    return UUID(int=milliseconds << 80 | 7 << 76 | fraction << 64 | 2 << 62 | secrets.randbits(62))


def public_id(kind: str, uuid: UUID) -> str:
    return ID_PREFIX[kind] + uuid.hex


def parse_id(kind: str, text: str) -> UUID | None:
    """Parse an id that `public_id` wrote; None for anything else."""
    prefix = ID_PREFIX[kind]
    digits = text.removeprefix(prefix)
    return UUID(hex=digits) if text.startswith(prefix) and _HEX.fullmatch(digits) else None


def batch_public_id(batch_id: UUID) -> str:
    return public_id("batch", batch_id)


def request_public_id(batch_id: UUID, line: int) -> str:
    return f"batch_req_{batch_id.hex}_{line}"
