"""Fenced write: the results of leased items, in one statement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from uuid import UUID

from penstock.batches.error_groups import fingerprint, stored_fingerprint
from penstock.db import sql
from penstock.db.arrays import BoolArray, ByteaArray, Float8Array, Int4Array, Int8Array, TextArray
from penstock.db.notify import lanes_payload
from penstock.db.pool import Connection, Now
from penstock.export.result_lines import openai_bytes
from penstock.model import ID_PREFIX, Again, Item, Lease, Outcome, OutcomeState, Usage

Range = tuple[int, int]

_SQL = sql.load("penstock.settle", "settle.sql")


_UNKNOWN = datetime.min.replace(tzinfo=UTC)


@dataclass(slots=True)
class Changes:
    """Rows for one settle: decided items, items to run again, ordinals given back untouched."""

    outcomes: list[tuple[Lease, int, int, str, Outcome]] = field(default_factory=list)
    """(lease, ordinal, line, custom_id, outcome)"""
    agains: list[tuple[Lease, int, Again]] = field(default_factory=list)
    backs: dict[int, tuple[Lease, list[Range]]] = field(default_factory=dict)
    """Ordinal ranges by their lease's nonce."""
    waited: set[int] = field(default_factory=set)
    """Lanes of sessions whose answers callers wait for."""
    answers: int = 0
    """Outcomes that complete a session's request."""

    def decide(self, item: Item, verdict: Outcome | Again) -> None:
        if isinstance(verdict, Outcome):
            self.outcomes.append((item.lease, item.ordinal, item.line, item.custom_id, verdict))
            if item.waited:
                self.waited.add(item.lease.lane_id)
            self.answers += item.lease.session and verdict.state is OutcomeState.COMPLETED
        else:
            self.agains.append((item.lease, item.ordinal, verdict))

    def give_back(self, lease: Lease, ranges: Iterable[Range]) -> None:
        self.backs.setdefault(lease.nonce, (lease, []))[1].extend(ranges)

    def prefer_decided(self) -> None:
        """Keep ordinals decided that are both decided and given back in these changes."""
        if not self.backs:
            return
        decided: dict[int, set[int]] = {nonce: set() for nonce in self.backs}
        settled = [(row[0], row[1]) for row in self.outcomes] + [(row[0], row[1]) for row in self.agains]
        for lease, ordinal in settled:
            if lease.nonce in decided:
                decided[lease.nonce].add(ordinal)
        left = {nonce: (lease, _without(ranges, decided[nonce])) for nonce, (lease, ranges) in self.backs.items()}
        self.backs = {nonce: (lease, ranges) for nonce, (lease, ranges) in left.items() if ranges}

    @property
    def discoverers(self) -> list[int]:
        """Places in `outcomes` of those that add rows to their job."""
        return [place for place, row in enumerate(self.outcomes) if row[4].discovered]

    @property
    def leases(self) -> set[int]:
        """Ids of all leases that these changes settle."""
        decided = {row[0].id for row in self.outcomes} | {row[0].id for row in self.agains}
        return decided | {lease.id for lease, _ in self.backs.values()}

    def ordinals(self) -> int:
        """Count the ordinals that these changes settle."""
        if not self.backs:
            return len(self.outcomes) + len(self.agains)
        back = sum(stop - start for _, ranges in self.backs.values() for start, stop in join_ranges(ranges))
        return len(self.outcomes) + len(self.agains) + back


def _without(ranges: Sequence[Range], ordinals: set[int]) -> list[Range]:
    left: list[Range] = []
    for start, stop in ranges:
        for ordinal in sorted(ordinal for ordinal in ordinals if start <= ordinal < stop):
            if start < ordinal:
                left.append((start, ordinal))
            start = ordinal + 1
        if start < stop:
            left.append((start, stop))
    return left


@dataclass(slots=True)
class Settled:
    """Figures of what one settle really wrote."""

    outcomes: int
    retries: int
    given_back: int
    fenced: int
    """Ordinals whose lease was no longer this worker's: refused, nothing changed."""
    more: bool = field(default=False, compare=False)
    """Whether a session's next request is ready to be claimed now."""
    cancelled_next: Sequence[UUID] = field(default=(), compare=False)
    """Sessions whose next request was cancelled: see `pass_over`."""
    at: datetime = field(default=_UNKNOWN, compare=False)
    """Database time of the write."""


