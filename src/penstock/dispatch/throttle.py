"""Throttle of one provider in one process: which calls may start now.

All calls to the provider pass it: those of batches, of sessions, and those passed on. It bounds the calls in flight, in
all and of each route, and paces those of a route whose rate is limited. What the bounds are is decided elsewhere, over
all processes (`penstock.limits`); here they are kept, and what becomes of the calls is counted for it.

Dispatchers share the throttle in an order of rank: the first takes any free slot. Each one behind it gets what those
before it leave: a slot is free for it only while none before it has an item ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from penstock.adapt.allowance import Allowance, Budget
from penstock.adapt.concurrency import Totals
from penstock.model import Again, Halt, Outcome, OutcomeState, Verdict

# Calls that a paced route may save up: those of so many seconds, and at least one.
_BURST_S = 0.02
_NEARLY = 0.97
_TOKENS_WEIGHT = 0.05
_REFUSED = 429
_MAX_ROUTES = 1_000
_ANY_NUMBER = 1_000_000


class Sharer(Protocol):
    """Dispatcher that shares a throttle with others."""

    def startable(self, route: str | None = None) -> int:
        """Items that could be called now, of one route or in all."""

    def wake(self) -> None:
        """Start as many calls as can be started: there may be room."""


@dataclass(slots=True)
class Route:
    """One route's bounds in this process, and what was seen of its calls."""

    share: float
    """Calls in flight at a time."""
    per_s: float | None = None
    """Calls a second; None if nothing is known to limit them."""
    held_until: float = 0.0
    in_flight: int = 0
    started: int = 0
    refused: int = 0
    calls: int = 0
    work: float = 0.0
    busy_s: float = 0.0
    flight_s: float = 0.0
    limited_s: float = 0.0
    failed: int = 0
    paced_s: float = 0.0
    """Time in which calls waited for the rate."""
    tokens: float | None = None
    """Tokens of a call, a moving average."""
    reported: int = 0
    """Calls started by the time of the last report."""
    halted: bool = False
    """The last call said that a person must act: until one succeeds, one is tried at a time."""
    budgets: dict[str, Allowance] = field(default_factory=dict)
    _counted_at: float = 0.0
    _saved: float = 1.0
    _saved_at: float = 0.0

    def __post_init__(self) -> None:
        self._counted_at = self._saved_at = monotonic()

    def count(self, now: float) -> None:
        """Add the time since the last count to the sums over time."""
        passed_s = now - self._counted_at
        self._counted_at = now
        if not self.in_flight:
            return
        self.flight_s += self.in_flight * passed_s
        if self.in_flight >= self.share * _NEARLY - 0.5:
            self.limited_s += self.share * passed_s

    def set_rate(self, per_s: float | None, now: float) -> None:
        """Pace the route's calls from now on."""
        if per_s is not None:
            self._refill(now)
            self._saved = min(self._saved, self._most_saved(per_s))
        self.per_s = per_s

    def hold(self, until: float) -> None:
        self.held_until = max(self.held_until, until)

    def wait_s(self, now: float) -> float:
        """Seconds until the gate and the rate allow a call."""
        if now < self.held_until:
            return self.held_until - now
        if self.per_s is None:
            return 0.0
        self._refill(now)
        return 0.0 if self._saved >= 1.0 else (1.0 - self._saved) / self.per_s

    @property
    def free_slots(self) -> int:
        """Calls that the share allows to start now: one at least if none is in flight."""
        room = (1 if self.halted else int(self.share + 1e-9)) - self.in_flight
        return room if self.in_flight else max(room, 1)

    @property
    def saved_calls(self) -> int:
        """Calls that the rate allows at once, as of the last look at the clock."""
        return _ANY_NUMBER if self.per_s is None else int(self._saved)

    def _refill(self, now: float) -> None:
        # Nothing is saved up behind a closed gate: it does not open into a burst.
        since = max(self._saved_at, self.held_until)
        if self.per_s is not None and now > since:
            self._saved = min(self._most_saved(self.per_s), self._saved + (now - since) * self.per_s)
        self._saved_at = now

    @staticmethod
    def _most_saved(per_s: float) -> float:
        return max(1.0, per_s * _BURST_S) + 1e-6

    def begin(self, now: float) -> None:
        self.count(now)
        self.in_flight += 1
        self.started += 1
        if self.per_s is not None:
            self._saved -= 1.0

    def end(self, now: float) -> None:
        self.count(now)
        self.in_flight -= 1

    def note(self, verdict: Verdict) -> None:
        """Count what became of a call."""
        seconds = verdict.duration_ms / 1000
        if isinstance(verdict, Outcome):
            self.halted = False
            if verdict.state is not OutcomeState.FAILED:
                tokens = 0 if verdict.usage is None else verdict.usage.output_tokens
                self.succeed(seconds, tokens, 0 if verdict.usage is None else verdict.usage.input_tokens)
            elif verdict.error_code == "request_timeout":
                self.failed += 1
        elif isinstance(verdict, Halt):
            self.halted = True
        else:
            self._note_again(verdict)

    def _note_again(self, again: Again) -> None:
        if again.status_code == _REFUSED:
            self.refused += 1
        elif again.status_code is not None or again.error_code == "request_timeout":
            self.failed += 1

    def succeed(self, seconds: float, output_tokens: int = 0, input_tokens: int = 0) -> None:
        self.calls += 1
        self.busy_s += seconds
        self.work += output_tokens or 1
        tokens = output_tokens + input_tokens
        if tokens:
            self.tokens = tokens if self.tokens is None else self.tokens + _TOKENS_WEIGHT * (tokens - self.tokens)

    @property
    def admitted(self) -> int:
        return self.started - self.refused

    @property
    def stated_per_s(self) -> float | None:
        """Calls a second that headers allow."""
        rates = []
        for kind, allowance in self.budgets.items():
            per_s = allowance.per_s
            if per_s is None:
                continue
            if kind != "requests":
                if not self.tokens:
                    continue
                per_s /= self.tokens
            rates.append(per_s)
        return min(rates, default=None)

    @property
    def totals(self) -> Totals:
        return Totals(self.calls, self.work, self.busy_s, self.flight_s, self.limited_s, self.failed)


