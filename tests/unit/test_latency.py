"""Latency buckets: which call is in which, and what they tell of percentiles."""

from __future__ import annotations

import random

import pytest

from penstock.latency import LATENCY_BOUNDS_MS, LATENCY_BUCKETS, latency_bucket, latency_percentile_ms


def counted(durations_ms: list[int]) -> list[int]:
    calls = [0] * LATENCY_BUCKETS
    for duration_ms in durations_ms:
        calls[latency_bucket(duration_ms)] += 1
    return calls


@pytest.mark.parametrize("bucket", range(LATENCY_BUCKETS))
def test_a_bucket_holds_what_is_below_its_bound(bucket: int) -> None:
    low = LATENCY_BOUNDS_MS[bucket - 1] if bucket else 0
    assert latency_bucket(low) == bucket
    if bucket < len(LATENCY_BOUNDS_MS):
        assert latency_bucket(LATENCY_BOUNDS_MS[bucket] - 1) == bucket


def test_the_longest_attempt_there_can_be_has_a_bucket() -> None:
    assert latency_bucket(7_200_000) == latency_bucket(2**31 - 1) == LATENCY_BUCKETS - 1


def test_percentiles_of_evenly_spread_calls() -> None:
    calls = counted(list(range(1_024)))
    assert latency_percentile_ms(calls, 0.5) == pytest.approx(512)
    assert latency_percentile_ms(calls, 0.75) == pytest.approx(768)
    assert latency_percentile_ms(calls, 1) == 1_024


def test_a_percentile_is_in_the_bucket_of_the_call_it_is_of() -> None:
    made = random.Random(7)
    for _ in range(200):
        durations = sorted(int(made.lognormvariate(6, 2)) for _ in range(made.randint(1, 300)))
        calls = counted(durations)
        for share in (0.5, 0.95, 0.99):
            exact = durations[max(0, -int(-share * len(durations) // 1) - 1)]
            estimated = latency_percentile_ms(calls, share)
            assert estimated is not None
            assert calls[latency_bucket(exact)] > 0
            low = LATENCY_BOUNDS_MS[latency_bucket(exact) - 1] if latency_bucket(exact) else 0
            assert low <= estimated <= LATENCY_BOUNDS_MS[latency_bucket(exact)]


def test_no_call_has_no_percentile_and_the_last_bucket_its_beginning() -> None:
    assert latency_percentile_ms([0] * LATENCY_BUCKETS, 0.5) is None
    assert latency_percentile_ms(counted([5_000_000]), 0.99) == LATENCY_BOUNDS_MS[-1]
