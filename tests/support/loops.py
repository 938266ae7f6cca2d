"""Scenarios on asyncio's event loop and on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

LOOPS = {"asyncio": None, "uvloop": uvloop.new_event_loop}

Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


def runner_on(loop: str) -> Run:
    """Runs a scenario to its end, in time, and without a fault that only the loop sees."""

    def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        unseen: list[dict[str, Any]] = []

        async def bounded() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
            async with asyncio.timeout(30):
                await scenario()

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(bounded())
        assert unseen == []

    return run
