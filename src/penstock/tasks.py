"""Tasks of asyncio: how they are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
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
