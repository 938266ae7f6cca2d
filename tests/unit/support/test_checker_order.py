"""The checker on order, leases, counts, cancels and liveness."""

from __future__ import annotations

import pytest

from tests.support import checker
from tests.support.checker import Bounds, check
from tests.support.story import Shelf, Story, finished, row, rows, served

BOUNDS = Bounds(claim_interval_s=1, finish_s=5)
SHELF = Shelf()


# -- I5: order in a session


def session(*, first_ends_late: bool) -> Story:
    story = Story()
    story.upload("u", 2, session="s")
    one = story.begin("u-1")
    if not first_ends_late:
        story.answer(one, "u-1", "d1")
    two = story.begin("u-2")
    if first_ends_late:
        story.answer(one, "u-1", "d1")
    story.answer(two, "u-2", "d2")
    story.export("u", rows(2))
    return story


@SHELF.add_bad("I5 overtaken")
def the_second_before_the_first_has_ended() -> Story:
    return session(first_ends_late=True)


@SHELF.add_bad("I5 overtaken")
def the_second_before_the_first_has_begun() -> Story:
    story = Story()
    story.upload("u", 2, session="s")
    story.call("u-2", "d2")
    story.call("u-1", "d1")
    story.export("u", rows(2))
    return story


@SHELF.add_bad("I5 overtaken")
def an_unaccepted_attempt_of_the_second_counts_too() -> Story:
    story = Story()
    story.upload("u", 2, session="s")
    story.begin("u-2")
    story.record("u-2", "reclaim", 0)
    story.call("u-1", "d1")
    story.call("u-2", "d2")
    story.export("u", rows(2))
    return story


@SHELF.add_bad("I5 overlap")
def an_attempt_that_goes_on_and_is_not_on_record() -> Story:
    story = Story()
    story.upload("u", 2, session="s")
    story.begin("u-1")
    story.call("u-1", "d1")
    story.call("u-2", "d2")
    story.export("u", rows(2))
    return story


@SHELF.add_bad("I5 late dispatch")
def a_late_attempt_of_the_first_that_is_only_a_retry() -> Story:
    story = Story()
    story.upload("u", 2, session="s")
    story.call("u-1", "d1")
    story.call("u-2", "d2")
    story.call("u-1", "late")
    story.record("u-1", "retry", 0)
    story.export("u", rows(2))
    return story


@SHELF.add_bad("I5 same place")
def two_lines_in_one_place() -> Story:
    story = finished(1, session="s")
    story.upload("v", 1, session="s")
    story.call("v-1", "e1")
    story.export("v", {"v-1": row("e1", 5)})
    return story


@SHELF.add_bad("I5 out of order")
def accepted_later_and_placed_before() -> Story:
    story = finished(1, session="s", first=2)
    story.upload("v", 1, session="s", first=1)
    return story


@SHELF.add_good
def a_session_in_order() -> Story:
    return session(first_ends_late=False)


@SHELF.add_good
def a_zombie_of_the_first_that_is_fenced() -> Story:
    story = Story()
    story.upload("u", 2, session="s")
    zombie = story.begin("u-1")
    story.call("u-1", "d1")
    story.begin("u-2")
    story.answer(zombie, "u-1", "too late")
    story.call("u-2", "d2")
    story.begin("u-1")  # another, that woke up before it had sent anything
    for lease in (-2, -1):
        story.record("u-1", "reclaim", lease)
        story.record("u-1", "fence", lease)
    story.record("u-2", "reclaim", 1)
    story.export("u", rows(2))
    return story


@SHELF.add_good
def concurrent_requests_of_a_session_may_come_in_any_order() -> Story:
    story = Story()
    story.tell("invoke", "upload", "a", {"lines": 1, "session": "s"}, process="one")
    story.tell("invoke", "upload", "b", {"lines": 1, "session": "s"}, process="two")
    story.tell("ok", "upload", "b", {"first": 1}, process="two")
    story.tell("ok", "upload", "a", {"first": 2}, process="one")
    for number, unit in enumerate("ba", 1):
        story.call(f"{unit}-1", unit)
        story.tell("ok", "result", f"{unit}-1", row(unit, number))
    return story


@SHELF.add_good
def two_sessions_have_nothing_to_do_with_each_other() -> Story:
    story = Story()
    for unit in "uv":
        story.upload(unit, 1, session=unit)
    story.call("v-1", "e1")
    story.call("u-1", "d1")
    story.export("u", rows(1))
    story.export("v", {"v-1": row("e1")})
    return story


# -- I6: leases


@SHELF.add_bad("I6 leases not increasing")
def leases_that_were_granted_out_of_order() -> Story:
    story = finished()
    for lease in (3, 1):
        story.tell("info", "lease", "u-1", {"lease": lease})
    return story


@SHELF.add_bad("I6 leases not increasing")
def an_outcome_under_a_lease_that_was_reclaimed() -> Story:
    story = served()
    story.begin("u-1")
    story.record("u-1", "reclaim", 5)
    story.export("u", {"u-1": row("d1", 5)})
    return story


@SHELF.add_bad("I6 leases not increasing")
def an_outcome_under_an_older_lease() -> Story:
    story = served()
    story.begin("u-1")
    story.record("u-1", "retry", 5)
    story.export("u", {"u-1": row("d1", 4)})
    return story


