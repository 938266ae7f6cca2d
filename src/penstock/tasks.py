"""Ending asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_CANCEL_AGAIN_S = 1.0


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended."""
    tasks = list(tasks)
    going = {task for task in tasks if not task.done()}
    while going:
        for task in going:
            task.cancel()
        # Where a connection breaks while its statement is being cancelled, psycopg raises that error and the
        # cancellation is lost: a loop that tries again after errors goes on, and must be told once more.
        _, going = await asyncio.wait(going, timeout=_CANCEL_AGAIN_S)
    # What they still have to say is about an end that has come anyway.
    await asyncio.gather(*tasks, return_exceptions=True)


def heard(task: asyncio.Task[Any]) -> None:
    """Take note of how a task ended: one that fails while nobody waits for it any more has nobody else to tell."""
    if not task.cancelled():
        task.exception()
