"""Upstreams as arithmetic, in simulated time: what controllers are tried against, without sockets and clocks."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.adapt import concurrency
from penstock.adapt.concurrency import Bounds, Totals


@dataclass
class SlotUpstream:
    """Upstream with slots: calls beyond them queue without refusal. A token takes longer the more slots are busy."""

    slots: Callable[[float], int]
    token_s: float = 0.01
    slowdown: float = 1.0
    tokens: tuple[int, int] = (50, 150)
    seed: int = 1
    unrest: float = 0.0
    """How much the pace of everything changes from second to second, as on a machine that others use too."""
    failing: Callable[[int], float] = lambda _: 0.0
    """Part of the calls that fails, by the number of calls in flight."""
    done: list[tuple[float, int, float]] = field(default_factory=list)
    """When each call ended, its tokens, and how long it took."""

    def run(
        self, seconds: float, *, fixed: int | None = None, start: int = 16, counts_tokens: bool = True
    ) -> list[float]:
        """Keep as many calls in flight as the controller says, or a fixed number; returns the limits it chose."""
        rng, bounds, tick_s = random.Random(self.seed), Bounds(1, 1_000), 0.5
        weather, slow_until, slower = random.Random(self.seed), 0.0, 1.0
        state = concurrency.begin(start, 0.0, Totals(), bounds)
        level, limits = fixed or start, [float(start)]
        now, next_tick, in_flight = 0.0, tick_s, 0
        queue: list[float] = []
        running: list[tuple[float, float, int]] = []
        calls, work, busy_s, flight_s, limited_s, failed = 0, 0.0, 0.0, 0.0, 0.0, 0
        while now < seconds:
            while in_flight < level:
                queue.append(now)
                in_flight += 1
            slots = self.slots(now)
            while queue and len(running) < slots:
                tokens = rng.randint(*self.tokens)
                load = min(1.0, (len(running) + 1) / slots)
                if now >= slow_until:
                    slow_until, slower = now + 1, weather.lognormvariate(0, self.unrest)
                takes_s = slower * tokens * self.token_s * (1 + (self.slowdown - 1) * load)
                heapq.heappush(running, (now + takes_s, queue.pop(0), tokens))
            then = min(running[0][0] if running else next_tick, next_tick)
            flight_s += in_flight * (then - now)
            limited_s += level * (then - now)
            now = then
            while running and running[0][0] <= now:
                _, sent, tokens = heapq.heappop(running)
                fails, in_flight = rng.random() < self.failing(in_flight), in_flight - 1
                if fails:
                    failed += 1
                    continue
                calls, busy_s = calls + 1, busy_s + now - sent
                work += tokens if counts_tokens else 1
                self.done.append((now, tokens, now - sent))
            if now >= next_tick:
                next_tick += tick_s
                if fixed is None:
                    totals = Totals(calls, work, busy_s, flight_s, limited_s, failed)
                    state, _ = concurrency.adjust(state, now, totals, bounds)
                    level = max(1, round(state.level))
                    limits.append(state.limit)
        return limits

    def tokens_per_s(self, begin: float, end: float) -> float:
        return sum(tokens for at, tokens, _ in self.done if begin <= at < end) / (end - begin)

    def p95_s(self, begin: float, end: float) -> float:
        took = sorted(seconds for at, _, seconds in self.done if begin <= at < end)
        return took[int(0.95 * len(took))]


@dataclass
class BucketUpstream:
    """Upstream that lets `per_s` calls through, and refuses the others: with the time to wait, or without."""

    per_s: float
    size: float
    states_wait: bool
    admitted: int = 0
    refused: int = 0
    _tokens: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self._tokens = self.size

    def call(self, now: float) -> float | None:
        """Call it; returns how long it asks to be left alone, or what a client rests that is told nothing; None if the
        call was let through."""
        self._tokens = min(self.size, self._tokens + (now - self._at) * self.per_s)
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            self.admitted += 1
            return None
        self.refused += 1
        return float(-(-(1 - self._tokens) // self.per_s)) if self.states_wait else 0.1
