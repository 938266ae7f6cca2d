"""What the worker drives: items wait here for a free slot, are called, and end in the sink.

All methods are for the event loop's thread, and the sink is called there too.
"""

from __future__ import annotations

import asyncio
import contextlib
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

Sink = Callable[[Item, Verdict], None]


class Dispatcher(Protocol):
    """Runs calls, so many at a time. Every item offered leaves it exactly once: through the sink,
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
        """Items started whose verdict the sink has not had yet."""

    @property
    def room(self) -> int:
        """Items that would start at once if they were offered."""

    async def start(self, sink: Sink) -> None: ...

    def offer(self, items: Sequence[Item], *, first: bool = False) -> None:
        """Hand over ready items; they start in this order as slots become free, behind or `first` before the others."""

    def take_back(self, route: str | None = None) -> list[Item]:
        """Remove and return what has not started: everything, or one route's."""

    def abort(self) -> list[Item]:
        """Cancel the calls in flight and return their items; their results, if any, are dropped."""

    def hold(self, route: str, seconds: float) -> None:
        """Start nothing of this route for so long; other routes go on. Never shortens a hold."""

    def stop_starting(self) -> None:
        """Let calls in flight end, start none: the results have nowhere to go."""

    def resume_starting(self) -> None: ...

    def resize(self, concurrency: int) -> None:
        """Allow so many calls at a time from now on."""

    def start_until(self, at: float) -> None:
        """Start nothing after this time of the monotonic clock, unless it is put off again."""

    async def wait_room(self) -> None:
        """Until fewer than `low_water` items are waiting. Raises if calls can no longer be started."""

    async def wait_idle(self) -> None:
        """Until nothing is in flight and nothing could be started; held items do not count."""

    async def stop(self) -> None:
        """Cancel what is in flight and end. The worker has taken back or aborted what it cares for."""


def woven(items: Iterable[Item]) -> list[Item]:
    """One item of each lane in turn, those of a lane in their order; who has come last begins."""
    lanes: dict[int, list[Item]] = {}
    for item in items:
        lanes.setdefault(item.lease.lane_id, []).append(item)
    rows = zip_longest(*reversed(lanes.values()))
    return [item for row in rows for item in row if item is not None]


class Ready:
    """Items that wait, with those of held routes set aside. Lanes take turns: a few items of one do not wait for the
    many of another that were claimed before.

    `pop` may be called from any thread. Its fast path takes no lock: a deque's ends are safe, and a
    hold that comes a moment after the look at `_until` is a hold that came too late for this item.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._lanes: set[int] = set()
        """The lanes of what has come since nothing waited."""
        self._until: dict[str, float] = {}
        self._aside: dict[str, deque[Item]] = {}
        self._lock = threading.Lock()
        self.open_until = math.inf
        """On the monotonic clock. Looked at for every item, so that a process that was frozen and wakes up starts
        nothing it no longer holds, before anything else has had a chance to stop it."""

    def __len__(self) -> int:
        """Items that can start now."""
        return len(self._items)

    @property
    def aside(self) -> int:
        """Items of held routes."""
        if not self._aside:
            return 0
        with self._lock:
            return sum(map(len, self._aside.values()))

    def extend(self, items: Sequence[Item], *, first: bool) -> None:
        if first:
            self._items.extendleft(items[::-1])
            return
        if items and items[0].lease.session:
            self._items.extend(items)
            return
        if not self._items:
            self._lanes.clear()
        self._lanes.update(item.lease.lane_id for item in items)
        self._items.extend(items if len(self._lanes) == 1 else woven([*self._take_all(), *items]))

    def _take_all(self) -> list[Item]:
        """Others may be popping meanwhile."""
        taken = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._items.popleft())
        return taken

    def pop(self) -> Item | None:
        if monotonic() > self.open_until:
            return None
        while True:
            try:
                item = self._items.popleft()
            except IndexError:
                return None
            if self._until and self._set_aside(item):
                continue
            return item

    def _set_aside(self, item: Item) -> bool:
        with self._lock:
            if item.route not in self._until:
                return False
            self._aside.setdefault(item.route, deque()).append(item)
            return True

    def hold(self, route: str, until_s: float) -> None:
        with self._lock:
            self._until[route] = max(until_s, self._until.get(route, until_s))

    def release(self, route: str, now_s: float) -> float:
        """End the hold if its time has come; the seconds still to wait otherwise."""
        with self._lock:
            remaining_s = self._until.get(route, now_s) - now_s
            if remaining_s > 0:
                return remaining_s
            self._until.pop(route, None)
            self._items.extendleft(reversed(self._aside.pop(route, deque())))
            return 0.0

    def drain(self, route: str | None) -> list[Item]:
        with self._lock:
            taken: list[Item] = []
            if route is None:
                for aside in self._aside.values():
                    taken.extend(aside)
                self._aside.clear()
            else:
                taken.extend(self._aside.pop(route, ()))
            kept: list[Item] = []
            while self._items:
                try:
                    item = self._items.popleft()
                except IndexError:
                    break
                (taken if route is None or item.route == route else kept).append(item)
            self._items.extendleft(reversed(kept))
            return taken


class Pool(ABC):
    """The part of a dispatcher that does not depend on how calls are run."""

    def __init__(self, concurrency: int, low_water: int | None = None) -> None:
        self._concurrency = concurrency
        self._low_water = concurrency if low_water is None else low_water
        self._ready = Ready()
        self._inside = 0
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
        self._notice()

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def waiting(self) -> int:
        return len(self._ready) + self._ready.aside

    @property
    def in_flight(self) -> int:
        # By subtraction: whatever is between two containers at this moment is in flight.
        return self._inside - self.waiting

    @property
    def room(self) -> int:
        return max(0, self._concurrency - self._inside) if self._starting else 0

    @abstractmethod
    async def start(self, sink: Sink) -> None: ...

    @abstractmethod
    def abort(self) -> list[Item]: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    def _wake(self) -> None:
        """Start what can be started."""

    def offer(self, items: Sequence[Item], *, first: bool = False) -> None:
        if self._fault is not None:
            raise self._fault
        self._inside += len(items)
        self._ready.extend(items, first=first)
        self._wake()

    def take_back(self, route: str | None = None) -> list[Item]:
        taken = self._ready.drain(route)
        self._inside -= len(taken)
        self._notice()
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
        self._notice()

    def resume_starting(self) -> None:
        self._starting = True
        self._wake()

    def start_until(self, at: float) -> None:
        self._ready.open_until = at
        self._wake()

    def resize(self, concurrency: int) -> None:
        self._concurrency = max(1, concurrency)
        self._wake()

    async def wait_room(self) -> None:
        while self._fault is None and self.waiting >= self.low_water:
            await self._change()
        if self._fault is not None:
            raise self._fault

    async def wait_idle(self) -> None:
        while self.in_flight or (self._starting and len(self._ready) and self._fault is None):
            await self._change()

    def _fail(self, error: BaseException) -> None:
        """Our own code broke: whoever waits for room learns of it."""
        self._fault = PenstockError(f"dispatch broke down: {type(error).__name__}: {error}")
        self._fault.__cause__ = error
        self._notice()

    async def _change(self) -> None:
        self._watched = True
        self._changed.clear()
        await self._changed.wait()

    def _notice(self) -> None:
        """Something left: let those who wait look again. One attribute test when nobody waits."""
        if self._watched:
            self._watched = False
            self._changed.set()
