from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapt.apportion import apportion, apportion_rate


@pytest.mark.parametrize(
    ("limit", "wants", "shares"),
    [
        (40, {"a": 100, "b": 100}, {"a": 20, "b": 20}),
        (41, {"a": 100, "b": 100}, {"a": 21, "b": 20}),
        (40, {"a": 3, "b": 100}, {"a": 3, "b": 37}),
        (40, {"a": 0, "b": 100}, {"a": 0, "b": 40}),
        (40, {"a": 0, "b": 10}, {"a": 15, "b": 25}),
        (2, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "c": 0}),
        (0, {"a": 1}, {"a": 0}),
        (5, {}, {}),
    ],
)
def test_shares(limit: int, wants: dict[str, int], shares: dict[str, int]) -> None:
    assert apportion(limit, wants) == shares


@given(st.integers(0, 500), st.dictionaries(st.integers(), st.integers(0, 300), max_size=12))
def test_shares_add_up_and_nobody_gets_less_than_another_who_wants_less(limit: int, wants: dict[int, int]) -> None:
    shares = apportion(limit, wants)
    assert sum(shares.values()) == (limit if wants else 0)
    for key, share in shares.items():
        assert share >= min(wants[key], limit // max(1, len(wants)))


def test_a_rate_goes_to_those_who_call() -> None:
    parts = apportion_rate(100.0, {"a": 30, "b": 10, "c": 0})
    assert sum(parts.values()) == pytest.approx(100)
    assert parts["a"] == pytest.approx(3 * parts["b"])
    assert 0 < parts["c"] < 1
