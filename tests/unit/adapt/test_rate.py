"""The controller of the rate against simulated limits: few refusals, and little of the allowance unused."""

from __future__ import annotations

import heapq

import pytest

from penstock.adapt import rate
from tests.support.upstream_model import BucketUpstream

CALL_S, CALLS = 0.03, 64


def work_off(upstream: BucketUpstream, seconds: float, settled_s: float) -> tuple[float, float]:
    """Call as the rate allows; returns the part of the allowance used, and the part of calls refused, once settled."""
    state = rate.begin(0.0, 0)
    now, open_at, saved, saved_at, next_look = 0.0, 0.0, 1.0, 0.0, 0.5
    flights: list[float] = []
    before = (0, 0)
    while now < seconds:
        then = [next_look, *flights[:1]]
        if len(flights) < CALLS:
            paced = saved_at + max(0.0, 1 - saved) / state.per_s if state.per_s else now
            then.append(max(now, open_at, paced))
        now = min(then)
        while flights and flights[0] <= now:
            heapq.heappop(flights)
        if now >= next_look:
            next_look += 0.5
            state, _ = rate.adjust(state, now, upstream.admitted, used=True)
            if now < settled_s:
                before = upstream.admitted, upstream.refused
        if len(flights) >= CALLS or now < open_at:
            continue
        if state.per_s:
            saved = min(max(1.0, state.per_s * 0.02), saved + (now - saved_at) * state.per_s)
            saved_at = now
            if saved < 1 - 1e-9:
                continue
            saved -= 1
        wait_s = upstream.call(now)
        if wait_s is None:
            heapq.heappush(flights, now + CALL_S)
        else:
            open_at, saved, saved_at = now + wait_s, min(saved, 1.0), now + wait_s
            state, _ = rate.refuse(state, now, upstream.admitted, open_at)
    admitted, refused = upstream.admitted - before[0], upstream.refused - before[1]
    return admitted / (upstream.per_s * (seconds - settled_s)), refused / (admitted + refused)


@pytest.mark.parametrize("states_wait", [True, False], ids=["Retry-After", "bare 429"])
@pytest.mark.parametrize("per_s", [2.0, 17.0, 50.0, 150.0, 1_000.0])
def test_the_allowance_is_used_and_refusals_are_rare(per_s: float, states_wait: bool) -> None:
    used, refused = work_off(BucketUpstream(per_s, per_s, states_wait), 180 if per_s < 1_000 else 60, 30)
    assert used >= 0.9
    assert refused <= 0.01


def test_a_limit_by_the_minute_is_found_too() -> None:
    used, refused = work_off(BucketUpstream(50.0, 3_000.0, True), 240, 120)
    assert used >= 0.9
    assert refused <= 0.01


def test_calls_under_way_when_the_first_was_refused_are_one_refusal() -> None:
    state, _ = rate.refuse(rate.begin(0.0, 0), 1.0, 100, 2.0)
    again, why = rate.refuse(state, 1.1, 100, 2.0)
    assert (again, why) == (state, None)


def test_a_first_refusal_is_judged_by_the_calls_before_it_whenever_it_comes() -> None:
    state = rate.begin(0.0, 0)
    for look in range(1, 100):
        state, _ = rate.adjust(state, look / 2, 50 * look, used=False)
        refused, _ = rate.refuse(state, look / 2 + 0.01, 50 * look, look / 2 + 0.01)
        assert refused.per_s == pytest.approx(97, rel=0.05)


def test_a_first_refusal_after_few_calls_is_no_estimate() -> None:
    """Others use the limit too: the very first call is refused, though a hundred a second are allowed."""
    state, _ = rate.refuse(rate.begin(0.0, 0), 0.1, 0, 1.0)
    assert state.per_s == pytest.approx(1, rel=0.05)
    now, admitted = 1.0, 0.0
    while state.per_s is not None and state.per_s < 100:
        now += 0.1
        admitted += 0.1 * state.per_s
        state, _ = rate.adjust(state, now, int(admitted), used=True)
    assert now < 30
    # The next one has calls enough to judge by, and tells what was too much.
    survived = state.survived
    state, _ = rate.refuse(state, now + 0.5, int(admitted) + 50, now + 1)
    assert state.per_s == pytest.approx(survived, rel=0.05)
    assert not state.unsure


def test_headers_and_a_refusal_after_few_calls() -> None:
    state, _ = rate.adjust(rate.state_allowance(rate.begin(0.0, 0), 1.0, 150.0), 1.0, 0, used=True)
    state, _ = rate.refuse(state, 1.1, 1, 1.6)
    assert state.per_s == pytest.approx(72, rel=0.05)


def test_headers_set_the_rate_before_anything_is_refused() -> None:
    state = rate.state_allowance(rate.begin(0.0, 0), 1.0, 150.0)
    state, why = rate.adjust(state, 1.0, 10, used=True)
    assert state.per_s == pytest.approx(148.5)
    assert why == "its headers allow 148 calls/s"
    # They may change.
    state, _ = rate.adjust(rate.state_allowance(state, 2.0, 300.0), 2.0, 300, used=True)
    assert state.per_s == pytest.approx(297)


def test_a_refusal_is_believed_before_headers() -> None:
    """A limit that other calls use up too: its headers promise more than there is."""
    state, _ = rate.adjust(rate.state_allowance(rate.begin(0.0, 0), 1.0, 150.0), 1.0, 0, used=True)
    state, _ = rate.refuse(state, 3.0, 150, 3.5)
    cut = state.per_s
    assert cut is not None
    assert cut < 75
    state, _ = rate.adjust(rate.state_allowance(state, 4.0, 150.0), 4.0, 160, used=True)
    assert state.per_s == cut


def test_a_rate_that_is_not_used_is_not_raised() -> None:
    state, _ = rate.refuse(rate.begin(0.0, 0), 1.0, 100, 2.0)
    for second in range(2, 1_000):
        state, why = rate.adjust(state, float(second), 100 * second, used=False)
        assert why is None


def test_an_old_refusal_is_forgotten() -> None:
    state, _ = rate.refuse(rate.begin(0.0, 0), 1.0, 100, 2.0)
    state, why = rate.adjust(state, 4_000.0, 100, used=False)
    assert (state.per_s, why) == (None, "no refusal for an hour")


def test_time_in_which_nothing_is_called_is_no_refusal() -> None:
    """A run was killed and goes on: the seconds between are not taken for a lower limit."""
    state = rate.begin(0.0, 0)
    state, _ = rate.refuse(state, 1.0, 100, 1.0)
    for second in range(2, 7):
        state = rate.pass_time(state, second)
    state = rate.pass_time(state, 16.0)
    state, _ = rate.refuse(state, 16.5, 100 + 6 * 90, 16.5)
    assert state.per_s is not None
    assert state.per_s > 60
