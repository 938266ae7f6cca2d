"""Waiting for a condition instead of sleeping: the only clock a test may look at."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], deadline_s: float) -> None:
    """Return as soon as the condition holds; fail if it does not within the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not true within {deadline_s:g} s: {condition.__qualname__}")
        time.sleep(0.01)
