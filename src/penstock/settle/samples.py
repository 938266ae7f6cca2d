"""Samples of batches, for charts: counted in memory as results are settled, and written once a second.

They are written apart from the results, so that no settle waits for them, and are no accounts: a killed process loses
those it has not written, and a refused result is counted with those beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Self
from uuid import UUID

from penstock.config import SampleLimits
from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.coalesce import CoalesceLimits, Coalescer
from penstock.db.pool import Connection, Pool
from penstock.latency import LATENCY_BUCKETS, latency_bucket
from penstock.model import Again, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes
from penstock.tasks import cancel_and_wait

_log = logging.getLogger("penstock.samples")
_SQL = sql.load("penstock.settle", "samples.sql")

_REFUSALS = frozenset({429, 503, 529})
_ROWS_AT_ONCE = 1_000
_ROW_BYTES = 400
_RETRY_S = 30.0
# A process that ends waits so long for its last samples to be written.
_LAST_WRITE_S = 2.0


@dataclass(slots=True)
class Sample:
    """Figures of one batch in one second, as far as this process worked on it."""

    batch_id: UUID
    second: int
    """Beginning of the second, in unix time of the database's clock."""
    completed: int = 0
    failed: int = 0
    not_found: int = 0
    skipped: int = 0
    retried: int = 0
    refused: int = 0
    """Of those retried: the upstream did not admit the call."""
    input_tokens: int = 0
    output_tokens: int = 0
    latency: list[int] = field(default_factory=lambda: [0] * LATENCY_BUCKETS)
    limit_now: int | None = None
    in_flight: int | None = None

    def count_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        states = [outcome.state for outcome in outcomes]
        completed = states.count(OutcomeState.COMPLETED)
        self.completed += completed
        if completed < len(states):
            self.failed += states.count(OutcomeState.FAILED)
            self.not_found += states.count(OutcomeState.NOT_FOUND)
            self.skipped += states.count(OutcomeState.SKIPPED)
        self._count_calls([outcome.duration_ms for outcome in outcomes])
        usages = [outcome.usage for outcome in outcomes if outcome.usage is not None]
        self.input_tokens += sum([usage.input_tokens for usage in usages])
        self.output_tokens += sum([usage.output_tokens for usage in usages])

    def count_agains(self, agains: Sequence[Again]) -> None:
        admitted = [again for again in agains if again.status_code not in _REFUSALS]
        self.retried += len(agains)
        self.refused += len(agains) - len(admitted)
        self._count_calls([again.duration_ms for again in admitted])

    def _count_calls(self, durations_ms: Iterable[int]) -> None:
        for duration_ms, calls in Counter(durations_ms).items():
            self.latency[latency_bucket(duration_ms)] += calls

    def add(self, other: Sample) -> None:
        """Add another sample of the same batch and second. Of limits and calls in flight, the latest counts."""
        for name in _COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.latency = [mine + theirs for mine, theirs in zip(self.latency, other.latency, strict=True)]
        self.limit_now = self.limit_now if other.limit_now is None else other.limit_now
        self.in_flight = self.in_flight if other.in_flight is None else other.in_flight


_COUNTED = ("completed", "failed", "not_found", "skipped", "retried", "refused", "input_tokens", "output_tokens")


class SampleWrite:
    """Appends samples: the `WriteKind` of a process's charts. Samples that cannot be written are dropped."""

    def key(self, entry: Sample) -> Hashable:
        return (entry.batch_id, entry.second)

    def merge(self, earlier: Sample, later: Sample) -> Sample:
        earlier.add(later)
        return earlier

    def weight(self, entry: Sample) -> int:  # noqa: ARG002 -- all are of one size
        return _ROW_BYTES

    async def execute(self, connection: Connection, entries: Sequence[Sample], *, repeated: bool) -> None:  # noqa: ARG002 -- a second counted twice is no harm
        parameters = {
            "batches": [entry.batch_id for entry in entries],
            "seconds": Int8Array([entry.second for entry in entries]),
            "completed": Int4Array([entry.completed for entry in entries]),
            "failed": Int4Array([entry.failed for entry in entries]),
            "not_found": Int4Array([entry.not_found for entry in entries]),
            "skipped": Int4Array([entry.skipped for entry in entries]),
            "retried": Int4Array([entry.retried for entry in entries]),
            "refused": Int4Array([entry.refused for entry in entries]),
            "input_tokens": Int8Array([entry.input_tokens for entry in entries]),
            "output_tokens": Int8Array([entry.output_tokens for entry in entries]),
            "limit_now": Int4Array([entry.limit_now for entry in entries]),
            "in_flight": Int4Array([entry.in_flight for entry in entries]),
            "latency": Int8Array([calls for entry in entries for calls in entry.latency]),
            "buckets": LATENCY_BUCKETS,
        }
        await connection.execute(_SQL["append_samples_if_there"], parameters)

    def replace_rejected(self, entry: Sample, error: Exception) -> None:  # noqa: ARG002 -- the coalescer logs it
        return None

    async def give_up(self, entries: Sequence[Sample], error: Exception) -> None:
        _log.warning("dropped %d samples: %s", len(entries), error)


