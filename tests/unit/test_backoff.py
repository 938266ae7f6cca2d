from __future__ import annotations

import asyncio
import random
from time import monotonic

from penstock.backoff import Backoff, doubled, jittered


def test_waits_double_up_to_the_last_and_begin_anew() -> None:
    backoff = Backoff(0.2, 1.0)
    for longest_s in (0.2, 0.4, 0.8, 1.0, 1.0):
        assert backoff.longest_s == longest_s
        assert longest_s / 2 <= backoff.next_s() <= longest_s
    backoff.reset()
    assert backoff.next_s() <= 0.2


def test_a_wait_is_waited_for() -> None:
    backoff = Backoff(0.02, 0.02)
    began = monotonic()
    asyncio.run(backoff.wait())
    assert monotonic() - began >= 0.01


def test_the_wait_after_an_attempt() -> None:
    assert [doubled(1, 60, attempt) for attempt in (0, 1, 2, 6, 7, 8, 10_000)] == [1, 1, 2, 32, 60, 60, 60]


def test_jitter_stays_within_its_bounds_and_differs() -> None:
    drawn = {jittered(8, 0.75, 1.25) for _ in range(200)}
    assert 6 <= min(drawn) < 7
    assert 9 < max(drawn) <= 10
    assert len(drawn) > 100
    assert jittered(8, 0, rng=random.Random(1)) == jittered(8, 0, rng=random.Random(1))
