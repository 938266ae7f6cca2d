"""The checker on sessions whose callers come one by one: their places, their attempts, their answers."""

from __future__ import annotations

import pytest

from tests.support import checker
from tests.support.checker import check
from tests.support.history import BrokenHistoryError
from tests.support.story import Shelf, Story, row

SHELF = Shelf()


class Talk(Story):
    """One session `s`, a unit of one line for each request."""

    def send(self, line: str) -> None:
        self.tell("invoke", "upload", line, {"lines": [line], "session": "s"}, process=line)
        self.tell("invoke", "ask", line, process=line)

    def answered(self, line: str, place: int, digest: str, session: str = "s") -> None:
        self.tell("ok", "upload", line, {"first": place}, process=line)
        value = {"state": "completed", "digest": digest, "session": session, "place": place}
        self.tell("ok", "ask", line, value, process=line)

    def served(self, line: str, place: int) -> None:
        self.call(line, line)
        self.answered(line, place, line)

    def stored(self, line: str, place: int, digest: str | None = None) -> None:
        """As somebody reads it from the database in the end."""
        self.tell("ok", "upload", line, {"lines": [line], "session": "s", "first": place}, process="reader")
        self.tell("ok", "result", line, {"read": "last", **row(digest or line, place)}, process="reader")


def talk(*lines: str) -> Talk:
    """So many requests, sent at once and answered one after the other."""
    story = Talk()
    for line in lines:
        story.send(line)
    for place, line in enumerate(lines, 1):
        story.served(line, place)
    return story


# -- one at a time, in order


@SHELF.add_bad("I5 overtaken")
def the_next_while_one_is_in_flight() -> Story:
    story = Talk()
    story.send("a")
    story.send("b")
    first = story.begin("a")
    second = story.begin("b")
    story.answer(first, "a", "a")
    story.answered("a", 1, "a")
    story.answer(second, "b", "b")
    story.answered("b", 2, "b")
    return story


@SHELF.add_bad("I5 overtaken")
def the_third_before_the_second() -> Story:
    story = Talk()
    for line in "abc":
        story.send(line)
    for line, place in (("a", 1), ("c", 3), ("b", 2)):
        story.served(line, place)
    return story


@SHELF.add_bad("I5 two at once")
def the_same_request_by_two_workers() -> Story:
    story = Talk()
    story.send("a")
    one = story.begin("a")
    two = story.begin("a")
    story.answer(one, "a", "a")
    story.answer(two, "a", "a again")
    story.answered("a", 1, "a")
    # It was tried again because of an error: that gives nobody leave to begin before it has ended.
    story.record("a", "retry", 1)
    return story


def left_and_tried_again(noticed_after_s: float) -> Talk:
    """A call that ran out of time; the upstream heard of its end when the next one had begun."""
    story = Talk()
    story.send("a")
    story.begin("a")
    story.wait(2)
    again = story.begin("a")
    story.wait(noticed_after_s)
    story.tell("fail", "dispatch", "a", {"n": again - 1}, process="upstream")
    story.answer(again, "a", "a")
    story.answered("a", 1, "a")
    story.record("a", "retry", 0)
    story.stored("a", 1)
    return story


@SHELF.add_good
def an_end_that_was_noticed_a_little_late() -> Story:
    return left_and_tried_again(0.1)


@SHELF.add_bad("I5 two at once")
def a_call_that_went_on_after_it_ran_out_of_time() -> Story:
    return left_and_tried_again(1)


@SHELF.add_bad("I5 two places")
def told_one_place_and_stored_in_another() -> Story:
    story = talk("a")
    story.stored("a", 2)
    return story


@SHELF.add_bad("I5 same place")
def two_callers_told_the_same_place() -> Story:
    story = Talk()
    for line in "ab":
        story.send(line)
        story.served(line, 1)
    return story


@SHELF.add_good
def requests_one_after_the_other() -> Story:
    story = talk("a", "b", "c")
    for place, line in enumerate("abc", 1):
        story.stored(line, place)
    return story


