"""Several dispatchers, one limit: never more calls than that, and the first among them goes first."""

from __future__ import annotations

import asyncio
from time import monotonic
from uuid import uuid4

import pytest

from penstock.config import RetryLimits
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.dispatch.throttle import Callers, Route, Throttle
from penstock.model import Halt, Item, Lease, Outcome, OutcomeState, Verdict


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


def test_each_route_has_its_own_share(calls: Calls) -> None:
    async def scenario() -> None:
        first, _, throttle = dispatchers(calls, 10)
        await first.start(calls.sink)
        throttle.set_share("a", 1, None)
        throttle.set_share("b", 3, None)
        first.offer(items("a", 3) + items("b", 5))
        await passes()
        assert set(calls.running) == {"a0", "b0", "b1", "b2"}
        await calls.end("a0")
        assert set(calls.running) == {"a1", "b0", "b1", "b2"}
        throttle.set_share("a", 2, None)
        throttle.nudge()
        await passes()
        assert set(calls.running) == {"a1", "a2", "b0", "b1", "b2"}
        assert throttle.wanted("b") == 5
        await first.stop()

    asyncio.run(scenario())


def test_the_rate_that_calls_wait_for_is_told(calls: Calls) -> None:
    async def scenario() -> None:
        first, _, throttle = dispatchers(calls, 10)
        await first.start(calls.sink)
        throttle.set_share("a", 1, None)
        throttle.set_share("b", 5, 0.5)
        first.offer(items("a", 3))
        await passes()
        told = [throttle.paced_per_s]  # they wait for the share
        first.offer(items("b", 3))
        await passes()
        assert set(calls.running) == {"a0", "b0"}
        told.append(throttle.paced_per_s)
        throttle.set_share("b", 1, 0.5)
        told.append(throttle.paced_per_s)  # with no slot, the rate is not what is in the way
        assert told == [None, 0.5, None]
        first.take_back()
        await calls.end("a0")
        await calls.end("b0")
        await first.stop()
        throttle.close()

    asyncio.run(scenario())


def test_a_rate_that_is_known_holds_from_the_first_call(calls: Calls) -> None:
    async def scenario() -> None:
        throttle = Throttle(10, start_per_s=0.1)
        dispatcher = CoroutineDispatcher(each(calls.call), 10, RetryLimits(), throttle=throttle)
        await dispatcher.start(calls.sink)
        dispatcher.offer(items("a", 3))
        await passes()
        assert set(calls.running) == {"a0"}
        dispatcher.take_back()
        await calls.end("a0")
        await dispatcher.stop()
        throttle.close()

    asyncio.run(scenario())


def test_a_paced_route_saves_nothing_up_behind_a_closed_gate() -> None:
    route, now = Route(100), monotonic()
    route.set_rate(10.0, now)
    route.hold(now + 5)
    assert route.wait_s(now + 1) == pytest.approx(4)
    assert route.wait_s(now + 5) == 0
    route.begin(now + 5)
    assert route.wait_s(now + 5) == pytest.approx(0.1, abs=1e-3)
    assert route.wait_s(now + 5.06) == pytest.approx(0.04, abs=1e-3)


def test_after_a_halt_one_call_at_a_time_until_one_succeeds(calls: Calls) -> None:
    async def scenario() -> None:
        first, _, throttle = dispatchers(calls, 10)
        await first.start(calls.sink)
        throttle.note("a", Halt("invalid_api_key", "no", 401))
        first.offer(items("a", 4))
        await passes()
        assert set(calls.running) == {"a0"}
        await calls.end("a0")
        assert set(calls.running) == {"a1", "a2", "a3"}
        await first.stop()

    asyncio.run(scenario())


def test_callers_go_before_dispatchers_and_give_up_in_time(calls: Calls) -> None:
    async def scenario() -> None:
        first, _, throttle = dispatchers(calls, 1)
        await first.start(calls.sink)
        callers = Callers(throttle)
        first.offer(items("a", 2))
        await passes()
        waiting = asyncio.create_task(callers.take("a", 30.0))
        with pytest.raises(TimeoutError):
            await callers.take("a", 0.0)
        await calls.end("a0")
        await waiting
        assert (set(calls.running), throttle.in_flight) == (set(), 1)
        callers.free("a")
        await passes()
        assert set(calls.running) == {"a1"}
        await first.stop()

    asyncio.run(scenario())


def test_models_that_are_only_named_are_forgotten() -> None:
    throttle = Throttle(10)
    throttle.begin("busy")
    for number in range(5_000):
        throttle.route(f"named {number}")
    assert len(throttle.routes) <= 1_000
    throttle.end("busy")
    assert throttle.routes["busy"].in_flight == 0


def test_an_end_wakes_no_more_runners_than_may_call(calls: Calls) -> None:
    async def scenario() -> None:
        first, _, throttle = dispatchers(calls, 10)
        throttle.set_share("a", 2, None)
        taken = 0
        take = first._take

        def count_takes() -> list[Item]:
            nonlocal taken
            taken += 1
            return take()

        first._take = count_takes  # type: ignore[method-assign]
        await first.start(calls.sink)
        first.offer(items("a", 9))
        await passes()
        for number in range(7):
            await calls.end(f"a{number}")
        await passes()
        assert set(calls.running) == {"a7", "a8"}
        assert taken <= 11
        await first.stop()

    asyncio.run(scenario())
