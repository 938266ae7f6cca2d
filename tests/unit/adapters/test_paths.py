"""Paths below an adapter's root: none leads out of it, and a pattern says which are files to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.paths import Pattern, explain_bad_path


@pytest.mark.parametrize("path", ["a.csv", "2024/may.csv", "ä b/%2e%2e/x.csv", "..a/b..", "a" * 1024])
def test_paths_below_the_root(path: str) -> None:
    assert explain_bad_path(path) is None


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "from 1 to 1,024"),
        ("ä" * 513, "1,026 bytes"),
        ("/etc/passwd", "not a relative path"),
        ("../secret", "not a relative path"),
        ("a/../../secret", "not a relative path"),
        ("a//b", "not a relative path"),
        ("a/./b", "not a relative path"),
        ("a/", "not a relative path"),
        ("..\\secret", "backslash"),
        ("a\r\nDELE b", "control character"),
        ("a\0b", "control character"),
        ("\udcff.csv", "not UTF-8"),
    ],
)
def test_paths_that_lead_elsewhere_are_refused(path: str, words: str) -> None:
    assert words in (explain_bad_path(path) or "")


@given(st.text(st.sampled_from("a./\\\0\n"), max_size=12))
def test_no_path_that_passes_leads_up(path: str) -> None:
    if explain_bad_path(path) is None:
        assert not path.startswith("/")
        assert ".." not in path.split("/")


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("*.csv", ["a.csv", "b c.csv"], ["a.txt", "x/a.csv", ".a.csv", "a.csv.part", "a.CSV"]),
        ("**/*", ["a", "x/y/z.csv"], [".a", "x/.y/z.csv", "x/.z"]),
        ("in/*/r?ws.[1].csv", ["in/a/rows.[1].csv"], ["in/rows.[1].csv", "in/a/b/rows.[1].csv", "in/a/rows.1.csv"]),
        ("a/**/b.csv", ["a/b.csv", "a/x/y/b.csv"], ["b.csv", "a/xb.csv"]),
    ],
)
def test_patterns(pattern: str, matching: list[str], others: list[str]) -> None:
    compiled = Pattern(pattern)
    assert [path for path in matching + others if compiled.matches(path)] == matching


def test_only_directories_that_can_hold_a_match_are_entered() -> None:
    assert not Pattern("*.csv").deep
    assert not Pattern("*.csv").enters("a")
    assert Pattern("*/*.csv").enters("a")
    assert not Pattern("*/*.csv").enters("a/b")
    assert Pattern("**/*.csv").enters("a/b/c")
    assert not Pattern("**/*.csv").enters("a/.git")


@pytest.mark.parametrize("pattern", ["/a", "../*", "a//b", "**", "a**/b", "a/**.csv"])
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Pattern(pattern)
