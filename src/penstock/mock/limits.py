"""Limits of the mock: rates of calls and of tokens, and a number of calls worked on at once."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.mock.behaviour import Behaviour, LimitHeaders, RateLimit

Clock = Callable[[], float]


class TokenBucket:
    """Token bucket: refills steadily, holds the allowance of `burst_s` (one period if None), starts full."""

    def __init__(self, limit: RateLimit, burst_s: float | None, now: float) -> None:
        self.limit = limit
        self._per_s = limit.amount / limit.period_s
        self.size = max(1.0, self._per_s * (burst_s or limit.period_s))
        self._tokens = self.size
        self._at = now

    def has(self, amount: float, now: float) -> bool:
        """Whether the bucket holds `amount` now. More than it ever holds is let through when it is full."""
        self._tokens = min(self.size, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        return self._tokens >= min(amount, self.size)

    def take(self, amount: float) -> None:
        """Take what `has` found; an amount larger than the bucket leaves a debt that refills first."""
        self._tokens -= amount

    def resized(self, limit: RateLimit, burst_s: float | None, now: float) -> TokenBucket:
        """A bucket of another limit, no fuller than this one."""
        self.has(0, now)
        bucket = TokenBucket(limit, burst_s, now)
        bucket._tokens = min(bucket.size, self._tokens)
        return bucket

    @property
    def remaining(self) -> int:
        return max(0, int(self._tokens))

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` would be let through."""
        return max(0.0, (min(amount, self.size) - self._tokens) / self._per_s)

    @property
    def full_s(self) -> float:
        """Seconds until the bucket is full again."""
        return (self.size - self._tokens) / self._per_s


@dataclass(frozen=True, slots=True)
class Excess:
    """Refusal of a call by a rate limit: of `requests` or `tokens`, with the wait it announces."""

    kind: str
    wait_s: float


class RateLimits:
    """Rate limits of calls and of tokens, and the waits that their refusals announced."""

    def __init__(self, behaviour: Behaviour, clock: Clock) -> None:
        self._clock = clock
        self.buckets: dict[str, TokenBucket] = {}
        self.ignored_waits = 0
        """Calls that came before an announced wait was over."""
        self._wait_until = -math.inf
        self._waiting_for = ""
        self.change(behaviour)

    def change(self, behaviour: Behaviour) -> None:
        """Apply other limits. What was taken from a bucket stays taken."""
        self._behaviour = behaviour
        now, before, self.buckets = self._clock(), self.buckets, {}
        for kind, limit in (("requests", behaviour.rate_limit), ("tokens", behaviour.token_limit)):
            if limit is not None:
                bucket = before.get(kind) or TokenBucket(limit, behaviour.burst_s, now)
                self.buckets[kind] = bucket.resized(limit, behaviour.burst_s, now)

    def admit(self, tokens: int) -> Excess | None:
        """Charge a call of so many tokens to both limits, or to none if it exceeds one."""
        if not self.buckets:
            return None
        now = self._clock()
        if now < self._wait_until:
            self.ignored_waits += 1
            if self._behaviour.retry_after_s is not None:
                return Excess(self._waiting_for, self._wait_until - now)
        amounts = {"requests": 1, "tokens": tokens}
        for kind, bucket in self.buckets.items():
            if not bucket.has(amounts[kind], now):
                return self._announce(kind, bucket.wait_s(amounts[kind]), now)
        for kind, bucket in self.buckets.items():
            bucket.take(amounts[kind])
        return None

    def _announce(self, kind: str, wait_s: float, now: float) -> Excess:
        excess = Excess(kind, self._behaviour.retry_after_s or wait_s)
        headers = self._behaviour.limit_headers
        if headers is not LimitHeaders.NONE:
            announced_s = excess.wait_s if headers is LimitHeaders.FULL else math.ceil(excess.wait_s)
            self._wait_until = max(self._wait_until, now + announced_s)
            self._waiting_for = kind
        return excess


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

    def resize(self, capacity: int | None) -> None:
        """Admit who waits if there are more places now; with fewer, those inside stay."""
        self.capacity = capacity
        self._pump()

    def leave(self, entrant: Entrant) -> None:
        """Free the place of an entrant that is done, or will not wait any longer."""
        if entrant in self._waiting:
            del self._waiting[entrant]
            return
        self.working -= 1
        self._pump()

    def _pump(self) -> None:
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
