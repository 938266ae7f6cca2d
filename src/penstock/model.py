"""The words of the engine: states, items, verdicts, ids. One word per thing, here and in SQL."""

from __future__ import annotations

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

    IN_PROGRESS = "in_progress"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self in (BatchState.COMPLETED, BatchState.CANCELLED, BatchState.EXPIRED)


@dataclass(slots=True, frozen=True, eq=False)
class Lease:
    """A numbered hold of one worker on some ordinals of one lane. The id is the fencing token."""

    id: int
    lane_id: int
    batch_id: UUID
    route: str
    endpoint: str
    source_id: int
    source_lane: int
    attempt: int
    ranges: tuple[tuple[int, int], ...]
    """Half-open ordinal ranges, ascending."""
    reclaims: int = 0
    """How often these ordinals were lost with their worker."""

    @property
    def suspect(self) -> bool:
        """Lost twice: the worker takes no second suspect while it holds this one."""
        return self.reclaims > 1

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class Item:
    """One input, as a processor sees it."""

    __slots__ = ("_body", "custom_id", "lease", "line", "ordinal", "raw")

    def __init__(self, lease: Lease, ordinal: int, line: int, custom_id: str, raw: bytes) -> None:
        self.lease = lease
        self.ordinal = ordinal
        self.line = line
        self.custom_id = custom_id
        self.raw = raw

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
        return self.lease.endpoint

    @property
    def route(self) -> str:
        return self.lease.route

    @property
    def attempt(self) -> int:
        """1 on the first try."""
        return self.lease.attempt

    @property
    def idempotency_key(self) -> str:
        """The same on every attempt of this input, and of no other."""
        return f"{self.lease.batch_id.hex}-{self.line}"

    def __repr__(self) -> str:
        return f"Item(custom_id={self.custom_id!r}, line={self.line}, attempt={self.attempt})"


# Verdicts are never changed once made. They are not frozen only because freezing triples the cost of
# making one, and one is made for every item.


@dataclass(slots=True)
class Outcome:
    """The item is decided: `body` is the JSON that was answered, exactly as received."""

    state: OutcomeState
    body: bytes | None = None
    status_code: int | None = None
    request_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    duration_ms: int = 0


@dataclass(slots=True)
class Again:
    """The attempt failed and may be repeated, not before `delay_s` from now."""

    error_code: str
    error_message: str
    delay_s: float
    counts: bool
    """Whether the attempt is charged to the item. Not being admitted (429, 503) is not."""
    status_code: int | None = None
    duration_ms: int = 0
    gate_s: float = 0.0
    """How long the whole route should wait: the upstream said so (Retry-After)."""


@dataclass(slots=True)
class Halt:
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


def batch_public_id(batch_id: UUID) -> str:
    return f"batch_{batch_id.hex}"


def request_public_id(batch_id: UUID, line: int) -> str:
    return f"batch_req_{batch_id.hex}_{line}"
