"""Dispatchers, which the worker drives: items wait for a free slot, are called, and end with `on_verdict`.

All methods are for the event loop's thread, and `on_verdict` is called there too.
"""

from __future__ import annotations

import asyncio
import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from time import monotonic
from typing import Protocol

from penstock.errors import PenstockError
from penstock.model import Item, Verdict

OnVerdict = Callable[[Item, Verdict], None]


class Dispatcher(Protocol):
    """Dispatcher: runs calls, `concurrency` at a time. Every item offered leaves it exactly once: through `on_verdict`,
    `take_back` or `abort`."""

    @property
    def low_water(self) -> int:
        """`wait_room` resolves while fewer items than this are waiting."""

    @low_water.setter
    def low_water(self, items: int) -> None: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def waiting(self) -> int:
        """Items not started yet, those of held routes included."""

    @property
    def in_flight(self) -> int:
        """Items started whose verdict `on_verdict` has not had yet."""

    def list_in_flight(self) -> list[Item]:
        """Items whose call has begun and not ended."""

    def limit(self, route: str) -> int:
        """Calls of a route that may be in flight at a time, as things are now."""

    @property
    def room(self) -> int:
        """Items that would start at once if they were offered."""

    async def start(self, on_verdict: OnVerdict) -> None: ...

    def offer(self, items: Sequence[Item], *, first: bool = False) -> None:
        """Queue ready items; they start in this order as slots become free, behind or `first` before the others."""

    def take_back(self, route: str | None = None) -> list[Item]:
        """Remove and return the items that have not started: all, or one route's."""

    def abort(self) -> list[Item]:
        """Cancel the calls in flight and return their items; their results, if any, are dropped."""

    def hold(self, route: str, seconds: float) -> None:
        """Start nothing of this route for these seconds; other routes go on. Never shortens a hold."""

    def stop_starting(self) -> None:
        """Let calls in flight end, start none: the results have nowhere to go."""

    def resume_starting(self) -> None: ...

    def start_until(self, at: float) -> None:
        """Start nothing after this time of the monotonic clock, unless a later call puts it off again."""

    async def wait_room(self) -> None:
        """Wait until fewer than `low_water` items are waiting. Raises if calls can no longer be started."""

    async def wait_idle(self) -> None:
        """Wait until nothing is in flight and nothing could be started; held items do not count."""

    async def stop(self) -> None:
        """Cancel the calls in flight and end. The worker has taken back or aborted the items it still needs."""


def interleave(items: Iterable[Item]) -> list[Item]:
    """Items with one of each lane in turn, those of a lane in their order; the lane that came last begins."""
    lanes: dict[int, list[Item]] = {}
    for item in items:
        lanes.setdefault(item.lease.lane_id, []).append(item)
    rows = zip_longest(*reversed(lanes.values()))
    return [item for row in rows for item in row if item is not None]


class ReadyQueue:
    """Items that wait for a slot, by route: routes take turns, and those that are held or at their limit are passed
    over. Within a route lanes take turns: a few items of one lane do not wait for the many of another that were claimed
    before.

    `pop` may be called from any thread.
    """

    def __init__(self, admits: Callable[[str], bool] | None = None) -> None:
        """`admits` says whether a call of a route may start now."""
        self._admits = admits
        self._queues: dict[str, deque[Item]] = {}
        self._lanes: dict[str, set[int]] = {}
        """Lanes of a route's items that have come since its queue was last empty."""
        self._count = 0
        self._until: dict[str, float] = {}
        """End of each route's hold, on the monotonic clock."""
        self._lock = threading.Lock()
        self.open_until = math.inf
        """Time on the monotonic clock after which nothing starts. Checked for every item, so that a process that was
        frozen and wakes up starts nothing it no longer holds, before anything else has had a chance to stop it."""

    def __len__(self) -> int:
        """Items of routes that are not held."""
        return self._count - self.held

    @property
    def held(self) -> int:
        """Items of held routes."""
        if not self._until:
            return 0
        with self._lock:
            return sum(len(self._queues.get(route, ())) for route in self._until)

    @property
    def routes(self) -> list[str]:
        """Routes that have items."""
        return list(self._queues)

    def of_route(self, route: str) -> int:
        """Items of a route, none if it is held."""
        return 0 if route in self._until else len(self._queues.get(route, ()))

    def extend(self, items: Sequence[Item], *, first: bool) -> None:
        by_route: dict[str, list[Item]] = {}
        for item in items:
            by_route.setdefault(item.route, []).append(item)
        with self._lock:
            self._count += len(items)
            for route, some in by_route.items():
                self._extend(route, some, first=first)

    def _extend(self, route: str, items: list[Item], *, first: bool) -> None:
        queue = self._queues.get(route)
        if queue is None:
            queue = self._queues[route] = deque()
            self._lanes[route] = set()
        if first:
            queue.extendleft(reversed(items))
            return
        lanes = self._lanes[route]
        lanes.update(item.lease.lane_id for item in items)
        if len(lanes) == 1 or items[0].lease.session:
            queue.extend(items)
        else:
            self._queues[route] = deque(interleave([*queue, *items]))

    def pop(self) -> Item | None:
        if not self._count or monotonic() > self.open_until:
            return None
        with self._lock:
            for route, queue in self._queues.items():
                if route in self._until or (self._admits is not None and not self._admits(route)):
                    continue
                item = queue.popleft()
                self._count -= 1
                del self._queues[route]
                if queue:
                    self._queues[route] = queue  # last in line now
                else:
                    del self._lanes[route]
                return item
        return None

    def hold(self, route: str, until_s: float) -> None:
        with self._lock:
            self._until[route] = max(until_s, self._until.get(route, until_s))

    def release(self, route: str, now_s: float) -> float:
        """End the route's hold if its time has come. Returns the seconds still to wait, otherwise 0."""
        with self._lock:
            remaining_s = self._until.get(route, now_s) - now_s
            if remaining_s > 0:
                return remaining_s
            self._until.pop(route, None)
            return 0.0

    def drain(self, route: str | None) -> list[Item]:
        """Remove and return the items of a route, or all; those of held routes first."""
        with self._lock:
            routes = list(self._queues) if route is None else [route]
            routes.sort(key=lambda name: name not in self._until)
            taken: list[Item] = []
            for name in routes:
                taken.extend(self._queues.pop(name, ()))
                self._lanes.pop(name, None)
            self._count -= len(taken)
            return taken


