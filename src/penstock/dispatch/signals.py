"""Signals: exceptions by which a Python processor says that an item has no plain result. Users import them as
`penstock.Retry` and so on."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

CHUNK_ATTRIBUTE = "__penstock_chunk__"
MAX_CHUNK = 10_000


class Signal(Exception):  # noqa: N818 -- not an error: an answer
    """Base of the four signals; raise (or, from a chunk function, return) one of those below."""

    def __init__(self, message: object = "") -> None:
        # Made text at once, whatever was given: `raise Fail(error)` is a natural thing to write.
        self.message = str(message)
        super().__init__(self.message)


class Retry(Signal):
    """Try this item again, not before `after` (seconds or a timedelta); the attempt is charged to it."""

    def __init__(self, message: object = "", after: float | timedelta | None = None) -> None:
        super().__init__(message)
        seconds: object = after.total_seconds() if isinstance(after, timedelta) else after
        if seconds is not None and not isinstance(seconds, int | float):
            raise TypeError(f"Retry(after=...) takes seconds or a timedelta, not {after!r}")
        self.after = seconds


class Fail(Signal):
    """This item has failed for good; no further attempt would help."""

    def __init__(self, message: object, code: str = "processor_failed") -> None:
        super().__init__(message)
        self.code = str(code)


class NotFound(Signal):
    """This item has no answer. It is tried `max_attempts_not_found` times, then recorded as not found."""


class Skip(Signal):
    """This item needs no answer; recorded as skipped."""


def chunk(size: int) -> Callable[[_F], _F]:
    """Mark a function that takes a list of up to `size` items and returns as many results, in order.

    A result may be an instance of one of the signals above: it then concerns that item alone.
    """
    if not 1 <= size <= MAX_CHUNK:
        raise ValueError(f"chunk size must be a whole number from 1 to {MAX_CHUNK}, not {size!r}")

    def mark(function: _F) -> _F:
        setattr(function, CHUNK_ATTRIBUTE, size)
        return function

    return mark
