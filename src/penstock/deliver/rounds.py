"""Rounds of deliveries, webhooks or sinks: take what is due, send it queue by queue, until nothing is due.

Each queue's messages go one after the other, those of different queues at once: a slow receiver holds up no other.
The first message that does not arrive sends the queue's others back unsent, so that a dead receiver costs one
time-out, however many messages wait for it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

from penstock.backoff import doubled, jittered
from penstock.config import WebhookLimits
from penstock.db import sql
from penstock.db.pool import Pool, borrowed

_SQL = sql.load("penstock.deliver", "deliver.sql")

_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class TakenDelivery:
    """Delivery taken by this process. The columns of webhooks or sinks come after these."""

    taken_at: float
    """By this process's own clock, as is the next."""
    start_before: float
    """Sending must have begun by then: later, another process may take the delivery."""
    id: int
    event_id: UUID
    event_at: datetime
    attempt: int
    taken_at_s: float
    """Time of taking by the database's clock: receivers refuse messages whose time is far from theirs."""

    @property
    def now_s(self) -> int:
        return int(self.taken_at_s + monotonic() - self.taken_at)


@dataclass(frozen=True, slots=True)
class SendResult:
    """Receiver's answer to a message: its status, and the error if it was not delivered."""

    status_code: int | None
    error: str | None

    @property
    def delivered(self) -> bool:
        return self.error is None


D = TypeVar("D", bound=TakenDelivery)


class DeliveryTable(ABC, Generic[D]):
    """Table of deliveries, of webhooks or of sinks. Each has statements of its own, with these names and the same
    values."""

    take_if_due: ClassVar[str]
    record_if_held: ClassVar[str]
    put_back_if_held: ClassVar[str]

    def __init__(self, database: Pool, limits: WebhookLimits) -> None:
        self.database = database
        self.limits = limits

    @abstractmethod
    async def take(self, limit: int) -> list[D]:
        """Take at most `limit` due deliveries: no other process takes them for `hold_s`."""

    @abstractmethod
    def queue_of(self, delivery: D) -> Hashable: ...

    @abstractmethod
    async def deliver(self, delivery: D, wait_s: float) -> bool:
        """Send a delivery and record the result; it is due again after `wait_s` if it did not arrive. Returns whether
        the receiver answered."""

    async def take_as(self, kind: type[D], values: dict[str, Any]) -> list[D]:
        begun = monotonic()
        values = {**values, "hold_s": hold_s(self.limits)}
        async with borrowed(self.database) as connection:
            cursor = await connection.execute(_SQL[self.take_if_due], values)
            return [kind(begun, begun + start_within_s(self.limits), *row) for row in await cursor.fetchall()]

    async def record(self, delivery: D, result: SendResult, wait_s: float, *, final: bool) -> None:
        """Record the result of an attempt; after a `final` one there is no other."""
        values = {
            "id": delivery.id,
            "attempt": delivery.attempt,
            "delivered": result.delivered,
            "final": final,
            "status_code": result.status_code,
            "error": result.error,
            "wait_s": wait_s,
            "give_up_s": self.limits.webhook_give_up_s,
        }
        async with borrowed(self.database) as connection:
            await connection.execute(_SQL[self.record_if_held], values)

    async def put_back(self, deliveries: list[D], wait_s: float) -> None:
        """Put deliveries back, due again after `wait_s` as if never taken."""
        ids, attempts = [each.id for each in deliveries], [each.attempt for each in deliveries]
        values = {"ids": ids, "attempts": attempts, "wait_s": wait_s}
        async with borrowed(self.database) as connection:
            await connection.execute(_SQL[self.put_back_if_held], values)


def start_within_s(limits: WebhookLimits) -> float:
    """Seconds after it was taken in which sending a delivery may begin."""
    return 2 * limits.webhook_timeout_s


def hold_s(limits: WebhookLimits) -> float:
    """Seconds for which a taken delivery is not due: longer than it waits and takes to be sent, so that none comes due
    again while a living process has it."""
    return 2 * start_within_s(limits) + 30


def backoff_s(limits: WebhookLimits, attempt: int) -> float:
    """Seconds until the next attempt: doubled each time up to the cap, half of it random, so that retries do not come
    all at once."""
    return jittered(doubled(limits.webhook_retry_base_s, limits.webhook_retry_cap_s, attempt))


async def deliver_all(table: DeliveryTable[D]) -> int:
    """Send the deliveries that are due or come due meanwhile, until none is. Returns how many were taken."""
    round_ = _Round(table)
    try:
        return await round_.run()
    finally:
        await round_.stop()


class _Round(Generic[D]):
    def __init__(self, table: DeliveryTable[D]) -> None:
        self._table = table
        self._queues: dict[Hashable, deque[D]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    async def run(self) -> int:
        total = 0
        while True:
            room = self._table.limits.webhook_batch - sum(map(len, self._queues.values()))
            taken = await self._table.take(room) if room > 0 and not self._failure else []
            for delivery in taken:
                self._queue(delivery)
            total += len(taken)
            if not self._tasks:
                break
            # With nothing more to take, wait until a queue is done; more may have come due after `_POLL_S`.
            await self._wait_for_queues(0.0 if taken and len(taken) == room else _POLL_S)
        if self._failure is not None:
            raise self._failure
        return total

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _queue(self, delivery: D) -> None:
        key = self._table.queue_of(delivery)
        if (queue := self._queues.get(key)) is not None:
            queue.append(delivery)
            return
        self._queues[key] = deque([delivery])
        self._tasks.add(asyncio.create_task(self._serve(key)))

    async def _wait_for_queues(self, timeout_s: float) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            # The others go on to their end: a message that was sent but not recorded would be sent again.
            self._failure = task.exception() or self._failure

    async def _serve(self, key: Hashable) -> None:
        """Send one queue's messages, one after the other."""
        queue = self._queues[key]
        try:
            while queue:
                # It stays in the queue, and blocks its successors, until its result is recorded.
                delivery = queue[0]
                if monotonic() > delivery.start_before:
                    await self._put_back(queue, 0)
                    return
                wait_s = backoff_s(self._table.limits, delivery.attempt)
                reached = await self._table.deliver(delivery, wait_s)
                queue.popleft()
                if not reached and queue:
                    await self._put_back(queue, wait_s)
        finally:
            del self._queues[key]

    async def _put_back(self, queue: deque[D], wait_s: float) -> None:
        await self._table.put_back(list(queue), wait_s)
        queue.clear()
