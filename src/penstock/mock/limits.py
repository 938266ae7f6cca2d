"""Limits of the mock: a rate, and a number of calls worked on at once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from penstock.mock.behaviour import RateLimit


class TokenBucket:
    """Token bucket: refills steadily, holds one period's allowance, starts full."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self.size = max(1.0, limit.calls)
        self._per_s = limit.calls / limit.period_s
        self._clock = clock
        self._tokens = self.size
        self._at = clock()

    def take(self) -> bool:
        now = self._clock()
        self._tokens = min(self.size, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    @property
    def remaining(self) -> int:
        return int(self._tokens)

    @property
    def wait_s(self) -> float:
        """Seconds until the next call would be admitted."""
        return max(0.0, (1 - self._tokens) / self._per_s)

    @property
    def full_s(self) -> float:
        """Seconds until the bucket is full again."""
        return (self.size - self._tokens) / self._per_s


class Entrant(Protocol):
    def begin(self) -> None: ...


class Gate:
    """Gate that admits `capacity` entrants at once; the others wait in the order they came."""

    def __init__(self, capacity: int | None, queue_limit: int | None) -> None:
        self.capacity = capacity
        self.queue_limit = queue_limit
        self.working = 0
        self.max_working = 0
        self.max_waiting = 0
        self._waiting: OrderedDict[Entrant, None] = OrderedDict()
        self._pumping = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether an entrant would have to wait in a queue that is at its limit."""
        return not self._open and self.queue_limit is not None and self.waiting >= self.queue_limit

    @property
    def _open(self) -> bool:
        return self.capacity is None or self.working < self.capacity

    def enter(self, entrant: Entrant) -> None:
        if self._open and not self._waiting:
            self._admit(entrant)
        else:
            self._waiting[entrant] = None
            self.max_waiting = max(self.max_waiting, len(self._waiting))

    def leave(self, entrant: Entrant) -> None:
        """Free the place of an entrant that is done, or will not wait any longer."""
        if entrant in self._waiting:
            del self._waiting[entrant]
            return
        self.working -= 1
        # An entrant may begin and leave in one call; the loop below must then go on, not recurse.
        if self._pumping or not self._waiting:
            return
        self._pumping = True
        try:
            while self._waiting and self._open:
                self._admit(self._waiting.popitem(last=False)[0])
        finally:
            self._pumping = False

    def _admit(self, entrant: Entrant) -> None:
        self.working += 1
        if self.working > self.max_working:
            self.max_working = self.working
        entrant.begin()
