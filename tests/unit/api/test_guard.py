"""Pace at which the bodies of refused requests are dropped."""

from __future__ import annotations

import pytest

from penstock.api.guard import DropPace

MIB = 1024 * 1024


def test_what_many_refused_requests_of_an_owner_still_send_is_dropped_at_one_pace() -> None:
    pace = DropPace()
    for _ in range(28):
        rest_s = pace.rest_s("a", 4 * MIB)
    assert rest_s == pytest.approx(28 * 4 / 64, rel=0.1)
    assert pace.rest_s("b", 64 * 1024) < 0.01, "another owner does not wait for it"