class CallQueue(ABC):
    """Dispatcher base: everything that does not depend on how calls are run."""

    def __init__(
        self, concurrency: int, low_water: int | None = None, admits: Callable[[str], bool] | None = None
    ) -> None:
        self._concurrency = concurrency
        self._low_water = concurrency if low_water is None else low_water
        self._ready = ReadyQueue(admits)
        self._inside = 0
        """Items waiting or in flight."""
        self._starting = True
        self._changed = asyncio.Event()
        self._watched = False
        self._fault: PenstockError | None = None

    @property
    def low_water(self) -> int:
        return self._low_water

    @low_water.setter
    def low_water(self, items: int) -> None:
        self._low_water = items
        self._notify()

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def waiting(self) -> int:
        return len(self._ready) + self._ready.held

    @property
    def in_flight(self) -> int:
        # By subtraction: an item that is between two containers at this moment is in flight.
        return self._inside - self.waiting

    @property
    def room(self) -> int:
        return max(0, self._concurrency - self._inside) if self._starting else 0

    def limit(self, route: str) -> int:  # noqa: ARG002 -- a throttle tells routes apart
        return self._concurrency

    @abstractmethod
    def list_in_flight(self) -> list[Item]: ...

    @abstractmethod
    async def start(self, on_verdict: OnVerdict) -> None: ...

    @abstractmethod
    def abort(self) -> list[Item]: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    def _wake(self) -> None:
        """Start as many calls as can be started."""

    def offer(self, items: Sequence[Item], *, first: bool = False) -> None:
        if self._fault is not None:
            raise self._fault
        self._inside += len(items)
        self._ready.extend(items, first=first)
        self._wake()

    def take_back(self, route: str | None = None) -> list[Item]:
        taken = self._ready.drain(route)
        self._inside -= len(taken)
        self._notify()
        return taken

    def hold(self, route: str, seconds: float) -> None:
        if seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        self._ready.hold(route, loop.time() + seconds)
        loop.call_later(seconds, self._release, route)

    def _release(self, route: str) -> None:
        loop = asyncio.get_running_loop()
        remaining_s = self._ready.release(route, loop.time())
        if remaining_s > 0:
            loop.call_later(remaining_s, self._release, route)
        else:
            self._wake()

    def stop_starting(self) -> None:
        self._starting = False
        self._notify()

    def resume_starting(self) -> None:
        self._starting = True
        self._wake()

    def start_until(self, at: float) -> None:
        self._ready.open_until = at
        self._wake()

    async def wait_room(self) -> None:
        while self._fault is None and self.waiting >= self.low_water:
            await self._wait_for_change()
        if self._fault is not None:
            raise self._fault

    async def wait_idle(self) -> None:
        while self.in_flight or (self._starting and len(self._ready) and self._fault is None):
            await self._wait_for_change()

    def _fail(self, error: BaseException) -> None:
        """Note that Penstock's own code broke: `wait_room` and `offer` raise it."""
        self._fault = PenstockError(f"dispatch broke down: {type(error).__name__}: {error}")
        self._fault.__cause__ = error
        self._notify()

    async def _wait_for_change(self) -> None:
        self._watched = True
        self._changed.clear()
        await self._changed.wait()

    def _notify(self) -> None:
        """Wake `wait_room` and `wait_idle` to look again. Costs one attribute test when nobody waits."""
        if self._watched:
            self._watched = False
            self._changed.set()