class Throttle:
    """Bounds of one provider's calls in one process. For the event loop's thread alone."""

    def __init__(self, capacity: int, *, start: float = math.inf, start_per_s: float | None = None) -> None:
        """`capacity` calls at a time in all; each route begins with `start`, and with `start_per_s` calls a second."""
        self._capacity = capacity
        self._start = start
        self._start_per_s = start_per_s
        self.in_flight = 0
        self.routes: dict[str, Route] = {}
        self.open_until = math.inf
        """Time on the monotonic clock after which nothing starts: this process's share may be another's by then."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when the shares should be looked at soon: calls were refused, or more could be called than may be."""
        self._sharers: list[Sharer] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def join(self, sharer: Sharer, *, first: bool = False) -> None:
        """Add a sharer, ranked behind those who have joined before, or before them."""
        self._sharers.insert(0 if first else len(self._sharers), sharer)

    def leave(self, sharer: Sharer) -> None:
        if sharer in self._sharers:
            self._sharers.remove(sharer)

    def route(self, name: str) -> Route:
        found = self.routes.get(name)
        if found is None:
            if len(self.routes) >= _MAX_ROUTES:
                self._forget_idle()
            found = self.routes[name] = Route(min(self._start, self._capacity), self._start_per_s)
            self.on_news()
        return found

    def _forget_idle(self) -> None:
        """Forget routes without calls: callers name models, and most that are named are never called again."""
        self.routes = {name: route for name, route in self.routes.items() if route.in_flight or self.wanted(name)}

    # -- bounds

    @property
    def capacity(self) -> int:
        """Calls in flight at a time, in all."""
        return self._capacity

    @capacity.setter
    def capacity(self, calls: int) -> None:
        self._capacity = calls
        self.nudge()

    @property
    def concurrency(self) -> int:
        """Calls that can be expected to be in flight at a time: what its routes in use may have."""
        used = [route for route in self.routes.values() if route.in_flight or route.started]
        expected = 0.0
        for route in used:
            paced = math.inf
            if route.per_s is not None and route.calls:
                paced = max(1.0, 2 * route.per_s * route.busy_s / route.calls)
            expected += min(route.share, paced)
        if not used:
            expected = self._start
        return int(max(1, min(self._capacity, expected)))

    def limit(self, name: str) -> int:
        """Calls of a route that may be in flight at a time."""
        return min(self._capacity, max(1, int(self.route(name).share + 1e-9)))

    def hold(self, name: str, seconds: float) -> None:
        """Start nothing of this route for these seconds. Never shortens a hold."""
        route = self.route(name)
        route.hold(monotonic() + seconds)
        self.on_news()

    def set_share(self, name: str, share: float, per_s: float | None) -> None:
        route, now = self.route(name), monotonic()
        route.count(now)
        route.share = share
        route.set_rate(per_s, now)

    def room(self, asker: Sharer) -> int:
        """Calls that this sharer may start now, whatever their routes."""
        room = self._capacity - self.in_flight
        for sharer in self._sharers:
            if sharer is asker or room <= 0:
                break
            room -= sharer.startable()
        return max(0, room) if monotonic() < self.open_until else 0

    def admits(self, asker: Sharer, name: str) -> bool:
        """Whether the route's bounds allow this sharer to start a call of it now. If only time is in the way, its
        sharers are woken in time."""
        room = self.allowed(name)
        if room <= 0:
            return False
        for sharer in self._sharers:
            if sharer is asker:
                break
            room -= sharer.startable(name)
        return room > 0 or not self.route(name).in_flight

    def allowed(self, name: str) -> int:
        """Calls of a route that its bounds allow to start now. If only time is in the way, its sharers are woken in
        time."""
        route = self.route(name)
        slots = route.free_slots
        if slots <= 0:
            return 0
        wait_s = route.wait_s(monotonic())
        if wait_s > 0:
            self._wake_in(name, wait_s)
            return 0
        return min(slots, route.saved_calls)

    def _wake_in(self, name: str, seconds: float) -> None:
        if name not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[name] = loop.call_later(max(seconds, 0.001), self._on_time, name)

    def _on_time(self, name: str) -> None:
        del self._timers[name]
        self.nudge()

    # -- calls

    def begin(self, name: str) -> None:
        self.in_flight += 1
        self.route(name).begin(monotonic())

    def end(self, name: str, by: Sharer | None = None) -> None:
        """Free the slot of a call that has ended. `by` looks for its next call itself, and is not woken."""
        self.in_flight -= 1
        self.route(name).end(monotonic())
        self.nudge(by)

    def note(self, name: str, verdict: Verdict) -> None:
        """Count what became of a call, and look at the shares soon if it was refused."""
        route = self.route(name)
        refused, halted = route.refused, route.halted
        route.note(verdict)
        if route.refused > refused:
            self.on_news()
        if halted and not route.halted:
            self.nudge()

    def note_budgets(self, name: str, budgets: dict[str, Budget]) -> None:
        """Take what the headers of an answer say of the budgets of calls and tokens."""
        route, now = self.route(name), monotonic()
        for kind, budget in budgets.items():
            route.budgets.setdefault(kind, Allowance()).observe(budget, now)

    def nudge(self, by: Sharer | None = None) -> None:
        """Wake the sharers, all but `by`: a change may have left room."""
        if self._capacity > self.in_flight:
            for sharer in list(self._sharers):
                if sharer is not by:
                    sharer.wake()

    def note_offer(self, names: Iterable[str]) -> None:
        """Note that there is more to call of these routes. A process without a slot asks for one soon."""
        for name in names:
            self.route(name)
        if self._capacity <= 0:
            self.on_news()

    def wanted(self, name: str) -> int:
        """Calls of a route that are in flight or could be."""
        return self.routes[name].in_flight + sum(sharer.startable(name) for sharer in self._sharers)

    @property
    def paced_per_s(self) -> float | None:
        """Calls a second at which those begin that wait for their rate alone; None if none does."""
        rates = [
            route.per_s
            for name, route in self.routes.items()
            if route.per_s is not None and route.in_flight < route.share and self.wanted(name) > route.in_flight
        ]
        return sum(rates) if rates else None

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()


