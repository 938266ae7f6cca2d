from __future__ import annotations

import pytest

from penstock.api.preferences import read_preferences, wait_s_of


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        (["respond-async, wait=10"], {"respond-async": "", "wait": "10"}),
        ([' Respond-Async ; x=1 ,\twait = "7" ;y'], {"respond-async": "", "wait": "7"}),
        (["wait=1", "wait=2, handling=lenient"], {"wait": "1", "handling": "lenient"}),
        (['foo=""'], {"foo": ""}),
    ],
)
def test_names_and_values(headers: list[str], found: dict[str, str]) -> None:
    assert read_preferences(headers) == found


@pytest.mark.parametrize(
    ("text", "wait_s"), [("wait=30", 30), ("wait=", None), ("wait=-1", None), ("wait=1e3", None), ("a", None)]
)
def test_seconds_to_wait(text: str, wait_s: float | None) -> None:
    assert wait_s_of(read_preferences([text])) == wait_s


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text", ["a=" + " " * 60_000 + '""x', " " * 60_000, "a" * 60_000, '="' * 30_000, ",;" * 30_000]
)
def test_a_whole_head_of_it_is_read_at_once(text: str) -> None:
    assert "wait" not in read_preferences([text])
