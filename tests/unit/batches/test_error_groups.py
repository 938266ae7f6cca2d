from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batches.error_groups import fingerprint, is_fingerprint, stored_fingerprint

SAME = [
    ("row 17: price 3.50 is too low", "row 4: price 1,250.00 is too low"),
    ('no article "Chair 17" in stock', 'no article "Table" in stock'),
    ("no article 'Chair' in stock", "no article 'It' in stock"),
    ("can't find `a`, isn't there", "can't find `b c`, isn't there"),
    (
        "request 0b5f2d1e-dead-beef-cafe-0123456789ab failed",
        "request ffffffff-cafe-beef-dead-ffffffffffff failed",
    ),
    ("since 2024-05-01T10:00:00+02:00", "since 2025-12-24T23:59:59Z"),
    ("req_01HZY failed  at 10.0.0.7:443", "req_9A failed at 192.168.1.1:80"),
]
APART = [
    ("no such article", "no such order"),
    ("can't find it", "can't see it"),
    ("it's not Ann's", "it's not Bob's"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_numbers_and_quoted_parts_do_not_tell_errors_apart(one: str, other: str) -> None:
    assert fingerprint("code", 400, one) == fingerprint("code", 400, other)


@pytest.mark.parametrize(("one", "other"), APART)
def test_words_tell_errors_apart(one: str, other: str) -> None:
    assert fingerprint("code", None, one) != fingerprint("code", None, other)


def test_code_and_status_tell_errors_apart() -> None:
    assert len({fingerprint(code, status, "m") for code in ("a", "b") for status in (None, 400, 404)}) == 6


@given(st.text(), st.none() | st.integers(100, 599), st.text())
def test_a_fingerprint_is_sixteen_digits_and_fits_the_column(code: str, status: int | None, message: str) -> None:
    text = fingerprint(code, status, message)
    assert is_fingerprint(text)
    assert 0 <= stored_fingerprint(text) < 2**63
    assert fingerprint(code, status, message) == text


@pytest.mark.parametrize("text", ["", "0" * 15, "0" * 17, "G" * 16, "A" * 16, "f" * 16, "0" * 16 + "\n"])
def test_what_is_no_fingerprint(text: str) -> None:
    assert not is_fingerprint(text)
