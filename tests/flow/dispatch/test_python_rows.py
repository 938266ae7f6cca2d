"""What a Python function is offered with a row of a job, and classes that are set up once per process."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

import pytest

from penstock.config import DispatchLimits, RetryLimits
from penstock.dispatch.python import PythonProcessor, chunk_size_of
from penstock.dispatch.signals import NotFound, Retry, chunk
from penstock.errors import PenstockError, UsageError
from penstock.model import (
    MAX_DISCOVERED_ROWS,
    Again,
    CallCancelled,
    Item,
    NewRow,
    Outcome,
    OutcomeState,
    Verdict,
    batch_public_id,
)
from tests.support.items import BATCH, make_item, make_row

ROW = {"title": "Boot", "stock": 3}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await coroutine

    asyncio.run(bounded())


def processor(fn: Callable[..., Any], *, timeout_s: float = 20, **options: Any) -> PythonProcessor:
    limits = DispatchLimits(concurrency=4, attempt_timeout_s=timeout_s)
    return PythonProcessor(fn, limits, RetryLimits(), **options)


def verdicts(fn: Callable[..., Any], items: Sequence[Item], **options: Any) -> list[Verdict]:
    found: dict[int, Verdict] = {}

    async def scenario() -> None:
        async with processor(fn, **options) as entered:
            dispatcher = entered.dispatcher()
            await dispatcher.start(lambda item, verdict: found.update({id(item): verdict}))
            dispatcher.offer(items)
            await dispatcher.wait_idle()
            await dispatcher.stop()

    run(scenario())
    return [found[id(item)] for item in items]


def both(fn: Callable[[Item], Any]) -> list[Callable[..., Any]]:
    """The function as it is, and as a coroutine function."""

    async def later(item: Item) -> Any:
        await asyncio.sleep(0)
        return fn(item)

    return [fn, later]


def outcome(verdict: Verdict) -> Outcome:
    assert isinstance(verdict, Outcome), verdict
    return verdict


class TestRows:
    def test_the_body_is_the_normalised_row(self) -> None:
        for fn in both(lambda item: {"row": item.body, "source": item.source_row, "image": item.image is not None}):
            (verdict,) = verdicts(fn, [make_row(ROW, image=b"\x89PNG")])
            found = json.loads(outcome(verdict).body or b"")
            assert found == {"row": ROW, "source": ["Boot", "3"], "image": True}

    def test_an_input_that_is_no_row_has_none(self) -> None:
        item = make_item(b'{"row": 1}')
        assert (item.body, item.source_row, item.image, item.is_row) == ({"row": 1}, None, None, False)

    @pytest.mark.parametrize(
        ("value", "body"),
        [
            ({"a": 1}, b'{"a":1}'),
            (b' {"a": 1}', b' {"a": 1}'),
            (7, b'{"result":7}'),
            (None, b'{"result":null}'),
            ([{"a": 1}], b'{"result":[{"a":1}]}'),
            (b" [1] ", b'{"result": [1] }'),
            ("{", b'{"result":"{"}'),
        ],
    )
    def test_a_result_that_is_no_object_becomes_a_column(self, value: object, body: bytes) -> None:
        for fn in both(lambda _: value):
            (verdict,) = verdicts(fn, [make_row(ROW)])
            assert outcome(verdict).body == body

    def test_of_an_input_that_is_no_row_it_stays_as_it_is(self) -> None:
        for fn in both(lambda _: 7):
            (verdict,) = verdicts(fn, [make_item()])
            assert outcome(verdict).body == b"7"

    def test_strategies_are_rotated_through(self) -> None:
        for fn in both(lambda item: item.strategy):
            items = [make_row(ROW, attempt=attempt) for attempt in (1, 2, 3)]
            found = [outcome(verdict).body for verdict in verdicts(fn, items, strategies=("exact", "fuzzy"))]
            assert found == [b'{"result":"exact"}', b'{"result":"fuzzy"}', b'{"result":"exact"}']
            assert outcome(verdicts(fn, [make_row(ROW)])[0]).body == b'{"result":null}'

    def test_a_chunk_function_sees_strategies_too(self) -> None:
        @chunk(2)
        def names(items: list[Item]) -> list[object]:
            return [item.strategy for item in items]

        items = [make_row(ROW, attempt=attempt, line=attempt) for attempt in (1, 2)]
        found = [outcome(verdict).body for verdict in verdicts(names, items, strategies=("a", "b"))]
        assert found == [b'{"result":"a"}', b'{"result":"b"}']

    def test_the_log_names_batch_and_line(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "penstock.processor"):
            make_row(ROW, line=12).log.info("%s is odd", "Boot")
        assert caplog.messages == [f"{batch_public_id(BATCH)} line 12: Boot is odd"]


class TestDiscoveredRows:
    def test_they_come_with_the_outcome(self) -> None:
        def discover(item: Item) -> dict[str, int]:
            row = {"title": "Lace"}
            item.add("lace-1", row)
            row["title"] = "changed later"
            item.add("lace-2", row)
            return {"found": 2}

        for fn in both(discover):
            (verdict,) = verdicts(fn, [make_row(ROW)])
            assert outcome(verdict).discovered == (
                NewRow("lace-1", b'{"title":"Lace"}'),
                NewRow("lace-2", b'{"title":"changed later"}'),
            )

    @pytest.mark.parametrize("signal", [Retry("later"), NotFound("none"), ValueError("broken")])
    def test_an_item_that_is_not_done_adds_nothing(self, signal: Exception) -> None:
        def discover(item: Item) -> None:
            item.add("lace-1", {})
            raise signal

        for attempt in (1, 5):
            (verdict,) = verdicts(discover, [make_row(ROW, attempt=attempt)])
            assert isinstance(verdict, Again) or verdict.discovered == ()  # type: ignore[union-attr]

    def test_what_cannot_be_added_is_an_error_of_the_function(self) -> None:
        item = make_row(ROW)
        with pytest.raises(ValueError, match=r"add\(key=...\) takes a text of 1 to 512 characters, not ''"):
            item.add("", {})
        with pytest.raises(ValueError, match="takes a text"):
            item.add("x" * 513, {})
        with pytest.raises(TypeError, match=r"add\(row=...\) takes a mapping of column names to values, not \[1\]"):
            item.add("k", [1])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes a mapping"):
            item.add("k", {1: 2})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="unsupported"):
            item.add("k", {"a": object()})
        with pytest.raises(TypeError, match=r"add\(\) is for the rows of a job"):
            make_item().add("k", {})
        for number in range(MAX_DISCOVERED_ROWS):
            item.add(str(number), {})
        with pytest.raises(ValueError, match="an item can add 1,000 rows"):
            item.add("one more", {})


class TestCancel:
    """A call that is given up is told so, on threads and on the loop."""

    @staticmethod
    def waiting(seen: dict[str, object], started: threading.Event, ended: threading.Event) -> list[Callable[..., Any]]:
        def work(item: Item) -> None:
            seen["before"] = item.cancel.requested
            item.cancel.raise_if_requested()
            started.set()
            try:
                while True:
                    item.cancel.raise_if_requested()
                    ended.wait(0.001)
            except CallCancelled:
                seen["after"] = item.cancel.requested
                ended.set()
                raise

        async def work_async(item: Item) -> None:
            seen["before"] = item.cancel.requested
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                seen["after"] = item.cancel.requested
                ended.set()

        return [work, work_async]

    @pytest.mark.parametrize("kind", [0, 1])
    @pytest.mark.parametrize("how", ["timeout", "abort", "stop"])
    def test_it_is_requested(self, kind: int, how: str) -> None:
        async def scenario() -> None:
            seen: dict[str, object] = {}
            started, ended = threading.Event(), threading.Event()
            fn = self.waiting(seen, started, ended)[kind]
            got: list[Verdict] = []
            dispatcher = processor(fn, timeout_s=0.1 if how == "timeout" else 20).dispatcher()
            await dispatcher.start(lambda _, verdict: got.append(verdict))
            dispatcher.offer([make_row(ROW)])
            assert await asyncio.to_thread(started.wait, 10)
            if how == "abort":
                assert len(dispatcher.abort()) == 1
            elif how == "stop":
                await dispatcher.stop()
            assert await asyncio.to_thread(ended.wait, 10)
            assert seen == {"before": False, "after": True}
            await dispatcher.stop()
            assert [isinstance(verdict, Again) for verdict in got] == [True] * (how == "timeout")

        run(scenario())


class Recorder:
    """Class of a processor that notes what is done with it."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.made.append(self)

    def __call__(self, item: Item) -> dict[str, Any]:
        assert item.is_row
        self.notes.append("call")
        return {"ready": "setup" in self.notes}


