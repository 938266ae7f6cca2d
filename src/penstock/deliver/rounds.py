"""A round of deliveries, of whatever kind: take what is due, send it queue by queue, until nothing is.

Each queue's messages go one after the other, those of different queues at once: a slow receiver holds up nobody else.
The first message that does not arrive sends the queue's others back unsent, so that a dead receiver costs one
time-out, however much waits for it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Hashable
from time import monotonic
from typing import Generic, Protocol, TypeVar

from penstock.config import WebhookLimits

_LOOK_AGAIN_S = 1.0


class Delivery(Protocol):
    """A message in our hands."""

    @property
    def attempt(self) -> int: ...

    @property
    def start_before(self) -> float:
        """By this process's own clock: later, somebody else may have it."""


D = TypeVar("D", bound=Delivery)


class Mail(Protocol[D]):
    """One kind of deliveries."""

    async def take(self, limit: int) -> list[D]:
        """At most so many that are due, so that nobody else takes them for a while."""

    def queue_of(self, delivery: D) -> Hashable: ...

    async def deliver(self, delivery: D, wait_s: float) -> bool:
        """Send it and record what came of it, due again after `wait_s` if it must be. Whether anybody answered."""

    async def put_back(self, deliveries: list[D], wait_s: float) -> None:
        """Due again, as if never taken."""


def start_within(limits: WebhookLimits) -> float:
    """How long after it was taken a message may be sent."""
    return 2 * limits.webhook_timeout_s


def hold(limits: WebhookLimits) -> float:
    """Longer than a message waits and takes, so that nothing comes due again in the hands of a living process."""
    return 2 * start_within(limits) + 30


def backoff_s(limits: WebhookLimits, attempt: int) -> float:
    """Doubled each time up to the cap; half of it by chance, so that receivers are not met by a crowd."""
    longest_s = min(limits.webhook_retry_cap_s, limits.webhook_retry_base_s * 2.0 ** min(attempt - 1, 60))
    return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 -- spreads load, guards nothing


async def deliver_all(mail: Mail[D], limits: WebhookLimits) -> int:
    """Send what is due, and what comes due meanwhile, until nothing is. Returns how many were taken."""
    round_ = _Round(mail, limits)
    try:
        return await round_.run()
    finally:
        await round_.stop()


class _Round(Generic[D]):
    def __init__(self, mail: Mail[D], limits: WebhookLimits) -> None:
        self._mail = mail
        self._limits = limits
        self._queues: dict[Hashable, deque[D]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def run(self) -> int:
        total = 0
        while True:
            room = self._limits.webhook_batch - sum(map(len, self._queues.values()))
            taken = await self._mail.take(room) if room > 0 and not self._failure else []
            for delivery in taken:
                self._queue(delivery)
            total += len(taken)
            if not self._tasks:
                break
            # With nothing more to take, wait for news; every so often there may be something new.
            await self._some_end(0.0 if taken and len(taken) == room else _LOOK_AGAIN_S)
        if self._failure is not None:
            raise self._failure
        return total

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _queue(self, delivery: D) -> None:
        key = self._mail.queue_of(delivery)
        if (queue := self._queues.get(key)) is not None:
            queue.append(delivery)
            return
        self._queues[key] = deque([delivery])
        self._tasks.add(asyncio.create_task(self._serve(key)))

    async def _some_end(self, patience_s: float) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # The others go on to their end: what was sent and is not recorded would be sent again.
            self._failure = task.exception() or self._failure

    async def _serve(self, key: Hashable) -> None:
        """One queue's messages, in turn."""
        queue = self._queues[key]
        try:
            while queue:
                # It counts as held, and blocks its successors, until its result is recorded.
                delivery = queue[0]
                if monotonic() > delivery.start_before:
                    await self._put_back(queue, 0)
                    return
                wait_s = backoff_s(self._limits, delivery.attempt)
                reached = await self._mail.deliver(delivery, wait_s)
                queue.popleft()
                if not reached and queue:
                    await self._put_back(queue, wait_s)
        finally:
            del self._queues[key]

    async def _put_back(self, queue: deque[D], wait_s: float) -> None:
        await self._mail.put_back(list(queue), wait_s)
        queue.clear()
