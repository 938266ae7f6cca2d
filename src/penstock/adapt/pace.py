"""Pace of a worker: the time per item, of each route and of all, and so how many to claim at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config import ClaimLimits

_WEIGHT = 0.1
_ROUTES = 1_000
"""Routes whose time per item is remembered; of more, those that were observed last."""


@dataclass(slots=True)
class Pace:
    """Moving averages of the time per item; a claim should last for about `claim_slice_s`."""

    limits: ClaimLimits
    for_sessions: bool = False
    item_s: float | None = None
    """Of all routes."""
    factor: float = 1.0
    """Makes claims smaller while CPU or memory is short: `pressure.claim_factor`."""
    _route_item_s: dict[str, float] = field(default_factory=dict)
    """The route observed last comes last."""

    def observe(self, seconds: float, route: str | None = None) -> None:
        """Note how long an item was called; also one that failed or timed out, but none that was not admitted."""
        self.item_s = _average(self.item_s, seconds)
        if route is not None:
            self._route_item_s[route] = _average(self._route_item_s.pop(route, None), seconds)
            if len(self._route_item_s) > _ROUTES:
                del self._route_item_s[next(iter(self._route_item_s))]

    def claim_size(self, concurrency: int, route: str | None = None) -> int:
        """Items to claim at once: of one route, `claim_min` until it was observed; or of all, enough for every slot."""
        limits = self.limits
        item_s = self.item_s if route is None else self._route_item_s.get(route)
        size = 0.0
        if item_s is not None:
            size = limits.claim_slice_s / max(item_s, 1e-6) * concurrency * limits.claim_safety * self.factor
        least = limits.claim_min if route is not None else max(limits.claim_min, int(concurrency * self.factor))
        return min(max(int(size), least), int(limits.claim_max * self.factor) or 1)

    def shares(self, routes: Sequence[str], size: int, concurrency: int) -> dict[str, int]:
        """Items to claim of each route when `size` are wanted of all: an even share, and no more than fits its time."""
        share = max(1, size // max(1, len(routes)))
        return {route: min(share, self.claim_size(concurrency, route)) for route in routes}

    def ahead(self, concurrency: int) -> int:
        """Items that may wait for a free slot. Few of sessions: another worker could begin them now."""
        return max(1, concurrency // 8) if self.for_sessions else self.claim_size(concurrency) // 2

    def within(self, seconds: float, concurrency: int) -> int:
        """Items that `concurrency` slots get through in this time."""
        if self.item_s is None:
            return min(concurrency, self.limits.claim_max)
        return int(min(max(seconds / max(self.item_s, 1e-6) * concurrency, 1), self.limits.claim_max))


def _average(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _WEIGHT * (seconds - before)
