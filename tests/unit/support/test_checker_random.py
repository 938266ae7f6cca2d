"""The checker on random histories: good ones are clean, and one change for the worse is found."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.checker import Bounds, check
from tests.support.history import Event
from tests.support.random_history import good_history

BOUNDS = Bounds(claim_interval_s=1, finish_s=5)


@given(seed=st.integers(min_value=0, max_value=2**32))
def test_random_good_histories_are_clean(seed: int) -> None:
    report = check(good_history(random.Random(seed)), bounds=BOUNDS)
    assert report.clean, report


class UnsuitableError(Exception):
    """There is nothing in this history that could be spoilt in this way."""


def pick(rng: random.Random, events: list[Event]) -> Event:
    if not events:
        raise UnsuitableError
    return events[int(rng.random() * len(events))]


def of(events: list[Event], f: str, kind: str = "ok") -> list[Event]:
    return [event for event in events if event.f == f and event.type == kind]


def with_value(event: Event, **changes: object) -> Event:
    return Event(event.t, event.process, event.type, event.f, event.key, {**(event.value or {}), **changes})


def whole(events: list[Event]) -> list[Event]:
    """Results of lines whose unit was neither cancelled nor of unknown outcome."""
    accepted = {event.key for event in of(events, "upload")}
    cancelled = {event.key for event in events if event.f == "cancel"}
    return [
        event
        for event in of(events, "result")
        if (event.key or "").split("-")[0] in accepted - cancelled and (event.value or {}).get("digest")
    ]


def lose(rng: random.Random, events: list[Event]) -> list[Event]:
    victim = pick(rng, whole(events))
    return [event for event in events if event.f != "result" or event.key != victim.key]


def double(rng: random.Random, events: list[Event]) -> list[Event]:
    return [*events, pick(rng, of(events, "result"))]


def change(rng: random.Random, events: list[Event]) -> list[Event]:
    victim = pick(rng, [event for event in whole(events) if event.process == "reader-2"])
    return [with_value(event, digest="changed") if event is victim else event for event in events]


def falsify(rng: random.Random, events: list[Event]) -> list[Event]:
    victim = pick(rng, whole(events))
    return [
        with_value(event, digest="false") if event.f == "result" and event.key == victim.key else event
        for event in events
    ]


def vanish(rng: random.Random, events: list[Event]) -> list[Event]:
    last = max(event.t for event in events if event.f == "result") if of(events, "result") else 0
    victim = pick(rng, [event for event in whole(events) if event.t > last - 0.05])
    return [event for event in events if event is not victim]


def purge(rng: random.Random, events: list[Event]) -> list[Event]:
    victim = pick(rng, whole(events))
    unit = (victim.key or "").split("-")[0]
    at = min(event.t for event in events if event.f == "export") - 0.001
    return [*events, Event(at, "client", "ok", "purge", unit)]


def repeat(rng: random.Random, events: list[Event]) -> list[Event]:
    victim = pick(rng, of(events, "dispatch", "invoke"))
    return [*events, Event(victim.t + 500, "upstream", "invoke", "dispatch", victim.key, {"n": -1, "line": victim.key})]


def rekey(rng: random.Random, events: list[Event]) -> list[Event]:
    calls = of(events, "dispatch", "invoke")
    victim = pick(rng, calls)
    other = pick(rng, [call for call in calls if call.key != victim.key])
    return [
        Event(event.t, event.process, event.type, event.f, other.key, event.value) if event is victim else event
        for event in events
    ]


def overtake(rng: random.Random, events: list[Event]) -> list[Event]:
    """The second line of a session is tried before the first was answered, and that is even on record."""
    sessions = {event.key for event in of(events, "upload", "invoke") if "session" in (event.value or {})}
    firsts = [event for event in of(events, "result") if event.key in {f"{unit}-1" for unit in sessions}]
    second = f"{(pick(rng, firsts).key or '').split('-')[0]}-2"
    if not any(event.key == second for event in of(events, "result")):
        raise UnsuitableError
    return [
        *events,
        Event(0.0, "upstream", "invoke", "dispatch", second, {"n": -1, "line": second}),
        Event(0.0, "reader", "info", "attempt", second, {"kind": "reclaim", "lease": 0}),
    ]


def relabel(rng: random.Random, events: list[Event]) -> list[Event]:
    """An outcome is settled under the lease that an earlier attempt lost."""
    lost = pick(rng, [event for event in events if event.f == "attempt"])
    if not any(event.key == lost.key for event in of(events, "result")):
        raise UnsuitableError
    lease = (lost.value or {})["lease"]
    return [
        with_value(event, lease=lease) if event.f == "result" and event.key == lost.key else event for event in events
    ]


def miscount(rng: random.Random, events: list[Event]) -> list[Event]:
    victim = pick(rng, of(events, "status"))
    more = (victim.value or {})["completed"] + 1
    return [with_value(event, completed=more) if event is victim else event for event in events]


def uncount(rng: random.Random, events: list[Event]) -> list[Event]:
    """A later read shows one less than there was."""
    victim = pick(rng, [event for event in of(events, "status") if (event.value or {})["completed"]])
    value = dict(victim.value or {})
    value["completed"] -= 1
    value["pending"] += 1
    return [*events, Event(5_000.0, "reader-3", "ok", "status", victim.key, value)]


def disobey(rng: random.Random, events: list[Event]) -> list[Event]:
    """Something of a cancelled batch is dispatched long after, and that is even on record."""
    unit = pick(rng, of(events, "cancel")).key
    line = f"{unit}-1"
    return [
        *events,
        Event(5_000.0, "upstream", "invoke", "dispatch", line, {"n": -1, "line": line}),
        Event(5_000.0, "reader", "info", "attempt", line, {"kind": "reclaim"}),
    ]


def dawdle(rng: random.Random, events: list[Event]) -> list[Event]:
    """Everything that shows the end is read much later."""
    pick(rng, whole(events))
    return [
        Event(event.t + 100, event.process, event.type, event.f, event.key, event.value)
        if event.process.startswith("reader-")
        else event
        for event in events
    ]


SPOILT: dict[str, Callable[[random.Random, list[Event]], list[Event]]] = {
    "I1 lost": lose,
    "I1 duplicated": double,
    "I2 changed": change,
    "I2 vanished": vanish,
    "I2 after purge": purge,
    "I3 wrong bytes": falsify,
    "I4 too many dispatches": repeat,
    "I4 shared key": rekey,
    "I5 overtaken": overtake,
    "I6": relabel,
    "I7 counts do not add up": miscount,
    "I7 count fell": uncount,
    "I8 dispatched after cancel": disobey,
    "I9 not finished": dawdle,
}


@pytest.mark.parametrize("expected", SPOILT)
@given(seed=st.integers(min_value=0, max_value=2**32))
def test_one_change_for_the_worse_is_found(expected: str, seed: int) -> None:
    rng = random.Random(seed)
    events = good_history(rng)
    try:
        spoilt = SPOILT[expected](rng, events)
    except UnsuitableError:
        assume(False)
    report = check(spoilt, bounds=BOUNDS)
    assert any(name.startswith(expected) for name in report.found), report
