"""Pace of readers: between two pieces of a file, a reader lets whoever runs it hold it back, or stop it.

A file of a few hundred kilobytes can stand for gigabytes of lines, so a reader may compute for a long time on little.
It calls `keep_pace` often; what that does is set by the thread's owner with `paced`, and is nothing by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Pace = Callable[[], None]
"""Returns when the reader may go on; raises to stop it."""

_pace: ContextVar[Pace | None] = ContextVar("pace of a reader", default=None)


def keep_pace() -> None:
    pace = _pace.get()
    if pace is not None:
        pace()


@contextmanager
def paced(pace: Pace) -> Iterator[None]:
    """Readers of this thread keep that pace for as long as the block lasts."""
    token = _pace.set(pace)
    try:
        yield
    finally:
        _pace.reset(token)
