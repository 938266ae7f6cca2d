"""Python functions as processors: found, called, judged, and kept in order by their dispatchers."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch import threads as threads_module
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.loading import load_processor
from penstock.dispatch.python import PythonProcessor, chunk_size_of
from penstock.dispatch.signals import Fail, NotFound, Retry, Skip, chunk
from penstock.errors import PenstockError, UsageError
from penstock.model import Again, Item, Outcome, OutcomeState, Verdict
from tests.support.items import make_item, make_items

RETRY = RetryLimits()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await coroutine

    asyncio.run(bounded())


class Desk:
    """A started dispatcher and what its sink has had."""

    def __init__(self, fn: Callable[..., Any], concurrency: int = 4, timeout_s: float = 20) -> None:
        limits = DispatchLimits(concurrency=concurrency, attempt_timeout_s=timeout_s)
        self.dispatcher: Dispatcher = PythonProcessor(fn, limits, RETRY).dispatcher()
        self.results: list[tuple[Item, Verdict]] = []
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Desk:
        await self.dispatcher.start(self._sink)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dispatcher.stop()

    def _sink(self, item: Item, verdict: Verdict) -> None:
        self.results.append((item, verdict))
        self.changed.set()

    @property
    def lines(self) -> list[int]:
        return [item.line for item, _ in self.results]

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.01)


def verdicts(fn: Callable[..., Any], items: Sequence[Item]) -> list[Verdict]:
    found: list[Verdict] = []

    async def scenario() -> None:
        async with Desk(fn) as desk:
            desk.dispatcher.offer(items)
            await desk.dispatcher.wait_idle()
            order = {id(item): place for place, item in enumerate(items)}
            assert len(desk.results) == len(items)
            found.extend(v for _, v in sorted(desk.results, key=lambda pair: order[id(pair[0])]))

    run(scenario())
    return found


def verdict(fn: Callable[..., Any], attempt: int = 1) -> Verdict:
    return verdicts(fn, [make_item(b'{"a": 1}', attempt=attempt)])[0]


def both(fn: Callable[[Item], Any]) -> list[Callable[..., Any]]:
    """The function as it is, and as a coroutine function."""

    async def later(item: Item) -> Any:
        await asyncio.sleep(0)
        return fn(item)

    return [fn, later]


@dataclass
class Answered:
    when: datetime
    tags: list[str]


class TestResults:
    @pytest.mark.parametrize(
        ("value", "body"),
        [
            ({"a": 1}, b'{"a":1}'),
            (None, b"null"),
            ("text", b'"text"'),
            ([1, 2.5], b"[1,2.5]"),
            (b' {"raw":  1} ', b' {"raw":  1} '),
            (Answered(datetime(2026, 1, 2, tzinfo=UTC), ["x"]), b'{"when":"2026-01-02T00:00:00Z","tags":["x"]}'),
        ],
    )
    def test_a_value_becomes_the_body(self, value: object, body: bytes) -> None:
        for fn in both(lambda _: value):
            outcome = verdict(fn)
            assert isinstance(outcome, Outcome)
            assert (outcome.state, outcome.body, outcome.error_code) == (OutcomeState.COMPLETED, body, None)

    def test_the_item_is_what_was_stored(self) -> None:
        for fn in both(lambda item: [item.body, item.custom_id, item.attempt]):
            outcome = verdict(fn, attempt=3)
            assert isinstance(outcome, Outcome)
            assert outcome.body == b'[{"a":1},"id-1",3]'

    @pytest.mark.parametrize(
        "value",
        [object(), b"not json", b"\xff", {1: {2, 3}, "x": object()}, math.nan, {"a": [None, -math.inf]}, b"NaN"],
    )
    def test_what_cannot_be_encoded_fails_for_good(self, value: object) -> None:
        for fn in both(lambda _: value):
            outcome = verdict(fn)
            assert isinstance(outcome, Outcome)
            assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "invalid_response")
            assert "returned" in (outcome.error_message or "")

    def test_a_forgotten_async_is_named(self) -> None:
        async def inner() -> int:
            return 1

        outcome = verdict(lambda _: inner())
        assert isinstance(outcome, Outcome)
        assert "async def" in (outcome.error_message or "")

    def test_an_exception_is_worth_another_try(self) -> None:
        def broken(_: Item) -> None:
            raise ValueError("no\nway")

        for fn in both(broken):
            first = verdict(fn)
            assert isinstance(first, Again)
            assert (first.error_code, first.counts) == ("processor_error", True)
            assert first.error_message.startswith("ValueError: no way (test_python_processor.py, line ")
            last = verdict(fn, attempt=RETRY.max_attempts)
            assert isinstance(last, Outcome)
            assert (last.state, last.error_code) == (OutcomeState.FAILED, "processor_error")

    @pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), MemoryError()])
    def test_nothing_a_function_raises_ends_the_runner(self, error: BaseException) -> None:
        def broken(item: Item) -> int:
            if item.line == 1:
                raise error
            return item.line

        for fn in both(broken):
            first, second = verdicts(fn, make_items(2))
            assert isinstance(first, Again)
            assert isinstance(second, Outcome)


class TestSignals:
    def test_retry(self) -> None:
        def wait(_: Item) -> None:
            raise Retry("not yet", after=12.5)

        for fn in both(wait):
            found = verdict(fn)
            assert isinstance(found, Again)
            assert (found.error_message, found.delay_s, found.counts) == ("not yet", 12.5, True)
            assert isinstance(verdict(fn, attempt=RETRY.max_attempts), Outcome)

    @pytest.mark.parametrize(("after", "delay_s"), [(-5, 0), (1e12, RETRY.retry_after_max_s)])
    def test_retry_is_bounded(self, after: float, delay_s: float) -> None:
        found = verdict(lambda _: Retry(after=after))
        assert isinstance(found, Again)
        assert found.delay_s == delay_s

    def test_fail(self) -> None:
        def refuse(_: Item) -> None:
            raise Fail("never", code="too_old")

        for fn in both(refuse):
            found = verdict(fn)
            assert isinstance(found, Outcome)
            assert (found.state, found.error_code) == (OutcomeState.FAILED, "too_old")
            assert found.error_message == "never"

    @pytest.mark.parametrize(
        ("signal", "text"),
        [(Fail(ValueError("x")), "x"), (Fail(123), "123"), (Fail(None), "None")],
        ids=["error", "number", "none"],
    )
    def test_what_is_given_as_a_message_is_taken_as_text(self, signal: Fail, text: str) -> None:
        def refuse(_: Item) -> None:
            raise signal

        for fn in both(refuse):
            found = verdict(fn)
            assert isinstance(found, Outcome)
            assert (found.state, found.error_message) == (OutcomeState.FAILED, text)

    def test_after_takes_a_timedelta_and_nothing_odd(self) -> None:
        found = verdict(lambda _: Retry(after=timedelta(minutes=2)))
        assert isinstance(found, Again)
        assert found.delay_s == 120

        def odd(_: Item) -> None:
            raise Retry(after="soon")  # type: ignore[arg-type]

        for fn in both(odd):
            found = verdict(fn)
            assert isinstance(found, Again)
            assert found.error_code == "processor_error"
            assert "takes seconds or a timedelta" in found.error_message

    def test_an_exception_that_cannot_say_what_it_is_costs_one_attempt(self) -> None:
        class MuteError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        def mute(_: Item) -> None:
            raise MuteError

        for fn in both(mute):
            found = verdict(fn)
            assert isinstance(found, Again)
            assert found.error_message.startswith("MuteError")

    def test_not_found_is_tried_sparingly(self) -> None:
        def seek(_: Item) -> None:
            raise NotFound("nobody")

        for fn in both(seek):
            assert isinstance(verdict(fn), Again)
            found = verdict(fn, attempt=RETRY.max_attempts_not_found)
            assert isinstance(found, Outcome)
            assert (found.state, found.error_message) == (OutcomeState.NOT_FOUND, "nobody")

    def test_skip(self) -> None:
        def leave(_: Item) -> None:
            raise Skip

        for fn in both(leave):
            found = verdict(fn)
            assert isinstance(found, Outcome)
            assert found.state is OutcomeState.SKIPPED


class TestChunks:
    def test_take_a_list_and_answer_one_by_one(self) -> None:
        sizes: list[int] = []

        @chunk(10)
        def several(items: list[Item]) -> list[object]:
            sizes.append(len(items))
            return [Skip("odd") if item.line % 2 else item.line for item in items]

        @chunk(10)
        async def several_later(items: list[Item]) -> list[object]:
            await asyncio.sleep(0)
            return several(items)

        for fn in (several, several_later):
            sizes.clear()
            found = verdicts(fn, make_items(25))
            assert sum(sizes) == 25
            assert max(sizes) == 10
            for line, outcome in enumerate(found, start=1):
                assert isinstance(outcome, Outcome)
                assert outcome.state is (OutcomeState.SKIPPED if line % 2 else OutcomeState.COMPLETED)

    def test_an_exception_concerns_all_of_them(self) -> None:
        @chunk(5)
        def broken(_: list[Item]) -> list[object]:
            raise KeyError("x")

        assert all(isinstance(found, Again) for found in verdicts(broken, make_items(5)))

    @pytest.mark.parametrize("value", [[1], [1] * 6, None, "four!", {1: 1}, (n for n in range(5))])
    def test_another_number_of_results_is_an_error(self, value: object) -> None:
        @chunk(5)
        def wrong(items: list[Item]) -> object:
            return value if len(items) == 5 else [1] * len(items)

        for found in verdicts(wrong, make_items(5)):
            assert isinstance(found, Outcome)
            assert found.error_code == "invalid_response"
            assert "5 items" in (found.error_message or "")

    def test_are_known_by_their_annotation(self) -> None:
        def plain(item: Item) -> None: ...

        def annotated(items: list[Item]) -> None: ...

        def unresolvable(items: list[penstock.Item]) -> None: ...  # type: ignore[name-defined]  # noqa: F821

        @chunk(7)
        def marked(items) -> None: ...  # type: ignore[no-untyped-def]

        def evaluated(items) -> None: ...  # type: ignore[no-untyped-def]

        evaluated.__annotations__["items"] = list[Item]
        assert [chunk_size_of(fn) for fn in (plain, annotated, unresolvable, marked, evaluated, print)] == [
            None,
            100,
            100,
            7,
            100,
            None,
        ]

    @pytest.mark.parametrize("size", [0, -1, 10**9])
    def test_a_size_out_of_range_is_refused(self, size: int) -> None:
        with pytest.raises(ValueError, match="chunk size"):
            chunk(size)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


class TestLoading:
    def test_finds_a_function_in_the_working_directory(self, folder: Path) -> None:
        (folder / "my_rows.py").write_text("def clean(item): return 7\nclass Box:\n  def each(item): return 8")
        assert load_processor("my_rows:clean")(None) == 7
        assert load_processor("my_rows:Box.each")(None) == 8

    @pytest.mark.parametrize(
        ("spec", "message", "hint"),
        [
            ("my_rows", "not of the form module:function", "rows:clean"),
            (":clean", "not of the form", "rows:clean"),
            ("my_rows:", "not of the form", "rows:clean"),
            ("my_rows.py:clean", "is a path", "my_rows:clean"),
            ("no_such_rows:clean", "no module 'no_such_rows'", "looked for in"),
            ("no.such.rows:clean", "no module 'no.such.rows'", "looked for in"),
            ("my_rows:claen", "has no 'claen'", "Did you mean clean"),
            ("my_rows:zzz", "has no 'zzz'", "clean"),
            ("my_rows:LIMIT", "of type int, not a function", "takes an item"),
        ],
    )
    def test_says_what_is_wrong(self, folder: Path, spec: str, message: str, hint: str) -> None:
        (folder / "my_rows.py").write_text("LIMIT = 3\ndef clean(item): return 7\n")
        with pytest.raises(UsageError) as caught:
            load_processor(spec)
        assert message in caught.value.message
        assert hint in (caught.value.hint or "")

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("import json\n\nimport no_such_thing\n", "broken_rows.py, line 3: import no_such_thing"),
            ("def f(:\n", "broken_rows.py, line 1: def f(:"),
            ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero (broken_rows.py, line 2: 1 / 0)"),
            ("import sys\nsys.exit(5)\n", "SystemExit: 5 (broken_rows.py, line 2: sys.exit(5))"),
        ],
    )
    def test_shows_the_line_that_failed(self, folder: Path, source: str, message: str) -> None:
        (folder / "broken_rows.py").write_text(source)
        with pytest.raises(UsageError) as caught:
            load_processor("broken_rows:f")
        assert message in caught.value.message


class TestDispatchers:
    """The same promises for both kinds: a function that waits on threads, and one that awaits."""

    @staticmethod
    def waiting_on(opened: threading.Event, started: list[int]) -> list[Callable[..., Any]]:
        def wait(item: Item) -> int:
            started.append(item.line)
            assert opened.wait(20)
            return item.line

        async def wait_async(item: Item) -> int:
            started.append(item.line)
            while not opened.is_set():
                await asyncio.sleep(0.001)
            return item.line

        return [wait, wait_async]

    def each_kind(self, scenario: Callable[[Desk, threading.Event, list[int]], Any], concurrency: int = 4) -> None:
        for kind in (0, 1):
            opened, started = threading.Event(), list[int]()
            fn = self.waiting_on(opened, started)[kind]

            async def one(fn: Any = fn, opened: Any = opened, started: Any = started) -> None:
                async with Desk(fn, concurrency) as desk:
                    try:
                        await scenario(desk, opened, started)
                    finally:
                        opened.set()

            run(one())

    def test_run_as_many_as_allowed_and_no_more(self) -> None:
        async def scenario(desk: Desk, opened: threading.Event, started: list[int]) -> None:
            desk.dispatcher.offer(make_items(10))
            await desk.until(lambda: len(started) == 4)
            assert (desk.dispatcher.in_flight, desk.dispatcher.waiting) == (4, 6)
            assert sorted(started) == [1, 2, 3, 4]
            opened.set()
            await desk.dispatcher.wait_idle()
            assert (desk.dispatcher.in_flight, desk.dispatcher.waiting) == (0, 0)
            assert sorted(desk.lines) == list(range(1, 11))

        self.each_kind(scenario)

    def test_begin_with_what_comes_first(self) -> None:
        async def scenario(desk: Desk, opened: threading.Event, started: list[int]) -> None:
            desk.dispatcher.offer(make_items(8))
            await desk.until(lambda: len(started) == 4)
            desk.dispatcher.offer([make_item(line=50), make_item(line=51)], first=True)
            assert [item.line for item in desk.dispatcher.take_back()] == [50, 51, 5, 6, 7, 8]
            opened.set()
            await desk.dispatcher.wait_idle()

        self.each_kind(scenario)

    def test_give_back_what_has_not_started(self) -> None:
        async def scenario(desk: Desk, opened: threading.Event, started: list[int]) -> None:
            desk.dispatcher.offer(make_items(10, "a"))
            await desk.until(lambda: len(started) == 4)
            desk.dispatcher.offer(make_items(3, "b"))
            assert [item.route for item in desk.dispatcher.take_back("b")] == ["b"] * 3
            assert sorted(item.line for item in desk.dispatcher.take_back()) == list(range(5, 11))
            opened.set()
            await desk.dispatcher.wait_idle()
            assert sorted(desk.lines) == [1, 2, 3, 4]

        self.each_kind(scenario)

    def test_abort_returns_the_items_and_drops_late_results(self) -> None:
        async def scenario(desk: Desk, opened: threading.Event, started: list[int]) -> None:
            desk.dispatcher.offer(make_items(3))
            await desk.until(lambda: len(started) == 3)
            assert sorted(item.line for item in desk.dispatcher.abort()) == [1, 2, 3]
            assert desk.dispatcher.in_flight == 0
            opened.set()
            desk.dispatcher.offer([make_item(line=50)])
            await desk.dispatcher.wait_idle()
            assert desk.lines == [50]

        self.each_kind(scenario)

    def test_stop_and_resume_starting(self) -> None:
        async def scenario(desk: Desk, opened: threading.Event, started: list[int]) -> None:
            desk.dispatcher.offer(make_items(10))
            await desk.until(lambda: len(started) == 4)
            desk.dispatcher.stop_starting()
            opened.set()
            await desk.dispatcher.wait_idle()
            assert (len(desk.results), desk.dispatcher.waiting, len(started)) == (4, 6, 4)
            desk.dispatcher.resume_starting()
            await desk.dispatcher.wait_idle()
            assert sorted(desk.lines) == list(range(1, 11))

        self.each_kind(scenario)

    def test_room_is_made_as_items_start(self) -> None:
        async def scenario(desk: Desk, _: threading.Event, started: list[int]) -> None:
            desk.dispatcher.low_water = 7
            desk.dispatcher.stop_starting()
            desk.dispatcher.offer(make_items(10))
            room = asyncio.create_task(desk.dispatcher.wait_room())
            await asyncio.sleep(0)
            assert not room.done()
            desk.dispatcher.resume_starting()
            await room  # starting is enough: none of the calls has ended
            await desk.until(lambda: len(started) == 4)  # a thread takes its item a moment before it calls
            assert (desk.dispatcher.waiting, len(desk.results)) == (6, 0)

        self.each_kind(scenario)

    def test_a_held_route_waits_and_the_others_go_on(self) -> None:
        async def scenario(desk: Desk, opened: threading.Event, _: list[int]) -> None:
            opened.set()
            desk.dispatcher.hold("a", 60)
            desk.dispatcher.offer([*make_items(3, "a"), *make_items(5, "b"), make_item(line=4, route="a")])
            await desk.until(lambda: len(desk.results) == 5)
            assert {item.route for item, _ in desk.results} == {"b"}
            assert desk.dispatcher.waiting == 4
            held_until = time.monotonic() + 0.2
            desk.dispatcher.hold("c", 0.2)
            desk.dispatcher.hold("c", 0.01)
            desk.dispatcher.offer(make_items(4, "c"))
            await desk.until(lambda: len(desk.results) == 9)
            assert time.monotonic() >= held_until
            assert sorted(desk.lines[5:]) == [1, 2, 3, 4]
            assert len(desk.dispatcher.take_back("a")) == 4

        self.each_kind(scenario)

    def test_held_items_can_be_taken_back(self) -> None:
        async def scenario(desk: Desk, opened: threading.Event, _: list[int]) -> None:
            opened.set()
            desk.dispatcher.hold("a", 60)
            desk.dispatcher.offer(make_items(3, "a") + make_items(5, "b"))
            await desk.dispatcher.wait_idle()
            assert [item.line for item in desk.dispatcher.take_back()] == [1, 2, 3]
            assert desk.dispatcher.waiting == 0

        self.each_kind(scenario)

    def test_a_call_past_its_time_is_decided_without_it(self) -> None:
        for kind in (0, 1):
            opened, started = threading.Event(), list[int]()
            fn = self.waiting_on(opened, started)[kind]

            async def scenario(fn: Any = fn, opened: Any = opened) -> None:
                async with Desk(fn, concurrency=2, timeout_s=0.1) as desk:
                    desk.dispatcher.offer([make_item()])
                    await desk.dispatcher.wait_idle()
                    late = desk.results[0][1]
                    assert isinstance(late, Again)
                    assert (late.error_code, late.counts) == ("request_timeout", True)
                    assert late.duration_ms >= 100
                    opened.set()
                    desk.dispatcher.offer([make_item(line=2)])
                    await desk.dispatcher.wait_idle()
                    assert desk.lines == [1, 2]

            run(scenario())

    def test_every_item_leaves_exactly_once(self) -> None:
        """Offers, take-backs, aborts, holds and pauses in any order, over functions of uneven length."""

        def uneven(item: Item) -> int:
            if item.line % 7 == 0:
                time.sleep(0.002)
            return item.line

        async def uneven_async(item: Item) -> int:
            if item.line % 7 == 0:
                await asyncio.sleep(0.002)
            return item.line

        for fn in (uneven, uneven_async):

            async def scenario(fn: Any = fn) -> None:
                rng = random.Random(5)
                left: Counter[int] = Counter()
                async with Desk(fn, concurrency=8) as desk:
                    items = [make_item(line=n, route=f"r{n % 3}") for n in range(5_000)]
                    for start in range(0, len(items), 100):
                        # Aborted calls run on in their threads. Once there are as many as places, nothing is taken in.
                        await desk.until(partial(_taken, desk, items[start : start + 100]))
                        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.005]))
                        again: list[Item] = []
                        match rng.randrange(6):
                            case 0:
                                again = desk.dispatcher.take_back()
                            case 1:
                                again = desk.dispatcher.take_back("r1")
                            case 2:
                                again = desk.dispatcher.abort()
                            case 3:
                                desk.dispatcher.hold(f"r{rng.randrange(3)}", 0.003)
                            case 4:
                                desk.dispatcher.stop_starting()
                                await desk.dispatcher.wait_idle()
                                assert desk.dispatcher.in_flight == 0
                                desk.dispatcher.resume_starting()
                        left.update(item.line for item in again)
                    await desk.until(lambda: desk.dispatcher.waiting + desk.dispatcher.in_flight == 0)
                    left.update(desk.lines)
                    assert len(left) == 5_000
                    assert set(left.values()) == {1}

            run(scenario())


def _taken(desk: Desk, items: Sequence[Item]) -> bool:
    try:
        desk.dispatcher.offer(items)
    except PenstockError:
        return False
    return True


@pytest.fixture
def switch_slowly() -> Iterator[float]:
    """Seconds for which a thread keeps the interpreter while others want it: many times what a busy machine takes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.1)
    yield 0.1
    sys.setswitchinterval(before)


