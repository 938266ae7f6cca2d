"""Size of intake batches: how many rows and bytes the next transaction of an intake takes.

A batch starts small and doubles while batches are healthy. It is halved when the time for each row rises above a moving
baseline, or when one batch after another waits longer for its connection than it takes; an error takes it to the
least. The caller measures: there is no clock in here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from penstock.backoff import doubled, jittered
from penstock.config import KIB, MIB, IntakeLimits

_FIRST_ROWS = 64
_FIRST_BYTES = MIB
"""Where batches of large rows start, and the least to which they are made smaller."""
_BYTES_PER_ROW = KIB
"""Bytes that weigh as much as a row: time is compared per row while rows are small, per byte when they are large."""
_SLOW = 2.0
"""Times the baseline at which a batch is too slow."""
_HEALTHY = 1.5
"""Times the baseline below which batches may grow."""
_FALL, _RISE = 0.5, 0.1
"""Weights of a batch in the baseline: it soon follows a database that gets faster, in a dozen one that gets slower."""
_LONG_S = 0.05
"""Shorter batches are not made smaller because of waits: nobody would have a connection much sooner."""
_WAITS = 3
"""Batches in a row that have to wait before a wait counts as sustained."""
_AS_SLOW = 2
"""Such batches that show that it is the transaction that takes long: one may follow a batch that was slow in part."""
_FIRST_REST_S, _LAST_REST_S = 0.5, 5.0


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """One batch as it went."""

    rows: int
    bytes: int
    seconds: float
    """In its transaction, without waits for input."""
    wait_s: float = 0.0
    """For a connection, before it."""

    @property
    def cost_s(self) -> float:
        """Seconds for each row, or for the bytes that weigh as much."""
        return self.seconds / (self.rows + self.bytes / _BYTES_PER_ROW)


@dataclass(slots=True)
class IntakeBatchSize:
    """The bounds of the next batch: it ends with the row that reaches one of them."""

    limits: IntakeLimits
    rng: random.Random | None = None
    rows: int = field(init=False)
    bytes: int = field(init=False)
    rest_s: float = 0.0
    """Seconds to wait before the next batch: more than 0 after an error."""
    reason: str = "start"
    """The last change, and why."""
    _baseline_s: float | None = None
    _waits: int = 0
    _errors: int = 0
    _halved: MeasuredBatch | None = None
    """The batch whose slowness has just halved the bounds."""
    _as_slow: int = 0
    """Batches in a row that took as long as the one before, twice their size."""

    def __post_init__(self) -> None:
        self.rows = min(max(_FIRST_ROWS, self.limits.intake_min_rows), self.limits.intake_max_rows)
        self.bytes = self._least_bytes

    @property
    def _least_bytes(self) -> int:
        return min(_FIRST_BYTES, self.limits.intake_max_batch_bytes)

    def observe(self, batch: MeasuredBatch) -> None:
        """Learn from a batch that is committed."""
        self._errors, self.rest_s = 0, 0.0
        if 2 * batch.rows < self.rows and 2 * batch.bytes < self.bytes:
            return  # the input ended, or is slow: its transaction was most of such a batch
        slowness = self._compare(batch.cost_s)
        waited = batch.wait_s > batch.seconds > _LONG_S
        self._waits = self._waits + 1 if waited else 0
        halved, self._halved = self._halved, None
        if self._waits == _WAITS:
            self._waits = 0
            self._halve(batch, "waits for connections")
        elif slowness > _SLOW:
            as_slow = halved is not None and batch.seconds > 0.8 * halved.seconds
            self._as_slow = self._as_slow + 1 if as_slow else 0
            if self._as_slow == _AS_SLOW:
                # Half as much took as long: transactions have become dear, and smaller ones would be more of them.
                self._as_slow, self._baseline_s = 0, batch.cost_s
                self._double("as slow when halved")
            elif self._halve(batch, "time per row rises"):
                self._halved = batch
        elif slowness < _HEALTHY and not waited:
            self._double("healthy")

    def observe_error(self) -> None:
        """A batch was not stored: begin again with the least, after a rest."""
        self._errors += 1
        self.rest_s = jittered(doubled(_FIRST_REST_S, _LAST_REST_S, self._errors), rng=self.rng)
        self.rows = min(self.limits.intake_min_rows, self.limits.intake_max_rows)
        self.bytes = self._least_bytes
        self.reason = "error"
        self._baseline_s = self._halved = None
        self._waits = self._as_slow = 0

    def _compare(self, cost_s: float) -> float:
        """How many times the baseline this is; the baseline follows."""
        baseline_s = self._baseline_s if self._baseline_s is not None else cost_s
        weight = _FALL if cost_s < baseline_s else _RISE
        self._baseline_s = baseline_s + weight * (cost_s - baseline_s)
        return cost_s / max(baseline_s, 1e-9)

    def _double(self, why: str) -> None:
        bounds = self.rows, self.bytes
        self.rows = min(2 * self.rows, self.limits.intake_max_rows)
        self.bytes = min(2 * self.bytes, self.limits.intake_max_batch_bytes)
        if bounds != (self.rows, self.bytes):
            self.reason = f"doubled: {why}"

    def _halve(self, batch: MeasuredBatch, why: str) -> bool:
        """Halve what the batch really was: only one of its bounds was reached."""
        bounds = self.rows, self.bytes
        least_rows = min(self.limits.intake_min_rows, self.limits.intake_max_rows)
        self.rows = max(min(batch.rows, self.rows) // 2, least_rows)
        self.bytes = max(min(batch.bytes, self.bytes) // 2, self._least_bytes)
        if bounds == (self.rows, self.bytes):
            return False
        self.reason = f"halved: {why}"
        return True
