"""Numbers of lines, what old requests become, and which ordinals wait."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from msgspec import structs

from penstock.model import OutcomeState, parse_id, public_id
from penstock.moving.file_import import split_target
from penstock.moving.lanes import NO_WAIT, ImportLane, multirange
from penstock.moving.rows import CANCELLED, Answer, LineOrder, answer_of
from penstock.moving.source import RequestState, SourceRequest


@pytest.mark.parametrize(
    ("numbers", "lines"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([0, 1, 2], [1, 2, 3]),
        ([5, 9], [5, 9]),
        ([0, 0, 0, 7], [1, 2, 3, 8]),
        ([3, 3, 4, 9], [3, 4, 5, 9]),
        ([-2, 1], [1, 4]),
    ],
)
def test_lines_count_from_one_and_grow(numbers: list[int], lines: list[int]) -> None:
    order = LineOrder()
    assert [order.next(number) for number in numbers] == lines


def lane() -> ImportLane:
    return ImportLane(1, 1, 0, "model", "/v1", "pool", None)


def filled(waits: str) -> ImportLane:
    """A lane: `.` was never tried, `r` waits for another try, `c` is completed, `f` failed."""
    made = lane()
    for ordinal, what in enumerate(waits):
        made.seen += 1
        if what in "cf":
            made.settle(ordinal, completed=what == "c")
        else:
            made.wait(ordinal, 2 if what == "r" else 1, NO_WAIT)
    return made


@pytest.mark.parametrize(
    ("what", "cursor", "deferred"),
    [
        ("", 0, {}),
        ("....", 0, {}),
        ("cccc", 4, {}),
        ("cc..", 2, {}),
        ("..cc", 4, {1: "{[0,2)}"}),
        (".c.f..", 4, {1: "{[0,1),[2,3)}"}),
        ("..r..", 3, {1: "{[0,2)}", 2: "{[2,3)}"}),
        ("rr", 2, {2: "{[0,2)}"}),
    ],
)
def test_what_was_never_tried_lies_beyond_the_cursor(what: str, cursor: int, deferred: dict[int, str]) -> None:
    made = filled(what)
    found = {each.attempt: multirange(each.ordinals) for each in made.take_deferrals()}
    assert (made.next, found) == (cursor, deferred)
    assert made.take_deferrals() == []


def test_a_deferral_has_so_many_ranges_and_no_more() -> None:
    made = filled("rc" * 1_234)
    parts = made.take_deferrals()
    assert [len(part.ordinals) for part in parts] == [500, 500, 234]


def request(state: int, **changes: Any) -> SourceRequest:
    given = SourceRequest(1, bytes(16), state, 2, 200, 5, NO_WAIT, 7, b"", b"a", b'{"usage":{"prompt_tokens":3}}', None)
    return structs.replace(given, **changes)


def test_an_answer_keeps_its_bytes_and_counts_its_attempts() -> None:
    answer = answer_of(request(RequestState.COMPLETED), 1, None)
    assert isinstance(answer, Answer)
    assert (answer.state, answer.attempts, answer.status) == (OutcomeState.COMPLETED, 3, 200)
    assert answer.response == b'{"usage":{"prompt_tokens":3}}'
    assert answer.usage is not None
    assert answer.usage.input_tokens == 3


@pytest.mark.parametrize(
    ("text", "stored"),
    [(b"", b'""'), (b"no json", b'"no json"'), ('"é"'.encode(), '"é"'.encode()), (b"NaN", b'"NaN"'), (None, None)],
)
def test_an_answer_that_is_no_json_becomes_a_text(text: bytes | None, stored: bytes | None) -> None:
    answer = answer_of(request(RequestState.COMPLETED, response=text), 1, None)
    assert answer is not None
    assert answer.response == stored


def test_a_request_that_is_not_run_has_an_outcome_only_with_a_reason() -> None:
    pending = request(RequestState.PENDING, custom_id=None)
    assert answer_of(pending, 4, None) is None
    skipped = answer_of(pending, 4, CANCELLED)
    assert skipped is not None
    assert (skipped.state, skipped.custom_id, skipped.error_code) == (OutcomeState.SKIPPED, b"line-4", "cancelled")


def test_a_model_may_hold_anything_but_is_told_apart() -> None:
    assert split_target("/v1/a\x1fm\x1fPOST") == ("/v1/a", "m", "POST")
    assert split_target("/v1/a\x1fm\x1fn\x1fPOST") == ("/v1/a", "m\x1fn", "POST")


def test_ids_of_the_old_system_are_ids() -> None:
    uuid = uuid4()
    assert {
        parse_id("batch", text) for text in (str(uuid), str(uuid).upper(), f"batch_{uuid}", public_id("batch", uuid))
    } == {uuid}
    for text in (uuid.hex, f"file-{uuid}", f"batch_{uuid.hex.upper()}", f"{uuid}x", f"batch_{uuid}-", ""):
        assert parse_id("batch", text) is None, text
