"""The checker on results and dispatches: exactly one, the same bytes, the right bytes, no more calls than explained."""

from __future__ import annotations

import pytest

from tests.support import checker
from tests.support.checker import Bounds, check
from tests.support.story import Shelf, Story, finished, row, rows, served

BOUNDS = Bounds(claim_interval_s=1, finish_s=5)
SHELF = Shelf()


# -- I1: exactly one


@SHELF.add_bad("I1 lost")
def an_accepted_line_without_a_result() -> Story:
    story = served(3)
    story.export("u", {"u-1": row("d1"), "u-3": row("d3")})
    return story


@SHELF.add_bad("I1 lost")
def nothing_but_an_empty_export() -> Story:
    story = Story()
    story.upload("u", 1)
    story.export("u", {})
    return story


@SHELF.add_bad("I1 lost")
def a_failed_cancel_is_no_excuse() -> Story:
    story = served(2)
    story.end("cancel", "u", "fail")
    story.export("u", {"u-1": row("d1")})
    return story


@SHELF.add_bad("I1 duplicated")
def a_line_twice_in_one_export() -> Story:
    story = served()
    story.export("u", rows(1), read="r")
    story.tell("ok", "result", "u-1", {"read": "r", **row("d1", 1)})
    return story


@SHELF.add_bad("I1 two states")
def a_line_with_two_states() -> Story:
    story = finished()
    story.export("u", {"u-1": row("d1", 1, "failed")})
    return story


@SHELF.add_bad("I1 unexpected")
def a_result_of_a_rejected_upload() -> Story:
    story = finished()
    story.upload("v", 2, "fail")
    story.export("v", {"v-1": row(None, None, "failed")})
    return story


@SHELF.add_bad("I1 unexpected")
def a_dispatch_of_a_rejected_upload() -> Story:
    story = finished()
    story.upload("v", 2, "fail")
    story.call("v-2", "x")
    return story


@SHELF.add_bad("I1 unexpected")
def a_result_of_a_line_nobody_uploaded() -> Story:
    story = finished()
    story.export("v", {"v-1": row(None, None, "failed")})
    return story


@SHELF.add_bad("I1 partial")
def half_of_an_upload_with_unknown_outcome() -> Story:
    story = Story()
    story.upload("u", 2, "info")
    story.call("u-1", "d1")
    story.export("u", {"u-1": row("d1")})
    return story


@SHELF.add_bad("I1 partial")
def half_of_an_upload_that_never_ended() -> Story:
    story = Story()
    story.upload("u", 2, "invoke")
    story.call("u-1", "d1")
    story.export("u", {"u-1": row("d1")})
    return story


@SHELF.add_good
def uploads_with_unknown_outcomes_are_whole_or_absent() -> Story:
    story = Story()
    for unit in ("u", "v"):
        story.upload(unit, 1, "info")
    story.call("u-1", "d1")
    story.export("u", rows(1))
    return story


@SHELF.add_good
def an_upload_that_was_tried_again() -> Story:
    story = Story()
    story.upload("u", 1, "info")
    story.upload("u", 1, "fail")
    story.upload("u", 1)
    story.call("u-1", "d1")
    story.export("u", rows(1))
    return story


@SHELF.add_good
def a_cancelled_unit_need_not_have_all_results() -> Story:
    story = served(1)
    story.upload("v", 5)
    story.end("cancel", "v", "info")
    story.export("u", rows(1))
    return story


# -- I2: the same bytes


@SHELF.add_bad("I2 changed")
def bytes_that_changed() -> Story:
    story = finished()
    story.call("u-1", "other")
    story.record("u-1", "retry", 0)
    story.export("u", {"u-1": row("other", 1)})
    return story


@SHELF.add_bad("I2 changed")
def a_lease_that_changed() -> Story:
    story = finished()
    story.export("u", {"u-1": row("d1", 9)})
    return story


@SHELF.add_bad("I2 vanished")
def a_result_that_vanished() -> Story:
    story = finished(2)
    story.export("u", {"u-1": row("d1", 1)})
    return story


@SHELF.add_bad("I2 after purge")
def a_result_after_its_purge() -> Story:
    story = finished()
    story.end("purge", "u")
    story.export("u", rows(1))
    return story


@SHELF.add_good
def a_read_that_had_begun_before_the_purge() -> Story:
    story = served()
    story.tell("invoke", "export", "u", {"read": "r"})
    story.tell("invoke", "purge", "u", process="other")
    story.tell("ok", "purge", "u", process="other")
    story.tell("ok", "result", "u-1", {"read": "r", **row("d1", 1)})
    story.tell("ok", "export", "u", {"read": "r"})
    story.export("u", {})
    return story


