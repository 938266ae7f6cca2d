"""Resolutions of charts: which one fits a time, and how many samples a batch can have."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from penstock.batches.samples import choose_resolution_s

AT = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("span_s", "resolution_s"),
    [(0, 1), (1_000, 1), (1_001, 10), (10_000, 10), (60_000, 60), (60_001, 600), (366 * 86_400, 86_400)],
)
def test_the_finest_resolution_of_a_thousand_points(span_s: int, resolution_s: int) -> None:
    assert choose_resolution_s(AT, AT + timedelta(seconds=span_s)) == resolution_s


def test_a_time_that_no_resolution_fits_has_the_coarsest() -> None:
    assert choose_resolution_s(AT, AT + timedelta(days=5_000)) == 86_400
