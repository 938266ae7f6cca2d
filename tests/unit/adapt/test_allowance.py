"""Headers about budgets: a bucket that refills all the time, or a window that ends."""

from __future__ import annotations

import pytest

from penstock.adapt.allowance import Allowance, Budget
from penstock.dispatch.http.answer import read_budgets


def test_a_bucket_has_the_rate_at_which_it_refills() -> None:
    allowance = Allowance()
    for number in range(8):
        missing = 20 + 10 * number
        allowance.observe(Budget(150, 150 - missing, missing / 150), 0.1 * number)
    assert allowance.per_s == pytest.approx(150)


def test_what_is_left_of_a_window_lasts_until_it_ends() -> None:
    allowance = Allowance()
    for second in range(20):
        allowance.observe(Budget(600, 600 - 30 * second, 60.0 - second), float(second))
    assert allowance.per_s == pytest.approx((600 - 30 * 19) / 41)


def test_headers_that_say_nothing_are_not_believed() -> None:
    allowance = Allowance()
    for number in range(20):
        allowance.observe(Budget(-1, 0, 0), float(number))
        allowance.observe(Budget(100, 100, 0), float(number))
    assert allowance.per_s is None


@pytest.mark.parametrize(
    ("headers", "kinds"),
    [
        (
            {
                "x-ratelimit-limit-requests": "100",
                "x-ratelimit-remaining-requests": "40",
                "x-ratelimit-reset-requests": "1m0s",
                "x-ratelimit-limit-tokens": "9000",
                "x-ratelimit-remaining-tokens": "8000",
                "x-ratelimit-reset-tokens": "12ms",
            },
            {"requests": Budget(100, 40, 60), "tokens": Budget(9000, 8000, 0.012)},
        ),
        (
            {
                "anthropic-ratelimit-requests-limit": "50",
                "anthropic-ratelimit-requests-remaining": "49",
                "anthropic-ratelimit-requests-reset": "2026-01-01T00:00:10Z",
            },
            {"requests": Budget(50, 49, 10)},
        ),
        ({"x-ratelimit-limit-requests": "many", "x-ratelimit-reset-requests": "1s"}, {}),
        ({}, {}),
    ],
)
def test_headers_are_read(headers: dict[str, str], kinds: dict[str, Budget]) -> None:
    assert read_budgets(headers, 1_767_225_600.0) == kinds
