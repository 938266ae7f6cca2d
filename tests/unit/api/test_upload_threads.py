"""Threads of uploads: shared between owners, paced, and stopped with their client."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from time import thread_time

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from penstock.api.upload_threads import UploadThreads, UploadWork
from penstock.intake.pace import keep_pace

DEADLINE_S = 30.0


def test_an_owner_leaves_threads_to_others() -> None:
    async def run() -> None:
        threads, release, never = UploadThreads(6), threading.Event(), threading.Event()
        begun: list[str] = []

        def work(owner: str) -> None:
            begun.append(owner)
            release.wait(DEADLINE_S)

        async def until(count: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while len(begun) < count:
                    await asyncio.sleep(0.001)

        greedy = [asyncio.create_task(threads.run("a", partial(work, "a"), never)) for _ in range(20)]
        await until(3)
        other = asyncio.create_task(threads.run("b", partial(work, "b"), never))
        await until(4)
        assert begun == ["a", "a", "a", "b"]
        third = asyncio.create_task(threads.run("c", partial(work, "c"), never))
        await until(5)
        assert begun[-1] == "c"
        release.set()
        await asyncio.gather(*greedy, other, third)
        assert begun.count("a") == 20

    asyncio.run(run())


def test_those_who_gave_up_waiting_keep_nobody_waiting() -> None:
    async def run() -> None:
        threads, release, never = UploadThreads(2), threading.Event(), threading.Event()
        first = asyncio.create_task(threads.run("a", lambda: release.wait(DEADLINE_S), never))
        gone = [asyncio.create_task(threads.run("a", lambda: None, never)) for _ in range(3)]
        last = asyncio.create_task(threads.run("a", lambda: "done", never))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        release.set()
        assert await last == "done"
        await first
        assert await threads.run("b", lambda: 1, never) == 1

    asyncio.run(run())


def spend(cpu_s: float) -> None:
    """Compute for so long, in steps, as a reader does."""
    began = thread_time()
    while thread_time() - began < cpu_s:
        sum(range(10_000))
        keep_pace()


def test_owners_have_equal_shares_whatever_their_number_of_threads() -> None:
    """Five threads of one owner against one of another, who needs no more CPU than a fifth of theirs."""

    async def run() -> list[str]:
        threads, never, ended = UploadThreads(12), threading.Event(), []

        async def work(owner: str, cpu_s: float) -> None:
            await threads.run(owner, partial(spend, cpu_s), never)
            ended.append(owner)

        await asyncio.gather(*(work("a", 0.2) for _ in range(5)), work("b", 0.2))
        return ended

    assert asyncio.run(run())[0] == "b"


class Unrested(threading.Event):
    """Notes how long a reader would rest, and lets it go on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.rested_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.rested_s += timeout or 0.0
        return False


@pytest.mark.parametrize(("callers", "rests"), [((), 0), (("a",), 0), (("b",), 4), (("a", "b", "a", "a"), 4)])
def test_beside_calls_of_others_a_reader_rests_four_times_as_long_as_it_computes(
    callers: tuple[str, ...], rests: int
) -> None:
    async def run() -> float:
        threads, stop = UploadThreads(12), Unrested()
        for caller in callers:
            threads.note_call(caller)
        await threads.run("a", partial(spend, 0.02), stop)
        return stop.rested_s

    assert asyncio.run(run()) == pytest.approx(rests * 0.02, rel=0.3)


def test_a_reader_rests_for_a_long_piece_after_the_ones_that_follow() -> None:
    async def run() -> float:
        threads, stop = UploadThreads(12), Unrested()
        threads.note_call("b")

        def work() -> None:
            began = thread_time()
            while thread_time() - began < 0.15:
                sum(range(10_000))
            for _ in range(10):
                keep_pace()

        await threads.run("a", work, stop)
        return stop.rested_s

    assert asyncio.run(run()) == pytest.approx(4 * 0.15, rel=0.3)


def test_work_stops_with_its_client() -> None:
    async def run() -> None:
        hang_up = asyncio.Event()

        async def receive() -> Message:
            await hang_up.wait()
            return {"type": "http.disconnect"}

        working = threading.Event()

        def work() -> None:
            working.set()
            spend(DEADLINE_S)

        task = asyncio.create_task(UploadWork("a", receive).run_for_client(work))
        async with asyncio.timeout(DEADLINE_S / 2):
            while not working.is_set():
                await asyncio.sleep(0.001)
            hang_up.set()
            with pytest.raises(ClientDisconnect):
                await task

    asyncio.run(run())
