from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch.rows.answer_path import MISSING, find, parse_path
from penstock.errors import UsageError

ANSWER: dict[str, Any] = {
    "a": {"b": [{"c": 1}, {"c": None}, {"d": 3}], "odd name": "x", "é": 2},
    "rows": [{"tags": ["x", "y"]}, {"tags": []}, {"other": 1}, {"tags": ["z"]}],
    "empty": [],
    "0": "zero",
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", ANSWER),
        ("a.b[0].c", 1),
        ("a.b[1].c", None),
        ("a.b[-1].d", 3),
        ("a.é", 2),
        ('a["odd name"]', "x"),
        ('["a"].b[0]["c"]', 1),
        ("0", "zero"),
        ("a.b[*].c", [1, None, None]),
        ("a.b[*]", ANSWER["a"]["b"]),
        ("rows[*].tags[*]", ["x", "y", "z"]),
        ("rows[*].tags[0]", ["x", None, None, "z"]),
        ("empty[*].c", []),
        ("a.x", MISSING),
        ("a.b[3]", MISSING),
        ("a.b[-4]", MISSING),
        ("a.b.c", MISSING),
        ("a[0]", MISSING),
        ("a.x.y", MISSING),
        ("a[*].c", MISSING),
        ("a.b[0].c[*]", MISSING),
    ],
)
def test_what_a_path_leads_to(path: str, found: object) -> None:
    assert find(ANSWER, path) == found


@pytest.mark.parametrize("path", ["", "a", "[0]", "[*]"])
@pytest.mark.parametrize("answer", [None, 5, "text", True, MISSING])
def test_an_answer_that_is_no_object_has_nothing_inside(answer: object, path: str) -> None:
    assert find(answer, path) is (answer if path == "" else MISSING)


@pytest.mark.parametrize(
    "path", [".", "a.", ".a", "a..b", "a[", "a[]", "a[x]", "a[1", "a b", "a['b']", "a]", 'a["b', "a[0]b"]
)
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_path(path)
    assert caught.value.message == f"'{path}' is not a path"
    assert caught.value.hint == 'A path is written as a.b[0].c, a[*].b or a["odd name"].'


def test_what_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r'"\\q" is not a JSON string'):
        parse_path(r'a["\q"]')
    with pytest.raises(UsageError, match="has 33 steps"):
        parse_path("[0]" * 33)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(0, 3), max_size=8))
def test_any_value_can_be_reached(steps: list[str | int]) -> None:
    answer: Any = "here"
    for step in reversed(steps):
        answer = {step: answer} if isinstance(step, str) else [None] * step + [answer]
    path = "".join(f"[{json.dumps(step, ensure_ascii=False)}]" for step in steps)
    assert find(answer, path) == "here"


@given(st.text(alphabet='ab.[]*0-"\\ é', max_size=12))
def test_any_text_is_a_path_or_refused(path: str) -> None:
    with contextlib.suppress(UsageError):
        find(ANSWER, path)
