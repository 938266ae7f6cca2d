"""Tasks of asyncio: how they are ended, and how signals reach them."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_CANCEL_AGAIN_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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


@functools.cache
def leave_signals_to_forks() -> None:
    """Let forked children have their signals to themselves. A loop's handlers are told by a descriptor that a child
    shares: without this, ending a child of a processor (`multiprocessing`) would stop its parent."""
    masks = threading.local()

    def before() -> None:
        # A signal that arrives before the child has let go of the descriptor would still reach the parent.
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        in_parent()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


@contextmanager
def handle_signals(handler: Callable[[], None]) -> Iterator[None]:
    """Call the handler at every interrupt and every request to terminate."""
    loop = asyncio.get_running_loop()
    leave_signals_to_forks()
    for number in _SIGNALS:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