async def settle(
    connection: Connection, worker_id: UUID, changes: Changes, *, notify: bool = True, now: Now = None
) -> Settled:
    """Write the changes of ordinals still leased to this worker; refuse the others.

    The same commit notifies callers who wait for answers, unless `notify` is off.
    """
    changes.prefer_decided()
    payload = lanes_payload(changes.waited) if notify and changes.waited else None
    if changes.answers == changes.ordinals() == 1:
        return await _settle_answer(connection, worker_id, changes, payload, now)
    parameters = {**_parameters(worker_id, changes, now), "notify": payload}
    cursor = await connection.execute(_SQL["settle_if_leased"], parameters)
    row = await cursor.fetchone()
    if row is None:
        raise AssertionError("settle_if_leased always answers one row")
    outcomes, retries, given_back, more, cancelled_next, at, _ = row
    fenced = changes.ordinals() - outcomes - retries - given_back
    return Settled(outcomes, retries, given_back, fenced, more, cancelled_next, at)


async def find_held(
    connection: Connection, worker_id: UUID, leases: Iterable[int], items: Sequence[tuple[Lease, int]]
) -> set[int]:
    """Find which of some (lease, ordinal) this worker still holds, by their places; locks the leases until the end of
    the transaction. `leases` are the ids of all that it is going to settle."""
    parameters = {
        "worker": worker_id,
        "leases": Int8Array(list(leases)),
        "nonces": Int8Array([lease.nonce for lease, _ in items]),
        "ordinals": Int4Array([ordinal for _, ordinal in items]),
    }
    cursor = await connection.execute(_SQL["find_held_if_leased"], parameters)
    return {place for (place,) in await cursor.fetchall()}


async def _settle_answer(
    connection: Connection, worker_id: UUID, changes: Changes, payload: str | None, now: Now
) -> Settled:
    ((lease, ordinal, line, custom_id, outcome),) = changes.outcomes
    parameters = {
        "lease": lease.id,
        "nonce": lease.nonce,
        "worker": worker_id,
        "ordinal": ordinal,
        "line": line,
        "status": outcome.status_code,
        "custom_id": custom_id,
        "request_id": outcome.request_id,
        "response": outcome.body,
        "notify": payload,
        "now": now,
    }
    row = await (await connection.execute(_SQL["settle_answer_if_leased"], parameters)).fetchone()
    if row is None:
        return Settled(0, 0, 0, 1)
    more, cancelled_next, at, _ = row
    return Settled(1, 0, 0, 0, more, () if cancelled_next is None else (cancelled_next,), at)


async def pass_over(connection: Connection, sessions: Sequence[UUID], *, now: Now = None) -> int:
    """Record cancelled requests that would be next in these sessions, so that the sessions go on; returns how many."""
    async with connection.transaction():
        cursor = await connection.execute(_SQL["hold_sessions_lanes"], {"sessions": list(sessions)})
        lanes = [lane_id for (lane_id,) in await cursor.fetchall()]
        parameters = {"lanes": lanes, "prefix": ID_PREFIX["session_request"], "now": now}
        row = await (await connection.execute(_SQL["settle_cancelled_if_next"], parameters)).fetchone()
    return int(row[0]) if row else 0


async def count_applied(connection: Connection, items: Sequence[Item]) -> int:
    """Count the items that were settled under the very lease they carry."""
    places = _places([(item.lease, item.ordinal) for item in items])
    recorded = await (await connection.execute(_SQL["find_recorded"], places)).fetchall()
    tried = await (await connection.execute(_SQL["find_tried"], places)).fetchall()
    return len({*recorded, *tried})


async def find_recorded(connection: Connection, items: Sequence[tuple[Lease, int]]) -> set[int]:
    """Find which of some (lease, ordinal) have an outcome under that very lease, by their places."""
    cursor = await connection.execute(_SQL["find_recorded"], _places(items))
    return {number - 1 for (number,) in await cursor.fetchall()}


def _places(items: Sequence[tuple[Lease, int]]) -> dict[str, object]:
    return {
        "nonces": Int8Array([lease.nonce for lease, _ in items]),
        "lanes": Int8Array([lease.lane_id for lease, _ in items]),
        "ordinals": Int4Array([ordinal for _, ordinal in items]),
    }


