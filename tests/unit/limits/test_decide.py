"""What follows from the reports of all processes."""

from __future__ import annotations

from uuid import uuid4

import pytest

from penstock.adapt.concurrency import Totals
from penstock.limits.decide import Ceilings, decide
from penstock.limits.store import LimitState, Report, Reported

CEILINGS = Ceilings(calls=100, start=16)


def reported(admitted: int, refused: int = 0, *, wanted: int = 50, **more: object) -> Reported:
    calls = Totals(calls=admitted, work=float(admitted), busy_s=admitted / 10)
    return Reported(uuid4(), wanted, 10, Report(calls, admitted, refused, **more))  # type: ignore[arg-type]


def begun(*reports: Reported) -> LimitState:
    return decide(None, reports, 0.0, CEILINGS, open_at_s=0.0)[0]


def test_it_begins_within_the_ceiling() -> None:
    assert begun(reported(0)).concurrency.limit == 16
    few = Ceilings(calls=5, start=16)
    assert decide(None, [reported(0)], 0.0, few, open_at_s=0.0)[0].concurrency.limit == 5


def test_refusals_of_all_processes_make_one_rate() -> None:
    state, why = decide(begun(reported(0)), [reported(60, 1), reported(40, 2)], 1.0, CEILINGS, open_at_s=2.0)
    assert state.rate.per_s == pytest.approx(50, rel=0.05)  # a hundred calls until it opens again
    assert why == "refused: about 50 calls/s are allowed"
    again, why = decide(state, [reported(60, 1), reported(40, 2)], 1.2, CEILINGS, open_at_s=2.0)
    assert (again.rate.per_s, again.rate.counted_s, why) == (state.rate.per_s, state.rate.counted_s, None)


def test_headers_matter_only_near_what_they_allow() -> None:
    quiet = [reported(10, wanted=1, stated_per_s=1_000.0)]
    state, _ = decide(begun(*quiet), quiet, 1.0, CEILINGS, open_at_s=0.0)
    assert state.rate.per_s is None
    busy = [reported(500, wanted=90, stated_per_s=1_000.0), reported(500, wanted=90, stated_per_s=900.0)]
    state, why = decide(state, busy, 2.0, CEILINGS, open_at_s=0.0)
    assert state.rate.per_s == pytest.approx(891)
    assert why == "its headers allow 891 calls/s"


def test_a_process_that_leaves_does_not_count_as_calls_taken_back() -> None:
    state, _ = decide(begun(reported(0)), [reported(60, 1), reported(40, 1)], 1.0, CEILINGS, open_at_s=2.0)
    state, _ = decide(state, [reported(61, 1)], 3.0, CEILINGS, open_at_s=0.0)
    assert state.rate.per_s is not None
    assert state.rate.counted == 61


def test_refusals_of_calls_that_were_counted_are_no_process_that_leaves() -> None:
    """Headers set the rate, and in the next round more calls are refused than begin: fewer are admitted than before."""
    state = begun(reported(0))
    for look in range(1, 5):
        state, _ = decide(state, [reported(50 * look)], look / 2, CEILINGS, open_at_s=0.0)
    state, _ = decide(state, [reported(210, stated_per_s=150.0)], 2.5, CEILINGS, open_at_s=0.0)
    state, _ = decide(state, [reported(209, 2, stated_per_s=150.0)], 2.56, CEILINGS, open_at_s=3.56)
    assert state.rate.per_s == pytest.approx(209 / 3.56, rel=0.05)


def test_a_process_that_leaves_while_another_is_refused() -> None:
    busy = [reported(100), reported(1_000)]
    state, _ = decide(begun(reported(0), reported(0)), busy, 3.0, CEILINGS, open_at_s=0.0)
    state, _ = decide(state, [reported(101, 1)], 3.1, CEILINGS, open_at_s=4.1)
    assert state.rate.per_s is not None
    assert state.rate.per_s > 0.9


def test_what_the_operator_allows_is_the_ceiling_of_the_rate() -> None:
    ceilings = Ceilings(calls=100, per_minute=600, tokens_per_minute=60_000)
    assert ceilings.per_s(None, None) == 10
    assert ceilings.per_s(4.0, None) == 4
    assert ceilings.per_s(None, tokens=500) == 2
    assert Ceilings(calls=100).per_s(None, tokens=500) is None
