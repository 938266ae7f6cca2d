"""Several dispatchers, one limit: never more calls than that, and the first among them goes first."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from penstock.config import RetryLimits
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.dispatch.throttle import Throttle
from penstock.model import Item, Lease, Outcome, OutcomeState, Verdict


def items(name: str, count: int) -> list[Item]:
    lease = Lease(1, 1, 1, uuid4(), name, "/v1", 1, 0, 1, ((0, count),))
    return [Item(lease, number, number + 1, f"{name}{number}", b"{}") for number in range(count)]


class Calls:
    """Calls that end when they are told to."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[None]] = {}
        self.most = 0
        self.order: list[str] = []
        self.settled: list[str] = []

    async def call(self, item: Item) -> Verdict:
        self.order.append(item.custom_id)
        self.running[item.custom_id] = asyncio.get_running_loop().create_future()
        self.most = max(self.most, len(self.running))
        try:
            await self.running[item.custom_id]
        finally:
            del self.running[item.custom_id]
        return Outcome(OutcomeState.COMPLETED, b"{}")

    def sink(self, item: Item, verdict: Verdict) -> None:
        assert isinstance(verdict, Outcome)
        self.settled.append(item.custom_id)

    async def end(self, custom_id: str) -> None:
        self.running[custom_id].set_result(None)
        for _ in range(5):  # passes of the loop: the call ends, its runner goes on, others wake
            await asyncio.sleep(0)


@pytest.fixture
def calls() -> Calls:
    return Calls()


def dispatchers(calls: Calls, capacity: int) -> tuple[CoroutineDispatcher, CoroutineDispatcher, Throttle]:
    throttle = Throttle(capacity)
    first, second = (
        CoroutineDispatcher(each(calls.call), capacity, RetryLimits(), throttle=throttle) for _ in range(2)
    )
    return first, second, throttle


async def passes() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_the_first_goes_first_and_the_limit_holds(calls: Calls) -> None:
    async def scenario() -> None:
        sessions, batches, throttle = dispatchers(calls, 2)
        await sessions.start(calls.sink)
        await batches.start(calls.sink)
        batches.offer(items("b", 4))
        await passes()
        assert set(calls.running) == {"b0", "b1"}
        sessions.offer(items("s", 3))
        await passes()
        assert set(calls.running) == {"b0", "b1"}  # nobody is interrupted
        await calls.end("b0")
        await calls.end("b1")
        assert set(calls.running) == {"s0", "s1"}
        await calls.end("s0")
        await calls.end("s1")
        assert set(calls.running) == {"s2", "b2"}
        for name in ("s2", "b2", "b3"):
            await calls.end(name)
        assert (calls.most, throttle.in_flight) == (2, 0)
        assert sorted(calls.settled) == ["b0", "b1", "b2", "b3", "s0", "s1", "s2"]
        await sessions.stop()
        await batches.stop()

    asyncio.run(scenario())


def test_what_leaves_otherwise_frees_its_slot_too(calls: Calls) -> None:
    async def scenario() -> None:
        sessions, batches, throttle = dispatchers(calls, 1)
        await sessions.start(calls.sink)
        await batches.start(calls.sink)
        sessions.offer(items("s", 2))
        batches.offer(items("b", 2))
        await passes()
        assert set(calls.running) == {"s0"}
        # What waits is taken back: its claim on the next slot goes with it.
        assert [item.custom_id for item in sessions.take_back()] == ["s1"]
        assert [item.custom_id for item in sessions.abort()] == ["s0"]
        await passes()
        assert set(calls.running) == {"b0"}
        # Items of a held route leave the slot to the others.
        sessions.hold("s", 60)
        sessions.offer(items("s", 1))
        await calls.end("b0")
        await passes()
        assert set(calls.running) == {"b1"}
        await calls.end("b1")
        assert throttle.in_flight == 0
        sessions.take_back()
        await sessions.stop()
        await batches.stop()

    asyncio.run(scenario())
