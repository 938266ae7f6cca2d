"""Pace of a worker: the time per item, and so how many to claim at once."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import ClaimLimits

_WEIGHT = 0.1


@dataclass(slots=True)
class Pace:
    """A moving average of the time per item; a claim should last for about `claim_slice_s`."""

    limits: ClaimLimits
    for_sessions: bool = False
    item_s: float | None = None

    def observe(self, seconds: float) -> None:
        before = self.item_s
        self.item_s = seconds if before is None else before + _WEIGHT * (seconds - before)

    def claim_size(self, concurrency: int) -> int:
        limits = self.limits
        if self.item_s is None:
            return min(max(limits.claim_min, concurrency), limits.claim_max)
        size = limits.claim_slice_s / max(self.item_s, 1e-6) * concurrency * limits.claim_safety
        return int(min(max(size, limits.claim_min, concurrency), limits.claim_max))

    def ahead(self, concurrency: int) -> int:
        """Items that may wait for a free slot. Few of sessions: another worker could begin them now."""
        return max(1, concurrency // 8) if self.for_sessions else self.claim_size(concurrency) // 2

    def within(self, seconds: float, concurrency: int) -> int:
        """Items that `concurrency` slots get through in this time."""
        if self.item_s is None:
            return min(concurrency, self.limits.claim_max)
        return int(min(max(seconds / max(self.item_s, 1e-6) * concurrency, 1), self.limits.claim_max))