@SHELF.add_bad("I6 settled under a lost lease")
def an_outcome_under_a_fenced_lease() -> Story:
    story = finished()
    story.record("u-1", "fence", 1)
    return story


@SHELF.add_bad("I6 settled under a lost lease")
def an_outcome_under_a_lease_that_was_never_granted() -> Story:
    story = finished()
    story.tell("info", "lease", "u-1", {"lease": 7})
    return story


@SHELF.add_bad("I6 no lease")
def an_outcome_that_names_no_lease() -> Story:
    story = served()
    story.record("u-1", "fence", 1)
    story.export("u", {"u-1": row("d1", None)})
    return story


@SHELF.add_good
def a_fence_that_is_recorded_late() -> Story:
    story = served()
    story.begin("u-1")
    story.record("u-1", "reclaim", 1)
    story.record("u-1", "final", 2)
    story.record("u-1", "fence", 1)
    for lease in (1, 2):
        story.tell("info", "lease", "u-1", {"lease": lease})
    story.export("u", {"u-1": row("d1", 2)})
    return story


# -- I7: counts


@SHELF.add_bad("I7 counts do not add up")
def counts_that_do_not_add_up() -> Story:
    story = finished(3)
    story.status("u", 3, pending=1, completed=1)
    return story


@SHELF.add_bad("I7 count fell")
def a_terminal_count_that_falls() -> Story:
    story = finished(3)
    story.status("u", 3, completed=2, pending=1)
    story.status("u", 3, completed=1, pending=2)
    return story


@SHELF.add_bad("I7 count fell")
def a_total_that_falls() -> Story:
    story = finished(2, session="s")
    story.status("u", 2, pending=2)
    story.status("u", 1, pending=1)
    return story


@SHELF.add_bad("I7 wrong total")
def a_total_that_is_not_the_number_of_lines() -> Story:
    story = finished(3)
    story.status("u", 4, completed=4)
    return story


@SHELF.add_bad("I7 counts differ from results")
def counts_that_differ_from_the_results() -> Story:
    story = finished(2)
    story.status("u", 2, completed=1, failed=1)
    return story


@SHELF.add_good
def overlapping_reads_may_be_told_in_either_order() -> Story:
    story = finished(2)
    story.tell("invoke", "status", "u", process="slow")
    story.status("u", 2, completed=2)
    story.tell("ok", "status", "u", {"total": 2, "completed": 1, "in_flight": 1}, process="slow")
    story.status("u", 2, completed=2)
    return story


# -- I8: after a cancel


def dispatched_late(how: str) -> Story:
    story = served(2)
    story.end(how, "u")
    story.wait(1.1)
    story.begin("u-1")
    story.record("u-1", "retry", 0)
    story.export("u", {"u-1": row("d1", 1)})
    return story


@SHELF.add_bad("I8 dispatched after cancel")
def a_dispatch_after_a_cancel() -> Story:
    return dispatched_late("cancel")


@SHELF.add_bad("I8 dispatched after delete")
def a_dispatch_after_a_delete() -> Story:
    return dispatched_late("delete")


@SHELF.add_good
def a_dispatch_within_a_claim_interval_of_the_cancel() -> Story:
    story = served(2)
    story.end("cancel", "u")
    story.wait(0.9)
    story.begin("u-1")
    story.record("u-1", "retry", 0)
    story.export("u", {"u-1": row("d1", 1)})
    return story


@SHELF.add_good
def a_worker_that_stood_still_while_its_batch_was_cancelled() -> Story:
    story = Story()
    story.upload("u", 1)
    story.fault("stop")
    story.end("cancel", "u")
    story.wait(10)
    story.fault("cont")
    story.wait(0.5)
    story.begin("u-1")
    story.export("u", {})
    return story


# -- I9: finished after healing


@SHELF.add_bad("I9 not finished")
def unfinished_after_the_last_heal() -> Story:
    story = served()
    story.fault("kill")
    story.heal()
    story.wait(5.1)
    story.export("u", rows(1))
    return story


@SHELF.add_bad("I9 not finished")
def unfinished_in_a_healed_window_that_was_long_enough() -> Story:
    story = served()
    story.heal()
    story.wait(6)
    story.fault("pg_crash")
    story.heal()
    story.export("u", rows(1))
    return story


@SHELF.add_bad("I9 not finished")
def never_finished() -> Story:
    story = served()
    story.heal()
    story.status("u", 1, in_flight=1)
    return story


@SHELF.add_good
def finished_in_time_and_read_later() -> Story:
    story = served()
    story.heal()
    story.wait(4)
    story.status("u", 1, completed=1)
    story.wait(60)
    story.export("u", rows(1))
    return story


@SHELF.add_good
def a_healed_window_too_short_to_finish_in() -> Story:
    story = served()
    story.heal()
    story.wait(4)
    story.fault("cut")
    story.wait(4)
    story.heal()
    story.wait(4)
    story.export("u", rows(1))
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
    assert {expected[:2] for expected, _ in SHELF.bad.values()} == {"I5", "I6", "I7", "I8", "I9"}
