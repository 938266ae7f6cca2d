"""Calls on threads, for functions that block.

Cheap functions are best run by one thread: more would only fight for the interpreter lock. So there
is one thread until calls are seen to take long, and then up to `concurrency`.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic, process_time

from penstock.config import RetryLimits
from penstock.dispatch.dispatcher import CallQueue, OnVerdict
from penstock.dispatch.http.answer import short
from penstock.dispatch.retry import Failure, judge_failure, judge_timeout, limits_for
from penstock.errors import PenstockError
from penstock.model import Item, Verdict

Run = Callable[[list[Item]], Sequence[Verdict]]
"""Calls the function on some items. Never raises."""

_LONG_CALL_S = 0.001
_STUCK_S = 0.010
_SLICE_S = 0.001
_EWMA_WEIGHT = 0.1
_BUSY_SHARE = 0.8
_DRAIN_WAIT_S = 1.0


class ThreadDispatcher(CallQueue):
    """Dispatcher that runs `run` on up to `chunk` items at a time, on one thread or, if calls block, several.

    Two parties race for a call's items: the thread when the call returns, and the loop when time is
    up or on `abort`. The one that pops the thread's entry from `_flights` decides them; the other's
    result is dropped. A thread that lost the race cannot be stopped: another takes its place, and it
    ends when its call returns. Once `concurrency` threads are lost, nothing more is started.
    """

    def __init__(
        self,
        run: Run,
        concurrency: int,
        retry: RetryLimits,
        *,
        timeout_s: float,
        chunk: int = 1,
        low_water: int | None = None,
        name: str = "processor",
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(concurrency, low_water)
        self._run = run
        self._retry = retry
        self._timeout_s = timeout_s
        self._chunk = chunk
        self._name = name
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        # Guards everything down to `_call_s`.
        self._lock = threading.Lock()
        self._gate = threading.Condition(self._lock)
        self._threads: set[threading.Thread] = set()
        self._lost: set[threading.Thread] = set()
        self._flights: dict[threading.Thread, tuple[list[Item], float]] = {}
        self._done: list[tuple[Item, Verdict]] = []
        self._awake = 0
        self._allowed = 1
        self._stopped = False
        self._call_s = 0.0
        self._posted = False
        self._drained = threading.Event()
        self._ticking: asyncio.TimerHandle | None = None
        self._cpu_seen = (0.0, 0.0)
        self._exhausted: PenstockError | None = None

    async def start(self, on_verdict: OnVerdict) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_verdict = on_verdict
        self._cpu_seen = (process_time(), monotonic())
        self._wake()

    def list_in_flight(self) -> list[Item]:
        with self._lock:
            return [item for items, _ in self._flights.values() for item in items]

    def abort(self) -> list[Item]:
        with self._lock:
            items = [item for thread in list(self._flights) for item in self._lose(thread)]
        self._inside -= len(items)
        self._drain()
        self._after_loss()
        return items

    async def stop(self) -> None:
        self._starting = False
        self.abort()
        if self._ticking is not None:
            self._ticking.cancel()
        with self._gate:
            self._stopped = True
            self._gate.notify_all()

    def _wake(self) -> None:
        with self._gate:
            if not self._startable():
                return
            calls = -(-len(self._ready) // self._chunk)
            wanted = min(calls, self._allowed - self._awake)
            self._gate.notify(wanted)
            for _ in range(self._awake + wanted - len(self._threads)):
                self._spawn()
        self._tick_in(_STUCK_S)

    def _startable(self) -> bool:
        return (
            self._starting
            and self._awake < self._allowed
            and len(self._ready) > 0
            and len(self._lost) < self._concurrency
        )

    def _spawn(self) -> None:
        # Daemon: a call that never returns must not keep the process from ending.
        name = f"penstock-{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._threads.add(thread)
        self._awake += 1
        thread.start()

    # On the threads

    def _work(self) -> None:
        me = threading.current_thread()
        while self._burst(me):
            with self._gate:
                self._awake -= 1
                while not self._startable() and not self._stopped:
                    self._gate.wait()
                if self._stopped:
                    return
                self._awake += 1
        self._post(self._on_lost_return, me)

    def _burst(self, me: threading.Thread) -> bool:
        """Run calls until there is none to start. Returns False if this thread has lost its call."""
        slice_end = monotonic() + _SLICE_S
        items = self._take(me)
        while items:
            started = monotonic()
            verdicts = self._run_safely(items)
            ended = monotonic()
            # One visit to the lock per call: end this one, start the next.
            with self._lock:
                if self._flights.pop(me, None) is None:
                    return False
                self._done += zip(items, verdicts, strict=True)
                self._call_s += _EWMA_WEIGHT * (ended - started - self._call_s)
                if ended < slice_end:
                    items = self._take_locked(me, ended)
                    continue
            self._pass_to_loop()
            slice_end = monotonic() + _SLICE_S
            items = self._take(me)
        self._pass_to_loop()
        return True

    def _run_safely(self, items: list[Item]) -> Sequence[Verdict]:
        try:
            return self._run(items)
        except BaseException as error:  # a thread that dies would take its slot, and its items' time, with it
            failure = Failure("processor_error", short(f"its result could not be judged: {type(error).__name__}"))
            return [judge_failure(failure, item.attempt, limits_for(self._retry, item), self._rng) for item in items]

    def _take(self, me: threading.Thread) -> list[Item]:
        with self._lock:
            return self._take_locked(me, monotonic())

    def _take_locked(self, me: threading.Thread, now: float) -> list[Item]:
        items: list[Item] = []
        if self._starting and self._awake <= self._allowed:
            while len(items) < self._chunk and (item := self._ready.pop()) is not None:
                items.append(item)
            if items:
                self._flights[me] = (items, now)
        return items

    def _pass_to_loop(self) -> None:
        """Have the loop report the results. At most one request for that is outstanding."""
        if not self._posted:
            self._posted = True
            self._drained.clear()
            self._post(self._drain)
        # Wait until it has. The loop needs the interpreter lock, which a tight loop of cheap calls
        # gives up only every 5 ms: every round trip to the database would cost as much.
        self._drained.wait(_DRAIN_WAIT_S)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            self._loop.call_soon_threadsafe(callback, *args)

    # On the loop

    def _drain(self) -> None:
        # Cleared first: a result added after the swap must be able to ask for another drain.
        self._posted = False
        with self._lock:
            done, self._done = self._done, []
        self._inside -= len(done)
        try:
            for item, verdict in done:
                self._on_verdict(item, verdict)
        except Exception as error:
            self._fail(error)
            raise
        finally:
            self._drained.set()
            self._notify()

    def _tick(self) -> None:
        """Look for calls past their time, and for work that waits behind calls that block."""
        self._ticking = None
        now = monotonic()
        self._expire(now)
        with self._lock:
            self._allowed = self._judge_allowed(now)
            flying = bool(self._flights)
        self._wake()
        self._notify()
        if flying or len(self._ready):
            slow_s = max(_STUCK_S, min(1.0, self._timeout_s / 10))
            self._tick_in(_STUCK_S if self._allowed < self._concurrency else slow_s)

    def _tick_in(self, seconds: float) -> None:
        if self._ticking is None:
            self._ticking = self._loop.call_later(seconds, self._tick)

    def _judge_allowed(self, now: float) -> int:
        cpu_s, since = self._cpu_seen
        self._cpu_seen = (process_time(), now)
        cpu_share = (self._cpu_seen[0] - cpu_s) / max(now - since, 1e-6)
        # In flight at the last tick too: the thread has had its chances since, so it is not merely
        # waiting for the interpreter lock that the loop held.
        stuck = sum(started < min(since, now - _STUCK_S) for _, started in self._flights.values())
        if self._call_s < _LONG_CALL_S:
            # Doubling while all of them are stuck: the first calls have not even returned yet.
            wanted = 1 + (2 * stuck if stuck >= self._awake else stuck)
        elif cpu_share > _BUSY_SHARE:
            # Calls that compute instead of waiting. One more thread helps only while the present ones
            # do not take the interpreter lock from each other, and there is a core for it.
            parallel = _BUSY_SHARE * self._allowed < cpu_share and self._allowed < (os.cpu_count() or 1)
            wanted = self._allowed + parallel
        else:
            wanted = 2 * self._allowed
        return min(wanted, self._concurrency)

    def _expire(self, now: float) -> None:
        overdue: list[tuple[Item, float]] = []
        with self._lock:
            for thread, (_, started) in list(self._flights.items()):
                if now - started >= self._timeout_s:
                    overdue += [(item, now - started) for item in self._lose(thread)]
        self._inside -= len(overdue)
        for item, lasted_s in overdue:
            duration_ms = int(lasted_s * 1000)
            self._on_verdict(
                item,
                judge_timeout(
                    self._timeout_s,
                    item.attempt,
                    limits_for(self._retry, item),
                    self._rng,
                    duration_ms,
                ),
            )
        if overdue:
            self._after_loss()

    def _lose(self, thread: threading.Thread) -> list[Item]:
        """Take a call's items from its thread. The thread is lost: it ends when its call returns."""
        self._threads.discard(thread)
        self._lost.add(thread)
        self._awake -= 1
        items = self._flights.pop(thread)[0]
        for item in items:
            item.cancel.request()
        return items

    def _on_lost_return(self, thread: threading.Thread) -> None:
        with self._lock:
            self._lost.discard(thread)
        self._after_loss()

    def _after_loss(self) -> None:
        if len(self._lost) < self._concurrency:
            if self._fault is self._exhausted:
                self._fault = None
        elif self._fault is None:
            self._fault = self._exhausted = PenstockError(
                f"{len(self._lost)} calls of {self._name} were given up after attempt_timeout_s "
                f"({self._timeout_s:g} s), run on and cannot be stopped: no more are started",
                hint="Give the function a time limit of its own, or make it async.",
            )
        self._wake()
        self._notify()