@SHELF.add_good
def an_export_that_was_cut_off_shows_less() -> Story:
    story = finished(2)
    story.export("u", {"u-1": row("d1", 1)}, whole=False)
    return story


@SHELF.add_good
def an_export_that_began_before_another_ended_may_show_less() -> Story:
    story = served(2)
    story.tell("invoke", "export", "u", {"read": "early"}, process="other")
    story.export("u", rows(2))
    story.tell("ok", "export", "u", {"read": "early"}, process="other")
    return story


# -- I3: bytes that the upstream sent


@SHELF.add_bad("I3 wrong bytes")
def bytes_that_were_never_sent() -> Story:
    story = served()
    story.export("u", {"u-1": row("invented")})
    return story


@SHELF.add_bad("I3 wrong bytes")
def the_bytes_of_another_line() -> Story:
    story = served(2)
    story.export("u", {"u-1": row("d2", 1), "u-2": row("d2", 2)})
    return story


@SHELF.add_bad("I3 wrong bytes")
def bytes_that_were_read_before_they_were_sent() -> Story:
    story = Story()
    story.upload("u", 1)
    number = story.begin("u-1")
    story.export("u", {"u-1": row("d1", 1)})
    story.answer(number, "u-1", "d1")
    return story


@SHELF.add_bad("I3 no bytes")
def completed_without_a_body() -> Story:
    story = served()
    story.export("u", {"u-1": row(None, 1)})
    return story


@SHELF.add_good
def a_failure_of_our_own_has_no_body() -> Story:
    story = served()
    story.export("u", {"u-1": row(None, 1, "failed")})
    return story


# -- I4: bounded dispatches, one key


@SHELF.add_bad("I4 too many dispatches")
def a_dispatch_that_nothing_explains() -> Story:
    story = served()
    story.call("u-1", "again")
    story.export("u", rows(1))
    return story


@SHELF.add_bad("I4 too many dispatches")
def more_dispatches_than_a_unit_has_on_record() -> Story:
    story = served(2)
    for line in ("u-1", "u-2"):
        story.call(line, f"{line} again")
    story.tell("info", "attempt", "u", {"kind": "reclaim", "count": 1})
    story.export("u", rows(2))
    return story


@SHELF.add_bad("I4 different key")
def two_idempotency_keys_of_one_line() -> Story:
    story = served()
    story.begin("u-1", key="u-1-b")
    story.record("u-1", "retry", 0)
    story.export("u", rows(1))
    return story


@SHELF.add_bad("I4 shared key")
def one_idempotency_key_of_two_lines() -> Story:
    story = Story()
    story.upload("u", 2)
    for number in (1, 2):
        story.answer(story.begin(f"u-{number}", key="the same"), "the same", f"d{number}")
    story.export("u", rows(2))
    return story


@SHELF.add_good
def dispatches_that_are_on_record() -> Story:
    story = Story()
    story.upload("u", 1)
    for lease, kind in enumerate(("retry", "reclaim", "given_back"), 1):
        story.begin("u-1")
        story.record("u-1", kind, lease)
    story.call("u-1", "d")
    story.export("u", {"u-1": row("d", 4)})
    return story


@SHELF.add_good
def reclaims_on_record_for_the_unit_as_a_whole() -> Story:
    story = served(3)
    story.begin("u-1")
    story.begin("u-3")
    story.tell("info", "attempt", "u", {"kind": "reclaim", "count": 2})
    story.export("u", rows(3))
    return story


@pytest.mark.parametrize("name", SHELF.bad)
def test_what_is_wrong_is_found(name: str) -> None:
    expected, tell = SHELF.bad[name]
    report = check(tell().events, bounds=BOUNDS)
    assert report.found[expected] >= 1, report
    assert not report.clean
    assert expected in str(report)
    assert expected[3:] in (checker.__doc__ or ""), "every kind is documented"


@pytest.mark.parametrize("name", SHELF.good)
def test_what_is_right_is_clean(name: str) -> None:
    report = check(SHELF.good[name]().events, bounds=BOUNDS)
    assert report.clean, report


def test_each_invariant_is_here() -> None:
    assert {expected[:2] for expected, _ in SHELF.bad.values()} == {"I1", "I2", "I3", "I4"}
