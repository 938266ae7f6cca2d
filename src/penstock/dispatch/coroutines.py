"""Calls as coroutines: a fixed set of long-lived runners, no task per item."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from penstock.config import RetryLimits
from penstock.dispatch.dispatcher import CallQueue, OnVerdict
from penstock.dispatch.http.answer import short
from penstock.dispatch.retry import Failure, judge_failure, judge_timeout, limits_for
from penstock.dispatch.throttle import Throttle
from penstock.model import Item, Verdict

Call = Callable[[list[Item]], Awaitable[Sequence[Verdict]]]

# Time for which runners start calls in one pass of the loop: calls that never really wait would otherwise keep the
# loop until the ready items run out.
_SLICE_S = 0.002
_STOP_S = 1.0


def each(call: Callable[[Item], Awaitable[Verdict]]) -> Call:
    """A call of one item, in the shape of a call of several."""

    async def call_one(items: list[Item]) -> tuple[Verdict]:
        return (await call(items[0]),)

    return call_one


class CoroutineDispatcher(CallQueue):
    """Dispatcher that runs `call` on up to `chunk` items at a time, in up to `concurrency` runners.

    A runner whose call is cancelled, by `abort` or the time limit, is replaced rather than revived: what its call does
    with the cancellation no longer matters. A call's items are decided by the side that removes its entry from
    `_flights`: the runner, `abort` or the time limit.
    """

    def __init__(
        self,
        call: Call,
        concurrency: int,
        retry: RetryLimits,
        *,
        timeout_s: float | None = None,
        chunk: int = 1,
        low_water: int | None = None,
        throttle: Throttle | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """With `throttle`, which it may share with other dispatchers, calls start as that allows, one item each."""
        super().__init__(concurrency, low_water, None if throttle is None else self._admits)
        self._call = call
        self._retry = retry
        self._timeout_s = timeout_s
        self._chunk = chunk
        self._rng = rng or random.Random()  # noqa: S311 -- jitter
        self._runners: set[asyncio.Task[None]] = set()
        self._replaced: set[asyncio.Task[None]] = set()
        self._idle: list[asyncio.Future[None]] = []
        # In order of starting, so the first is always the next to run out of time.
        self._flights: dict[asyncio.Task[Any], tuple[list[Item], float]] = {}
        self._clock: asyncio.TimerHandle | None = None
        self._slice_open = False
        self._slice_end = 0.0
        self._throttle = throttle
        if throttle is not None:
            throttle.join(self)

    def _admits(self, route: str) -> bool:
        return self._throttle is None or self._throttle.admits(self, route)

    @property
    def concurrency(self) -> int:
        return self._concurrency if self._throttle is None else min(self._concurrency, self._throttle.concurrency)

    @property
    def room(self) -> int:
        return super().room if self._throttle is None else min(super().room, self._throttle.room(self))

    def limit(self, route: str) -> int:
        return self.concurrency if self._throttle is None else min(self._concurrency, self._throttle.limit(route))

    def list_in_flight(self) -> list[Item]:
        return [item for items, _ in self._flights.values() for item in items]

    def startable(self, route: str | None = None) -> int:
        if not self._starting:
            return 0
        if route is not None:
            return self._ready.of_route(route)
        if self._throttle is None:
            return len(self._ready)
        return sum(min(self._ready.of_route(name), self._throttle.allowed(name)) for name in self._ready.routes)

    def hold(self, route: str, seconds: float) -> None:
        if self._throttle is None:
            super().hold(route, seconds)
        elif seconds > 0:
            self._throttle.hold(route, seconds)

    def wake(self) -> None:
        self._wake()

    async def start(self, on_verdict: OnVerdict) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_verdict = on_verdict
        self._wake()

    def take_back(self, route: str | None = None) -> list[Item]:
        taken = super().take_back(route)
        if self._throttle is not None:
            self._throttle.nudge()
        return taken

    def stop_starting(self) -> None:
        super().stop_starting()
        if self._throttle is not None:
            self._throttle.nudge()

    def abort(self) -> list[Item]:
        items = [item for flight, _ in self._flights.values() for item in flight]
        for runner in list(self._flights):
            self._replace(runner)
        self._wake()
        self._notify()
        return items

    def offer(self, items: Sequence[Item], *, first: bool = False) -> None:
        super().offer(items, first=first)
        if self._throttle is not None:
            self._throttle.note_offer({item.route for item in items})

    async def stop(self) -> None:
        self._starting = False
        if self._clock is not None:
            self._clock.cancel()
        ending = self._runners | self._replaced
        for items, _ in self._flights.values():
            for item in items:
                item.cancel.request()
        for runner in ending:
            runner.cancel()
        if ending:
            await asyncio.wait(ending, timeout=_STOP_S)
        self._inside -= sum(len(items) for items, _ in self._flights.values())
        for runner in list(self._flights):
            self._end_flight(runner)
        if self._throttle is not None:
            self._throttle.leave(self)
        self._notify()

    def _wake(self) -> None:
        if not self._starting:
            return
        calls = -(-len(self._ready) // self._chunk)
        wanted = min(calls, self._room)
        if self._throttle is not None and wanted > 0:
            # A runner without a call to make would only park again.
            wanted = min(wanted, self.startable())
        while wanted > 0 and self._idle:
            parked = self._idle.pop()
            if not parked.done():
                parked.set_result(None)
                wanted -= 1
        while wanted > 0 and len(self._runners) < self._concurrency:
            runner = self._loop.create_task(self._run())
            self._runners.add(runner)
            runner.add_done_callback(self._on_runner_end)
            wanted -= 1

    @property
    def _room(self) -> int:
        """Calls that may start now."""
        room = self._concurrency - len(self._flights)
        return room if self._throttle is None else min(room, self._throttle.room(self))

    def _take(self) -> list[Item]:
        taken: list[Item] = []
        if self._starting and self._room > 0:
            while len(taken) < self._chunk and (item := self._ready.pop()) is not None:
                taken.append(item)
                if self._throttle is not None:
                    self._throttle.begin(item.route)
                    break
        return taken

    def _end_flight(self, runner: asyncio.Task[Any]) -> list[Item] | None:
        """Remove a runner's call. Returns its items, None if they are decided already."""
        flight = self._flights.pop(runner, None)
        if flight is None:
            return None
        if self._throttle is not None:
            self._throttle.end(flight[0][0].route, by=self)
        return flight[0]

    async def _run(self) -> None:
        runner = asyncio.current_task()
        if runner is None:
            raise RuntimeError("a runner is a task")
        while True:
            if not self._ready:
                self._notify()
                await self._park()
                continue
            started = monotonic()
            if not self._slice_open:
                self._open_slice(started)
            elif started >= self._slice_end:
                await asyncio.sleep(0)
                continue
            items = self._take()
            self._notify()
            if not items:
                await self._park()
                continue
            self._flights[runner] = (items, started)
            if self._clock is None and self._timeout_s is not None:
                self._clock = self._loop.call_later(self._timeout_s, self._expire)
            try:
                verdicts = await self._call(items)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                # Cancelled by us: go. Otherwise the call let a cancellation of its own escape.
                if isinstance(error, asyncio.CancelledError) and runner.cancelling():
                    raise
                verdicts = [self._judge_crash(item, error, started) for item in items]
            if self._end_flight(runner) is None:
                return
            self._inside -= len(items)
            for item, verdict in zip(items, verdicts, strict=True):
                if self._throttle is not None:
                    self._throttle.note(item.route, verdict)
                self._on_verdict(item, verdict)

    async def _park(self) -> None:
        parked = self._loop.create_future()
        self._idle.append(parked)
        await parked

    def _open_slice(self, now: float) -> None:
        """Let all runners together start calls for `_SLICE_S` in this pass of the loop."""
        self._slice_open = True
        self._slice_end = now + _SLICE_S
        self._loop.call_soon(self._close_slice)  # in the next pass, before any runner that yielded

    def _close_slice(self) -> None:
        self._slice_open = False

    def _on_runner_end(self, runner: asyncio.Task[None]) -> None:
        self._runners.discard(runner)
        if not runner.cancelled() and (error := runner.exception()) is not None:
            self._fail(error)

    def _replace(self, runner: asyncio.Task[Any]) -> None:
        items = self._end_flight(runner) or []
        self._inside -= len(items)
        for item in items:
            item.cancel.request()
        self._runners.discard(runner)
        self._replaced.add(runner)
        runner.add_done_callback(self._replaced.discard)
        runner.cancel()

    def _expire(self) -> None:
        self._clock = None
        if self._timeout_s is None:
            return
        now = monotonic()
        for runner, (items, started) in list(self._flights.items()):
            if started + self._timeout_s > now:
                self._clock = self._loop.call_later(started + self._timeout_s - now, self._expire)
                break
            self._replace(runner)
            duration_ms = int((now - started) * 1000)
            for item in items:
                verdict = judge_timeout(
                    self._timeout_s,
                    item.attempt,
                    limits_for(self._retry, item),
                    self._rng,
                    duration_ms,
                )
                self._on_verdict(item, verdict)
        self._wake()
        self._notify()

    def _judge_crash(self, item: Item, error: BaseException, started: float) -> Verdict:
        duration_ms = int((monotonic() - started) * 1000)
        message = short(f"{type(error).__name__}: {error}")
        failure = Failure("processor_error", message, duration_ms)
        return judge_failure(failure, item.attempt, limits_for(self._retry, item), self._rng)
