"""Waiting for a condition instead of sleeping: the only clock a test may look at."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], deadline_s: float) -> None:
    """Return as soon as the condition holds; fail if it does not within the deadline."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > deadline_s:
            raise AssertionError(f"not true within {deadline_s:g} s: {condition.__qualname__}")
        # The longer it takes, the less often: looking takes its time from what is waited for.
        time.sleep(min(max(0.01, waited / 50), 0.05))
