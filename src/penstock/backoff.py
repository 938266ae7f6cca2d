"""Backoff: waits between tries, doubled up to a bound, with jitter, so that many who wait do not retry at once."""

from __future__ import annotations

import asyncio
import random


def jittered(seconds: float, low: float = 0.5, high: float = 1.0, *, rng: random.Random | None = None) -> float:
    """A wait of these seconds, from `low` to `high` times as long."""
    return seconds * (rng or random).uniform(low, high)


def doubled(first_s: float, last_s: float, attempt: int) -> float:
    """The longest wait after this attempt, the first being 1."""
    return min(last_s, first_s * 2.0 ** min(max(attempt, 1) - 1, 60))


class Backoff:
    """The waits of a loop that tries again until it succeeds, and then calls `reset`."""

    def __init__(self, first_s: float, last_s: float) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self.longest_s = first_s
        """Upper bound of the next wait."""

    def reset(self) -> None:
        self.longest_s = self._first_s

    def next_s(self) -> float:
        """The next wait; the one after it is twice as long, up to the last."""
        wait_s = jittered(self.longest_s)
        self.longest_s = min(2 * self.longest_s, self._last_s)
        return wait_s

    async def wait(self) -> None:
        await asyncio.sleep(self.next_s())