def _parameters(worker_id: UUID, changes: Changes, now: Now) -> dict[str, object]:
    parts = _parts(changes)
    finals = changes.outcomes
    decided = [row[4] for row in finals]
    agains = [row[2] for row in changes.agains]
    return {
        "worker": worker_id,
        "now": now,
        "leases": Int8Array([part.lease.id for part in parts]),
        "nonces": Int8Array([part.lease.nonce for part in parts]),
        "gone": [part.gone for part in parts],
        "completed": [part.completed for part in parts],
        "others": [part.others for part in parts],
        "f_nonce": Int8Array([row[0].nonce for row in finals]),
        "f_ordinal": Int4Array([row[1] for row in finals]),
        "f_line": Int4Array([row[2] for row in finals]),
        "f_custom_id": TextArray([row[3] for row in finals]),
        "f_state": TextArray([outcome.state for outcome in decided]),
        "f_status": Int4Array([outcome.status_code for outcome in decided]),
        "f_request_id": _texts([outcome.request_id for outcome in decided]),
        "f_error_code": _texts([outcome.error_code for outcome in decided]),
        "f_error_message": _texts([outcome.error_message for outcome in decided]),
        "f_fingerprint": _fingerprints(changes),
        "f_duration_ms": Int4Array([outcome.duration_ms for outcome in decided]),
        "f_response": ByteaArray([outcome.body for outcome in decided]),
        "f_bytes": Int4Array([openai_bytes(line, custom_id, outcome) for _, _, line, custom_id, outcome in finals]),
        **_tokens(decided),
        "a_nonce": Int8Array([row[0].nonce for row in changes.agains]),
        "a_ordinal": Int4Array([row[1] for row in changes.agains]),
        "a_status": Int4Array([again.status_code for again in agains]),
        "a_code": TextArray([again.error_code for again in agains]),
        "a_message": TextArray([again.error_message for again in agains]),
        "a_delay_s": Float8Array([again.delay_s for again in agains]),
        "a_counted": BoolArray([again.counts for again in agains]),
        "a_duration_ms": Int4Array([again.duration_ms for again in agains]),
        "b_nonce": Int8Array(list(changes.backs)),
        "b_ordinals": [as_multirange(ranges) for _, ranges in changes.backs.values()],
    }


_NO_USAGE = Usage()


def _tokens(decided: Sequence[Outcome]) -> dict[str, Int4Array]:
    usages = [outcome.usage or _NO_USAGE for outcome in decided]
    return {
        "f_input_tokens": _sums([usage.input_tokens for usage in usages]),
        "f_cached_tokens": _sums([usage.cached_tokens for usage in usages]),
        "f_output_tokens": _sums([usage.output_tokens for usage in usages]),
        "f_reasoning_tokens": _sums([usage.reasoning_tokens for usage in usages]),
    }


# An array shorter than the others reads as NULL in the statement: an array of nothing but NULL or 0 is sent empty.


def _texts(values: list[str | None]) -> TextArray:
    return TextArray(values if values.count(None) < len(values) else [])


def _sums(values: list[int]) -> Int4Array:
    return Int4Array(values if any(values) else [])


_GROUPED = (OutcomeState.FAILED, OutcomeState.NOT_FOUND)


def _fingerprints(changes: Changes) -> Int8Array:
    """Fingerprints of inputs that failed or were not found: the errors of a batch are counted by them."""
    values = [
        _fingerprint(outcome) if outcome.state in _GROUPED and not lease.session else None
        for lease, _, _, _, outcome in changes.outcomes
    ]
    return Int8Array(values if values.count(None) < len(values) else [])


def _fingerprint(outcome: Outcome) -> int:
    code = outcome.error_code or outcome.state
    return stored_fingerprint(fingerprint(code, outcome.status_code, outcome.error_message or ""))


@dataclass(slots=True)
class _Part:
    """Ordinals that leave one lease: completed, decided otherwise, not decided."""

    lease: Lease
    good: list[Range] = field(default_factory=list)
    bad: list[Range] = field(default_factory=list)
    undecided: list[Range] = field(default_factory=list)

    @property
    def gone(self) -> str:
        return as_multirange([*self.good, *self.bad, *self.undecided])

    @property
    def completed(self) -> str:
        return as_multirange(self.good)

    @property
    def others(self) -> str:
        return as_multirange(self.bad)


def _parts(changes: Changes) -> list[_Part]:
    """Changes by lease, in the order of the nonces."""
    parts: dict[int, _Part] = {}

    def part(lease: Lease) -> _Part:
        found = parts.get(lease.nonce)
        if found is None:
            found = parts[lease.nonce] = _Part(lease)
        return found

    for lease, ordinal, _, _, outcome in changes.outcomes:
        decided = part(lease)
        (decided.good if outcome.state is OutcomeState.COMPLETED else decided.bad).append((ordinal, ordinal + 1))
    for lease, ordinal, _ in changes.agains:
        part(lease).undecided.append((ordinal, ordinal + 1))
    for lease, ranges in changes.backs.values():
        part(lease).undecided.extend(ranges)
    return [parts[nonce] for nonce in sorted(parts)]


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Join ranges into as few as possible, ascending."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def as_multirange(ranges: Iterable[Range]) -> str:
    """The int4multirange literal of some ordinal ranges."""
    return "{" + ",".join(f"[{start},{stop})" for start, stop in join_ranges(ranges)) + "}"
