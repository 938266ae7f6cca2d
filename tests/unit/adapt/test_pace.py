"""Claims follow the time an item takes on its route, and get smaller when CPU or memory is short."""

from __future__ import annotations

import pytest

from penstock.adapt.pace import Pace
from penstock.adapt.pressure import Figures, claim_factor
from penstock.config import GIB, MIB, ClaimLimits

LIMITS = ClaimLimits(claim_min=8, claim_max=1_000, claim_slice_s=5, claim_safety=0.7)


def observed(**seconds: float) -> Pace:
    pace = Pace(LIMITS)
    for route, item_s in seconds.items():
        for _ in range(50):
            pace.observe(item_s, route)
    return pace


def test_each_route_has_its_own_time() -> None:
    pace = observed(slow=1.0, quick=0.05)
    assert pace.claim_size(16, "slow") == 56  # 5 s / 1 s * 16 * 0.7
    assert pace.claim_size(4, "quick") == 280
    assert pace.claim_size(16, "quick") == 1_000


def test_a_route_not_seen_yet_starts_at_the_least() -> None:
    assert Pace(LIMITS).claim_size(64, "new") == 8
    assert observed(quick=0.001).claim_size(64, "new") == 8


def test_a_timeout_is_a_sample() -> None:
    pace = observed(model=0.1)
    before = pace.claim_size(16, "model")
    for _ in range(10):
        pace.observe(120.0, "model")
    assert pace.claim_size(16, "model") == 8 < before


def test_slots_are_filled_whatever_the_route() -> None:
    assert Pace(LIMITS).claim_size(64) == 64
    assert observed(slow=600.0).claim_size(64) == 64


def test_shares_are_even_and_fit_the_route() -> None:
    pace = observed(slow=1.0, quick=0.001)
    assert pace.shares(["slow", "quick", "new"], 600, 16) == {"slow": 56, "quick": 200, "new": 8}
    assert pace.shares(["slow", "quick"], 1, 16) == {"slow": 1, "quick": 1}


def test_only_so_many_routes_are_remembered() -> None:
    pace = observed(first=0.01, kept=0.01)
    for number in range(999):
        pace.observe(1.0, f"route-{number}")
    assert pace.claim_size(1, "first") == 8
    assert pace.claim_size(1, "kept") == 350


def test_claims_get_smaller_when_something_is_short() -> None:
    pace = observed(model=0.1)
    assert (pace.claim_size(16, "model"), pace.claim_size(16)) == (560, 560)
    pace.factor = 0.25
    assert (pace.claim_size(16, "model"), pace.claim_size(16)) == (140, 140)
    quick = observed(model=0.000_1)
    quick.factor = 0.25
    assert quick.claim_size(16, "model") == 250
    idle = Pace(LIMITS, factor=0.25)
    assert idle.claim_size(64) == 16


MEMORY = {"available_bytes": 8 * GIB, "total_bytes": 16 * GIB}


@pytest.mark.parametrize(
    ("figures", "factor"),
    [
        (Figures(**MEMORY), 1.0),
        (Figures(available_bytes=2 * GIB, total_bytes=16 * GIB), 0.625),
        (Figures(available_bytes=100 * MIB, total_bytes=16 * GIB), 0.25),
        (Figures(**MEMORY, limit_bytes=GIB, used_bytes=512 * MIB), 1.0),
        (Figures(**MEMORY, limit_bytes=GIB, used_bytes=1000 * MIB), 0.25),
        (Figures(**MEMORY, limit_bytes=GIB, used_bytes=2 * GIB), 0.25),
        (Figures(**MEMORY, limit_bytes=64 * GIB, used_bytes=63 * GIB), 1.0),
        (Figures(**MEMORY, loop_lag_s=0.02), 1.0),
        (Figures(**MEMORY, loop_lag_s=0.275), 0.625),
        (Figures(**MEMORY, loop_lag_s=3.0), 0.25),
        (Figures(available_bytes=100 * MIB, total_bytes=16 * GIB, loop_lag_s=3.0), 0.25),
    ],
)
def test_the_scarcest_counts(figures: Figures, factor: float) -> None:
    assert claim_factor(figures) == pytest.approx(factor)