class Callers:
    """Callers who wait for a call of their own, passed on at once. A sharer like a dispatcher."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        throttle.join(self, first=True)

    def startable(self, route: str | None = None) -> int:
        if route is not None:
            return len(self._waiting.get(route, ()))
        return sum(min(len(queue), self._throttle.allowed(name)) for name, queue in self._waiting.items())

    def wake(self) -> None:
        for route in list(self._waiting):
            queue = self._waiting[route]
            while queue and self._throttle.room(self) > 0 and self._throttle.admits(self, route):
                caller = queue.popleft()
                if not caller.done():
                    self._throttle.begin(route)
                    caller.set_result(None)
            if not queue:
                del self._waiting[route]

    async def take(self, route: str, patience_s: float) -> None:
        """Take a slot of the route, to be freed. Raises TimeoutError if none gets free in time."""
        caller = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(route, deque()).append(caller)
        self.wake()
        if not caller.done():
            self._throttle.note_offer([route])
        try:
            async with asyncio.timeout(patience_s):
                await caller
        except BaseException:
            if caller.done() and not caller.cancelled():
                self._throttle.end(route)
            else:
                self._forget(route, caller)
            raise

    def free(self, route: str) -> None:
        self._throttle.end(route)

    def _forget(self, route: str, caller: asyncio.Future[None]) -> None:
        queue = self._waiting.get(route)
        if queue is not None:
            with contextlib.suppress(ValueError):
                queue.remove(caller)
            if not queue:
                del self._waiting[route]
