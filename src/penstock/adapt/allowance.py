"""Allowances that headers state: what they say is left of a budget, and when it is full again, makes a rate.

Providers mean two things by the same headers. A *bucket* refills all the time: what is missing, divided by the time to
a full refill, is its rate, the same at every moment. A *window* ends at a certain time: what is left has to last until
then. Which of the two it is shows in a few answers.
"""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

_LOOK = 6
_SAME_RATE = 1.3
_SAME_END_S = 1.5
_MISSING = 0.01
_SHORTEST_S = 0.02


class Budget(msgspec.Struct, frozen=True):
    """What one answer's headers say of a budget of calls or tokens."""

    limit: float
    remaining: float
    reset_s: float
    """Seconds until it is full again, or until its window ends."""


class Allowance:
    """What is allowed of one budget, by the last answers."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_LOOK)
        self._ends: deque[tuple[float, float]] = deque(maxlen=_LOOK)
        """When each answer came, and when its window would end."""
        self._last: Budget | None = None

    def observe(self, budget: Budget, now_s: float) -> None:
        if budget.limit <= 0 or budget.remaining < 0 or budget.reset_s < 0:
            return  # -1 and 0 are what some send who know of no limit
        self._last = budget
        missing = budget.limit - budget.remaining
        if missing >= max(1.0, _MISSING * budget.limit) and budget.reset_s >= _SHORTEST_S:
            self._rates.append(missing / budget.reset_s)
        self._ends.append((now_s, now_s + budget.reset_s))

    @property
    def per_s(self) -> float | None:
        """Calls or tokens a second; None while it is not known."""
        if len(self._rates) == _LOOK and max(self._rates) <= _SAME_RATE * min(self._rates):
            return median(self._rates)
        if self._last is not None and len(self._ends) == _LOOK:
            asked, ends = zip(*self._ends, strict=True)
            if asked[-1] - asked[0] > 2 * _SAME_END_S > 2 * (max(ends) - min(ends)) and self._last.reset_s > 0:
                return self._last.remaining / self._last.reset_s
        return None