class Plain(Recorder):
    def setup(self) -> None:
        self.notes.append("setup")

    def close(self) -> None:
        self.notes.append("close")


class Async(Recorder):
    async def setup(self) -> None:
        await asyncio.sleep(0)
        self.notes.append("setup")

    async def __call__(self, item: Item) -> dict[str, Any]:  # type: ignore[override]
        await asyncio.sleep(0)
        return Recorder.__call__(self, item)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.notes.append("close")


class Chunked:
    def __call__(self, items: list[Item]) -> list[int]:
        return [len(items)] * len(items)


class Marked:
    @chunk(3)
    async def __call__(self, items: list[Item]) -> list[int]:
        return [len(items)] * len(items)


class Broken:
    def setup(self) -> None:
        raise OSError("no model file")

    def __call__(self, item: Item) -> int:
        return item.line


class NeedsMore:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, item: Item) -> int:
        return item.line


class Unclosable(Plain):
    def close(self) -> None:
        raise OSError("the disk is full")


class TestClasses:
    @pytest.mark.parametrize("kind", [Plain, Async])
    def test_it_is_made_and_set_up_once_and_closed(self, kind: type[Recorder]) -> None:
        Recorder.made.clear()
        items = [make_row(ROW, line=line) for line in (1, 2, 3)]
        assert [outcome(verdict).body for verdict in verdicts(kind, items)] == [b'{"ready":true}'] * 3
        (made,) = Recorder.made
        assert made.notes == ["setup", "call", "call", "call", "close"]
        assert processor(kind).name == kind.__name__
        assert processor(kind).is_async == (kind is Async)

    def test_both_methods_may_be_missing(self) -> None:
        (verdict,) = verdicts(Recorder, [make_row(ROW)])
        assert outcome(verdict).body == b'{"ready":false}'

    def test_it_may_take_chunks(self) -> None:
        assert [chunk_size_of(Chunked), chunk_size_of(Chunked()), chunk_size_of(Marked), chunk_size_of(Plain)] == [
            *(100, 100, 3, None)
        ]
        items = [make_row(ROW, line=line) for line in range(1, 4)]
        for kind in (Chunked, Marked):
            assert [outcome(verdict).body for verdict in verdicts(kind, items)] == [b'{"result":3}'] * 3

    @pytest.mark.parametrize("kind", [Broken, NeedsMore])
    def test_a_set_up_that_fails_is_an_error_with_its_cause(self, kind: type) -> None:
        async def scenario() -> None:
            with pytest.raises(PenstockError) as caught:
                async with processor(kind):
                    pytest.fail("it was set up")
            assert caught.value.message.startswith(f"{kind.__name__} could not be set up: ")
            assert caught.value.hint == "Its setup() runs once in every worker process, before the first item."
            assert isinstance(caught.value.__cause__, OSError | TypeError)
            if kind is Broken:
                assert "OSError: no model file (test_python_rows.py, line" in caught.value.message

        run(scenario())

    def test_a_close_that_fails_is_logged_and_loses_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        (verdict,) = verdicts(Unclosable, [make_row(ROW)])
        assert outcome(verdict).state is OutcomeState.COMPLETED
        assert caplog.messages[0].startswith(
            "Unclosable could not be closed: OSError: the disk is full (test_python_rows.py"
        )


class TestChunkSize:
    def test_it_can_be_chosen_for_a_chunk_function(self) -> None:
        items = [make_row(ROW, line=line) for line in range(1, 5)]
        found = verdicts(Chunked, items, chunk=2)
        assert [outcome(verdict).body for verdict in found] == [b'{"result":2}'] * 4

    def test_and_for_no_other(self) -> None:
        with pytest.raises(UsageError, match="Plain takes one item, not chunks of 2") as caught:
            processor(Plain, chunk=2)
        assert caught.value.hint == "Leave chunk out, or annotate the first parameter as list[Item]."
