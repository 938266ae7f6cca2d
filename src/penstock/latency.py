"""Latency in fixed buckets, each twice as wide as the one before: counts of workers and of seconds add up."""

from __future__ import annotations

from collections.abc import Sequence

LATENCY_BOUNDS_MS = tuple(2**power for power in range(23))
"""Upper bounds of the buckets: below 1 ms, 2, 4, 8, … 4,194,304 ms (70 min). One more bucket holds the calls that took
longer. Stored counts rely on them: they never change."""

LATENCY_BUCKETS = len(LATENCY_BOUNDS_MS) + 1


def latency_bucket(duration_ms: int) -> int:
    """Number of a call's bucket: a bucket for each number of binary digits."""
    return min(duration_ms.bit_length(), LATENCY_BUCKETS - 1)


def latency_percentile_ms(calls: Sequence[int], share: float) -> float | None:
    """The time within which this share of calls ended, such as 0.95: within a bucket, calls are taken for evenly
    spread. None without calls; of the last bucket, which has no end, its beginning."""
    wanted = share * sum(calls)
    for bucket, count in enumerate(calls):
        if count and wanted <= count:
            low = LATENCY_BOUNDS_MS[bucket - 1] if bucket else 0
            high = LATENCY_BOUNDS_MS[bucket] if bucket < len(LATENCY_BOUNDS_MS) else low
            return low + (high - low) * wanted / count
        wanted -= count
    return None
