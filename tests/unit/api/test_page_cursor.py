from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.api.errors import ApiError
from penstock.api.page_cursor import MAX_CURSOR_CHARS, PageCursors

CURSORS = PageCursors(b"a secret of the server")
QUERY = ["items", {"statuses": ["PENDING"], "job": "job_7"}]
POSITION = [1_700_000_000_000_000, "item_9"]

texts = st.text(st.characters(codec="utf-8"), max_size=20)
positions = st.lists(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | texts, max_size=4)
queries = st.recursive(texts | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=4)


def refusal(text: str, owner: str = "ann", query: Any = QUERY) -> ApiError:
    with pytest.raises(ApiError) as caught:
        CURSORS.decode(text, owner=owner, query=query)
    return caught.value


def assert_refused(text: str, owner: str = "ann", query: Any = QUERY) -> None:
    """Refused as every other cursor is that cannot be used: no answer tells why."""
    told, usual = refusal(text, owner, query), refusal("")
    assert (told.status, told.message, told.param, told.code) == (400, usual.message, "after", "invalid_value")


@given(positions, texts, queries)
def test_a_position_comes_back(position: list[Any], owner: str, query: Any) -> None:
    text = CURSORS.encode(position, owner=owner, query=query)
    assert text.replace("-", "").replace("_", "").isalnum()
    assert CURSORS.decode(text, owner=owner, query=query) == position


@given(positions, texts, texts, queries, queries)
def test_another_owner_or_query_is_refused(position: list[Any], owner: str, other: str, query: Any, more: Any) -> None:
    assume((owner, query) != (other, more))
    assert_refused(CURSORS.encode(position, owner=owner, query=query), other, more)


@given(positions, st.data())
def test_a_changed_cursor_is_refused(position: list[Any], data: st.DataObject) -> None:
    text = CURSORS.encode(position, owner="ann", query=QUERY)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    changed = text[:start] + data.draw(st.text("AQgw_-=+/ \n", max_size=3) | texts) + text[end:]
    assume(changed != text)
    assert_refused(changed)


def test_every_change_of_one_bit_is_refused() -> None:
    signed = bytearray(base64.urlsafe_b64decode(CURSORS.encode(POSITION, owner="ann", query=QUERY) + "=="))
    for bit in range(8 * len(signed)):
        changed = bytearray(signed)
        changed[bit // 8] ^= 1 << bit % 8
        assert_refused(base64.urlsafe_b64encode(changed).rstrip(b"=").decode())


@given(
    texts
    | st.text("Aa0_-", max_size=2 * MAX_CURSOR_CHARS)
    | st.binary(max_size=99).map(lambda raw: raw.decode("latin-1"))
)
def test_garbage_is_refused(text: str) -> None:
    assert_refused(text)


@pytest.mark.parametrize("text", ["", "A", "=", "====", "A" * 43, "A" * 2_000_000, "\ud800", "é", "AA\0AA"])
def test_awkward_garbage_is_refused(text: str) -> None:
    assert_refused(text)


def test_a_cursor_of_another_secret_is_refused() -> None:
    assert_refused(PageCursors(b"another secret of a server").encode(POSITION, owner="ann", query=QUERY))


def test_the_refusal_names_the_parameter() -> None:
    with pytest.raises(ApiError) as caught:
        CURSORS.decode("x", owner="ann", query=QUERY, name="before")
    assert caught.value.message == "Invalid 'before': it is the cursor that the page before gave, for the same query."
    assert caught.value.param == "before"


def test_a_cursor_has_at_most_a_kibibyte() -> None:
    longest = "x" * (MAX_CURSOR_CHARS * 3 // 4 - 32 - len('[""]'))
    text = CURSORS.encode([longest], owner="ann", query=QUERY)
    assert len(text) == MAX_CURSOR_CHARS
    assert CURSORS.decode(text, owner="ann", query=QUERY) == [longest]
    with pytest.raises(ValueError, match="at most 1024"):
        CURSORS.encode([longest + "x"], owner="ann", query=QUERY)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 16"):
        PageCursors(b"short")
