"""The controller of concurrency against simulated upstreams: it finds the knee, and follows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.adapt import concurrency
from penstock.adapt.concurrency import Bounds, Concurrency, Pressure, Totals
from tests.support.upstream_model import SlotUpstream

SETTLED_S = 60.0


def compare(slots: Callable[[float], int], best: int, begin: float, **upstream: float) -> tuple[float, float]:
    """Work done per second, and the 95th percentile of the latency, as parts of those at the best fixed limit."""
    found = SlotUpstream(slots, **upstream)  # type: ignore[arg-type]
    found.run(begin + 60)
    fixed = SlotUpstream(lambda _: best, **upstream)  # type: ignore[arg-type]
    fixed.run(120, fixed=best)
    return (
        found.tokens_per_s(begin, begin + 60) / fixed.tokens_per_s(60, 120),
        found.p95_s(begin, begin + 60) / fixed.p95_s(60, 120),
    )


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("slots", "slowdown", "token_s"), [(11, 1.0, 0.01), (64, 2.0, 0.01), (150, 1.0, 0.01), (20, 1.0, 0.002)]
)
def test_the_best_limit_is_found_within_a_minute(slots: int, slowdown: float, token_s: float, seed: int) -> None:
    work, latency = compare(lambda _: slots, slots, SETTLED_S, slowdown=slowdown, token_s=token_s, seed=seed)
    assert work >= 0.95
    assert latency <= 1.5


@pytest.mark.parametrize(("before", "after"), [(64, 32), (64, 128), (150, 75), (150, 300)])
def test_a_change_of_capacity_is_followed_within_a_minute(before: int, after: int) -> None:
    work, latency = compare(lambda now: before if now < 60 else after, after, 2 * SETTLED_S)
    assert work >= 0.95
    assert latency <= 1.5


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("slots", "unrest"), [(40, 0.2), (40, 0.5), (150, 0.2), (150, 0.5)])
def test_a_restless_upstream_is_neither_flooded_nor_left_alone(slots: int, unrest: float, seed: int) -> None:
    """The pace of everything changes by a fifth, or by half, from second to second."""
    found, fixed = (SlotUpstream(lambda _: slots, slowdown=1.5, unrest=unrest, seed=seed) for _ in range(2))
    found.run(180)
    fixed.run(180, fixed=slots)
    assert found.tokens_per_s(60, 180) >= 0.6 * fixed.tokens_per_s(60, 180)
    assert found.p95_s(60, 180) <= 4 * fixed.p95_s(60, 180)


def test_without_tokens_calls_are_counted() -> None:
    found, fixed = SlotUpstream(lambda _: 100), SlotUpstream(lambda _: 100)
    found.run(120, counts_tokens=False)
    fixed.run(120, fixed=100)
    assert found.tokens_per_s(60, 120) >= 0.95 * fixed.tokens_per_s(60, 120)


def busy(seconds: float, level: float, calls: int, call_s: float, failed: int = 0) -> Totals:
    return Totals(calls, calls, calls * call_s, level * seconds, level * seconds, failed)


def test_nothing_moves_while_there_is_little_to_do() -> None:
    bounds = Bounds(1, 1_000)
    state = concurrency.begin(16, 0.0, Totals(), bounds)
    for second in range(1, 60):
        # Two of sixteen slots are in use.
        state, why = concurrency.adjust(
            state, second, Totals(10 * second, 10 * second, 2.0 * second, 2.0 * second), bounds
        )
        assert why is None
    assert state.limit == 16


def test_errors_cut_it_once_for_each_level() -> None:
    bounds = Bounds(1, 1_000)
    state = concurrency.begin(100, 0.0, Totals(), bounds)
    state, why = concurrency.adjust(state, 1.0, busy(1.0, 100, 20, 1.0, failed=20), bounds)
    assert (round(state.limit), why) == (70, "errors ×20")
    # These were under way when it was cut.
    state, why = concurrency.adjust(state, 1.5, busy(1.5, 100, 50, 1.0, failed=60), bounds)
    assert (round(state.limit), why) == (70, None)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_errors_that_come_whatever_the_load_cost_no_work(share: float, seed: int) -> None:
    slots = SlotUpstream(lambda _: 64, failing=lambda _: share, seed=seed)
    slots.run(120)
    best = SlotUpstream(lambda _: 64, failing=lambda _: share, seed=seed)
    best.run(120, fixed=64)
    assert slots.tokens_per_s(60, 120) >= 0.9 * best.tokens_per_s(60, 120)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("usual", [0.0, 0.05])
def test_errors_by_too_many_calls_keep_them_few(usual: float, seed: int) -> None:
    slots = SlotUpstream(lambda _: 500, failing=lambda calls: usual if calls <= 40 else 0.6, seed=seed)
    limits = slots.run(180)
    late = limits[len(limits) // 3 :]
    assert sum(each <= 44 for each in late) >= 0.8 * len(late)
    best = SlotUpstream(lambda _: 500, failing=lambda _: usual, seed=seed)
    best.run(180, fixed=40)
    assert slots.tokens_per_s(60, 180) >= 0.7 * best.tokens_per_s(60, 180)


def test_where_everything_fails_few_calls_are_made() -> None:
    limits = SlotUpstream(lambda _: 64, failing=lambda _: 1.0).run(120)
    assert limits[-1] < 4


def test_a_few_errors_among_many_answers_are_none_of_its_business() -> None:
    bounds = Bounds(1, 1_000)
    state = concurrency.begin(100, 0.0, Totals(), bounds)
    state, _ = concurrency.adjust(state, 1.0, busy(1.0, 100, 200, 0.5, failed=10), bounds)
    assert state.limit == 100


def test_a_process_that_leaves_takes_its_totals_along() -> None:
    bounds = Bounds(1, 1_000)
    state = concurrency.begin(10, 0.0, Totals(calls=1_000, flight_s=50.0), bounds)
    state, why = concurrency.adjust(state, 5.0, Totals(calls=400, flight_s=20.0), bounds)
    assert (state.before.calls, state.limit, why) == (400, 10, None)


@pytest.mark.parametrize("limit", [0.2, 5_000.0])
def test_the_operators_bounds_hold(limit: float) -> None:
    bounds = Bounds(2, 50)
    state = Concurrency(limit=limit, level=limit)
    state, why = concurrency.adjust(state, 1.0, Totals(), bounds)
    assert 2 <= state.limit <= 50
    assert 2 <= state.level <= 50
    assert why == "the limits set by the operator"


def test_what_the_upstream_says_of_its_queue_is_believed() -> None:
    bounds = Bounds(1, 1_000, spread_s=0.0)
    state = concurrency.begin(100, 0.0, Totals(), bounds)
    state, _ = concurrency.adjust(state, 1.0, busy(1.0, 100, 100, 1.0), bounds)
    state, why = concurrency.adjust(state, 3.0, busy(3.0, 100, 300, 1.0), bounds, Pressure(60, 40, 0.5))
    assert (round(state.limit), why) == (80, "40 calls wait at the upstream")
    state, _ = concurrency.adjust(state, 5.0, busy(5.0, 100, 500, 1.0), bounds)
    state, why = concurrency.adjust(state, 8.0, busy(8.0, 100, 800, 1.0), bounds, Pressure(60, 0, 0.97))
    assert (round(state.limit), why) == (64, "its cache is 97% full")
