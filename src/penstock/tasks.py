"""Tasks of asyncio: how they are ended, and how signals reach them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_CANCEL_AGAIN_S = 1.0


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended."""
    tasks = list(tasks)
    going = {task for task in tasks if not task.done()}
    while going:
        for task in going:
            task.cancel()
        # Where a connection breaks while its statement is being cancelled, psycopg raises that error and the
        # cancellation is lost: a loop that tries again after errors goes on, and must be told once more.
        _, going = await asyncio.wait(going, timeout=_CANCEL_AGAIN_S)
    # Errors of tasks that were to end do not matter.
    await asyncio.gather(*tasks, return_exceptions=True)


def ignore_result(task: asyncio.Task[Any]) -> None:
    """Ignore how a task ended: asyncio would log the error of a task that nothing waits for any more."""
    if not task.cancelled():
        task.exception()


@contextmanager
def handle_signals(handler: Callable[[], None]) -> Iterator[None]:
    """Call the handler at every interrupt and every request to terminate."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
