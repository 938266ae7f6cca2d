"""Schedules of faults: determined by their seed, even-handed, and calm when they say so."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.schedule import Event, Fault, Rhythm, calms, make_schedule, play

FAULTS = tuple(fault for fault in Fault if fault is not Fault.HEAL)


def test_a_seed_means_the_same_for_ever() -> None:
    """Written down: whoever changes this changes what every recorded seed means."""
    assert make_schedule(7, 20, 3, FAULTS, Rhythm(storm_ms=6_000, calm_ms=5_000)) == [
        Event(850, Fault.CUT_DATABASE),
        Event(1_248, Fault.CRASH_DATABASE),
        Event(2_411, Fault.FREEZE_WORKER, worker=1, for_ms=781),
        Event(2_829, Fault.CUT_UPSTREAM),
        Event(3_283, Fault.SWALLOW_SETTLE),
        Event(4_305, Fault.KILL_WORKER, worker=2),
        Event(4_815, Fault.CUT_DATABASE),
        Event(6_000, Fault.HEAL),
        Event(11_379, Fault.KILL_WORKER, worker=2),
        Event(12_171, Fault.CUT_UPSTREAM),
        Event(12_716, Fault.CRASH_DATABASE),
        Event(13_216, Fault.SWALLOW_SETTLE),
        Event(14_040, Fault.FREEZE_WORKER, worker=0, for_ms=960),
        Event(15_000, Fault.HEAL),
    ]


def test_different_seeds_differ() -> None:
    assert len({tuple(make_schedule(seed, 60, 3)) for seed in range(50)}) == 50


@given(
    seed=st.integers(min_value=0, max_value=2**64),
    seconds=st.integers(min_value=20, max_value=600),
    workers=st.integers(min_value=1, max_value=9),
)
def test_every_schedule_keeps_its_promises(seed: int, seconds: int, workers: int) -> None:
    beat = Rhythm()
    schedule = make_schedule(seed, seconds, workers)
    assert schedule == make_schedule(seed, seconds, workers)
    times = [event.at_ms for event in schedule]
    assert times == sorted(times)
    assert schedule[-1].fault is Fault.HEAL
    assert schedule[-1].at_ms + beat.calm_ms <= seconds * 1_000
    for event in schedule:
        has_worker = event.fault in (Fault.KILL_WORKER, Fault.FREEZE_WORKER)
        assert (event.worker in range(workers)) if has_worker else event.worker is None
        assert (event.for_ms > 0) == (event.fault is Fault.FREEZE_WORKER)
    for event, after in pairwise(schedule):
        if after.fault is not Fault.HEAL:
            gap = after.at_ms - event.at_ms - (beat.calm_ms if event.fault is Fault.HEAL else 0)
            assert beat.gap_min_ms <= gap <= beat.gap_max_ms
    assert all(end - start >= beat.calm_ms for start, end in calms(schedule, seconds))


@given(seed=st.integers(min_value=0, max_value=2**32))
def test_in_a_calm_nobody_stands_still(seed: int) -> None:
    schedule = make_schedule(seed, 120, 2)
    windows = calms(schedule, 120)
    assert len(windows) == 3
    for event in schedule:
        for start, end in windows:
            assert not start < event.at_ms + event.for_ms < end


@given(seed=st.integers(min_value=0, max_value=2**32))
def test_faults_are_dealt_evenly(seed: int) -> None:
    counts = Counter(event.fault for event in make_schedule(seed, 300, 4, FAULTS))
    del counts[Fault.HEAL]
    assert set(counts) == set(FAULTS)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_only_what_was_asked_for_happens() -> None:
    schedule = make_schedule(1, 120, 4, [Fault.KILL_WORKER, Fault.KILL_WORKER, Fault.CUT_UPSTREAM])
    counts = Counter(event.fault for event in schedule)
    assert set(counts) == {Fault.KILL_WORKER, Fault.CUT_UPSTREAM, Fault.HEAL}
    assert counts[Fault.KILL_WORKER] > counts[Fault.CUT_UPSTREAM]


@pytest.mark.parametrize(("seconds", "faults"), [(10, FAULTS), (60, ()), (60, (Fault.HEAL,))])
def test_what_cannot_be_is_refused(seconds: int, faults: tuple[Fault, ...]) -> None:
    with pytest.raises(ValueError, match=r"faults|room"):
        make_schedule(1, seconds, 1, faults)


def test_playing_does_each_event_once_it_is_time() -> None:
    schedule = [Event(at_ms, Fault.CUT_DATABASE) for at_ms in (0, 20, 40)]
    now = iter(range(1_000))
    done: list[Event] = []
    # A clock that runs a second per look: nothing need be waited for.
    assert play(schedule, done.append, halt=threading.Event(), clock=lambda: float(next(now))) == 3
    assert done == schedule


def test_playing_stops_when_told() -> None:
    halt = threading.Event()
    schedule = [Event(0, Fault.CUT_DATABASE), Event(3_600_000, Fault.HEAL)]
    assert play(schedule, lambda _: halt.set(), halt=halt) == 1