class TestThreads:
    def test_cheap_calls_stay_on_one_thread_and_keep_their_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # By the time that this process has computed: where others have the CPU in the middle of a call, it takes long.
        monkeypatch.setattr(threads_module, "monotonic", time.process_time)
        threads: set[str] = set()

        def cheap(item: Item) -> int:
            threads.add(threading.current_thread().name)
            return item.line

        async def scenario() -> None:
            async with Desk(cheap, concurrency=64) as desk:
                for _ in range(20):
                    desk.dispatcher.offer(make_items(1_000))
                    await desk.dispatcher.wait_idle()
                assert len(threads) == 1
                assert desk.lines == list(range(1, 1_001)) * 20

        run(scenario())

    def test_blocking_calls_get_all_the_threads_they_may_have(self) -> None:
        meeting = threading.Barrier(32)

        def meet(_: Item) -> int:
            return meeting.wait(20)

        async def scenario() -> None:
            async with Desk(meet, concurrency=32) as desk:
                desk.dispatcher.offer(make_items(32))
                await desk.dispatcher.wait_idle()
                assert all(isinstance(found, Outcome) for _, found in desk.results)

        run(scenario())

    def test_calls_that_cannot_be_stopped_are_bounded_and_reported(self) -> None:
        opened = threading.Event()

        def stuck(_: Item) -> bool:
            return opened.wait(20)

        async def scenario() -> None:
            async with Desk(stuck, concurrency=3, timeout_s=0.05) as desk:
                desk.dispatcher.low_water = 1
                desk.dispatcher.offer(make_items(10))
                with pytest.raises(PenstockError, match="cannot be stopped"):
                    await desk.dispatcher.wait_room()
                with pytest.raises(PenstockError):
                    desk.dispatcher.offer(make_items(1))
                back = desk.dispatcher.take_back()
                await desk.dispatcher.wait_idle()
                assert 3 <= len(desk.results) <= 6
                assert len(back) + len(desk.results) == 10
                opened.set()
                await desk.until(lambda: _accepts(desk.dispatcher))
                await desk.dispatcher.wait_idle()
                assert desk.lines[-1] == 99

        run(scenario())

    def test_the_loop_is_not_starved_by_a_tight_loop_of_calls(self, switch_slowly: float) -> None:
        async def scenario() -> None:
            async with Desk(lambda item: item.line) as desk:
                desk.dispatcher.offer(make_items(50_000))
                waits = []
                while desk.dispatcher.in_flight or desk.dispatcher.waiting:
                    began = time.monotonic()
                    await asyncio.sleep(0.001)
                    waits.append(time.monotonic() - began)
                # The interpreter's own switching would allow one turn in so long at best.
                assert sorted(waits)[len(waits) // 2] < switch_slowly
                assert len(desk.results) == 50_000

        run(scenario())


class TestCoroutines:
    def test_a_function_that_never_awaits_leaves_the_loop_its_turns(self) -> None:
        async def selfish(_: Item) -> int:
            end = time.monotonic() + 0.001
            while time.monotonic() < end:
                pass
            return 1

        async def scenario() -> None:
            async with Desk(selfish, concurrency=64) as desk:
                desk.dispatcher.offer(make_items(200))
                turns = 0
                while desk.dispatcher.in_flight or desk.dispatcher.waiting:
                    await asyncio.sleep(0)
                    turns += 1
                assert turns > 30
                assert len(desk.results) == 200

        run(scenario())

    def test_a_call_that_ignores_its_cancellation_is_left_behind(self) -> None:
        async def stubborn(item: Item) -> int:
            if item.line == 1:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(20)
            return item.line

        async def scenario() -> None:
            async with Desk(stubborn, concurrency=1, timeout_s=0.05) as desk:
                desk.dispatcher.offer(make_items(3))
                await desk.dispatcher.wait_idle()
                assert desk.lines == [1, 2, 3]
                assert isinstance(desk.results[0][1], Again)

        run(scenario())

    def test_a_broken_sink_is_reported_not_hidden(self) -> None:
        async def answer(_: Item) -> int:
            return 1

        def sink(_item: Item, _verdict: Verdict) -> None:
            raise ZeroDivisionError

        async def scenario() -> None:
            dispatcher = PythonProcessor(answer, DispatchLimits(concurrency=1), RETRY).dispatcher()
            await dispatcher.start(sink)
            dispatcher.low_water = 1
            dispatcher.offer(make_items(5))
            with pytest.raises(PenstockError, match="ZeroDivisionError"):
                await dispatcher.wait_room()
            await dispatcher.stop()

        run(scenario())


def _accepts(dispatcher: Dispatcher) -> bool:
    try:
        dispatcher.offer([make_item(line=99)])
    except PenstockError:
        return False
    return True