class Samples:
    """Samples of all batches that the workers of this process work on, written for as long as the context lasts."""

    def __init__(self, database: Pool, limits: SampleLimits) -> None:
        self._limits = limits
        self._open: dict[tuple[UUID, int], Sample] = {}
        self._clock_ahead_s: float | None = None
        """Seconds that the database's clock is ahead of the monotonic clock here; None before the first settle."""
        capacity = limits.sample_capacity_rows
        # Twice the capacity: nobody is to be held back for samples.
        bounds = CoalesceLimits(_ROWS_AT_ONCE, 2**30, 0, 2 * capacity, 2 * capacity * _ROW_BYTES, _RETRY_S)
        self._coalescer = Coalescer(SampleWrite(), database, bounds, name="samples")
        self._tasks: list[asyncio.Task[None]] = []
        self._gauges: list[Callable[[], Mapping[UUID, tuple[int, int]]]] = []

    def watch(self, gauge: Callable[[], Mapping[UUID, tuple[int, int]]]) -> None:
        """Ask this gauge each second: how many calls each batch may have in flight, and how many it has."""
        self._gauges.append(gauge)

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._coalescer.run(), name="samples"),
            asyncio.create_task(self._write_in_turn(), name="sample seconds"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write(self._open)
        self._coalescer.close()
        await asyncio.wait(self._tasks[:1], timeout=_LAST_WRITE_S)
        await cancel_and_wait(self._tasks)

    def count_settled(self, changes: Changes, at: datetime) -> None:
        """Count what one settle has written, `at` the database's time. Sessions have no samples."""
        unix_s = at.timestamp()
        self._clock_ahead_s = unix_s - monotonic()
        decided: defaultdict[Lease, list[Outcome]] = defaultdict(list)
        for lease, _, _, _, outcome in changes.outcomes:
            decided[lease].append(outcome)
        for lease, outcomes in decided.items():
            if not lease.session:
                self._at(lease.batch_id, int(unix_s)).count_outcomes(outcomes)
        put_off: defaultdict[Lease, list[Again]] = defaultdict(list)
        for lease, _, again in changes.agains:
            put_off[lease].append(again)
        for lease, agains in put_off.items():
            if not lease.session:
                self._at(lease.batch_id, int(unix_s)).count_agains(agains)

    def note_limit(self, batch_id: UUID, limit_now: int | None, in_flight: int | None) -> None:
        """Note how many calls of a batch this process may have in flight now, and how many it has. Both are summed over
        the processes. Before the first settle the database's time is not known here: then nothing is noted."""
        if self._clock_ahead_s is not None:
            sample = self._at(batch_id, int(monotonic() + self._clock_ahead_s))
            sample.limit_now, sample.in_flight = limit_now, in_flight

    def _at(self, batch_id: UUID, second: int) -> Sample:
        sample = self._open.get((batch_id, second))
        if sample is None:
            sample = self._open[(batch_id, second)] = Sample(batch_id, second)
        return sample

    def _note_limits(self) -> None:
        limits: Counter[UUID] = Counter()
        in_flight: Counter[UUID] = Counter()
        for gauge in self._gauges:
            for batch_id, (may, are) in gauge().items():
                limits[batch_id] += may
                in_flight[batch_id] += are
        for batch_id, may in limits.items():
            self.note_limit(batch_id, may, in_flight[batch_id])

    async def _write_in_turn(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sample_interval_s)
            self._note_limits()
            if self._clock_ahead_s is not None:
                now = int(monotonic() + self._clock_ahead_s)
                # A later second than this one is of a clock that was set back since: it will not come again soon.
                self._write([key for key in self._open if key[1] != now])

    def _write(self, keys: Iterable[tuple[UUID, int]]) -> None:
        """Hand seconds that are over to the writer. While it is behind by more than its capacity, they are dropped."""
        for key in list(keys):
            sample = self._open.pop(key)
            if len(self._coalescer) < self._limits.sample_capacity_rows:
                self._coalescer.put(sample)