@SHELF.add_good
def two_at_once_after_a_reclaim() -> Story:
    story = Talk()
    story.send("a")
    story.send("b")
    zombie = story.begin("a")
    story.served("a", 1)
    story.begin("b")
    story.answer(zombie, "a", "too late")
    story.served("b", 2)
    story.record("a", "reclaim", 0)
    story.record("b", "reclaim", 1)
    story.stored("a", 1)
    story.stored("b", 2)
    return story


# -- each request once


@SHELF.add_bad("I1 lost")
def confirmed_and_never_answered() -> Story:
    story = talk("a")
    story.tell("invoke", "upload", "b", {"lines": ["b"], "session": "s"})
    story.tell("ok", "upload", "b", {"first": 2})
    return story


@SHELF.add_bad("I1 duplicated")
def a_repeated_call_that_became_two_requests() -> Story:
    story = talk("a")
    story.stored("a", 1)
    story.stored("a", 2)
    return story


@SHELF.add_bad("I4 too many dispatches")
def called_again_for_no_reason() -> Story:
    story = Talk()
    story.send("a")
    story.call("a", "first")
    story.served("a", 1)
    return story


@SHELF.add_bad("I2 changed")
def told_one_thing_and_stored_another() -> Story:
    story = Talk()
    story.send("a")
    story.call("a", "first")
    story.served("a", 1)
    story.record("a", "retry", 0)
    story.stored("a", 1, "first")
    return story


# -- callers


@SHELF.add_bad("I10 unanswered")
def a_caller_that_waits_for_ever() -> Story:
    story = talk("a")
    story.send("b")
    story.call("b", "b")
    story.stored("b", 2)
    return story


@SHELF.add_bad("I10 turned away")
def a_caller_that_is_turned_away() -> Story:
    story = talk("a")
    story.send("b")
    story.tell("fail", "ask", "b", process="b")
    return story


@SHELF.add_bad("I10 another's answer")
def answers_that_were_mixed_up() -> Story:
    story = Talk()
    story.send("a")
    story.send("b")
    story.call("a", "a")
    story.call("b", "b")
    story.answered("a", 1, "b")
    story.answered("b", 2, "a")
    return story


@SHELF.add_bad("I10 another's answer")
def an_answer_of_another_session() -> Story:
    story = Talk()
    story.send("a")
    story.call("a", "a")
    story.answered("a", 1, "a", session="t")
    return story


@SHELF.add_good
def a_caller_that_left_before_it_was_stored() -> Story:
    story = talk("a")
    story.send("b")
    story.tell("info", "ask", "b", process="b")
    return story


@SHELF.add_good
def a_caller_that_left_and_was_served() -> Story:
    story = talk("a")
    story.send("b")
    story.tell("info", "ask", "b", process="b")
    story.call("b", "b")
    story.stored("b", 2)
    return story


@pytest.mark.parametrize("name", SHELF.bad)
def test_what_is_wrong_is_found(name: str) -> None:
    expected, tell = SHELF.bad[name]
    report = check(tell().events)
    assert report.found[expected] >= 1, report
    assert not report.clean
    assert expected.partition(" ")[2] in (checker.__doc__ or ""), "every kind is documented"


@pytest.mark.parametrize("name", SHELF.good)
def test_what_is_right_is_clean(name: str) -> None:
    report = check(SHELF.good[name]().events)
    assert report.clean, report


def test_what_was_seen_is_counted() -> None:
    seen = check(two_at_once_after_a_reclaim().events).seen
    assert (seen["ask"], seen["asked"], seen["session"], seen["reclaim"]) == (2, 2, 1, 2)
    assert seen["overlap"] == 3  # two of them beside another attempt of their own, one beside a zombie before it
    assert check(a_caller_that_left_and_was_served().events).seen["left"] == 1


def test_nobody_ends_a_wait_that_never_began() -> None:
    story = Talk()
    story.tell("info", "ask", "a")
    with pytest.raises(BrokenHistoryError, match="never began"):
        check(story.events)
