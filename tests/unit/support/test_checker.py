"""The checker's report: what was seen, what is missing, what was skipped; and its speed.

What it finds is in test_checker_results.py, test_checker_order.py and test_checker_random.py.
"""

from __future__ import annotations

import random
from time import process_time

import pytest

from tests.support.checker import SHOWN_PER_KIND, check
from tests.support.history import BrokenHistoryError, Event
from tests.support.random_history import long_history
from tests.support.story import Story, finished


def test_what_was_seen_is_counted() -> None:
    story = finished(2)
    story.upload("v", 1, "fail")
    story.upload("w", 1, "info")
    for f in ("kill", "stop", "cont", "swallow"):
        story.fault(f)
    story.tell("info", "already_applied", "worker-1", {"count": 3})
    story.record("u-1", "fence", 0)
    seen = check(story.events).seen
    assert {
        kind: seen[kind]
        for kind in ("dispatch", "answer", "result", "rejected", "unknown", "kill", "stop", "fence", "already_applied")
    } == {
        **{"dispatch": 2, "answer": 2, "result": 2, "rejected": 1, "unknown": 1, "kill": 1, "stop": 1, "fence": 1},
        **{"already_applied": 3},
    }


def test_a_report_is_void_without_what_was_required() -> None:
    events = finished().events
    assert check(events, require=["dispatch", "result"]).clean
    report = check(events, require=["dispatch", "fence", "bisect"])
    assert (report.clean, report.missing, report.violations) == (False, ("fence", "bisect"), [])
    assert "void: no fence was seen" in str(report)


def test_an_invariant_without_events_is_skipped_and_named() -> None:
    assert set(check(finished().events).skipped) == {"I5", "I7", "I8", "I9", "I10"}
    assert set(check([]).skipped) == {f"I{number}" for number in range(1, 11)}


def test_of_many_violations_the_first_are_shown_and_all_are_counted() -> None:
    story = Story()
    story.upload("u", 1_000)
    story.export("u", {})
    report = check(story.events)
    assert report.found["I1 lost"] == 1_000
    assert len(report.violations) == SHOWN_PER_KIND


def test_events_may_come_in_any_order() -> None:
    events = finished(5).events
    random.Random(1).shuffle(events)
    assert check(events).clean


@pytest.mark.parametrize(
    "event",
    [
        Event(9.0, "upstream", "ok", "dispatch", "u-1", {"n": 99, "digest": "d"}),
        Event(9.0, "client", "invoke", "upload", "v", {"lines": ["u-1"]}),
        Event(9.0, "client", "invoke", "status"),
    ],
    ids=["an answer without a call", "a line uploaded twice", "no key"],
)
def test_a_history_that_makes_no_sense_is_refused(event: Event) -> None:
    with pytest.raises(BrokenHistoryError):
        check([*finished().events, event])


def test_long_histories_are_no_trouble() -> None:
    events = long_history(200_000)
    started = process_time()
    report = check(events)
    assert report.clean, report
    # Processor time, since other tests may be running; a second or two on an old laptop's core.
    assert process_time() - started < 6
