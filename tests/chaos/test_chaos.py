"""A short chaos run: every kind of fault once or more, every effect seen, and nothing lost, doubled or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import BATCHES, Act, make_plan
from tests.chaos.run import Settings, run
from tests.chaos.table import table
from tests.support.prepared import Prepared
from tests.support.schedule import Rhythm

SHORT = Rhythm(
    storm_ms=18_000, calm_ms=15_000, gap_min_ms=300, gap_max_ms=1_200, freeze_min_ms=3_500, freeze_max_ms=4_500
)
SECONDS = 33


def test_the_same_seed_gives_the_same_plan() -> None:
    assert make_plan(7, SECONDS, 3, SHORT) == make_plan(7, SECONDS, 3, SHORT)
    assert make_plan(7, SECONDS, 3, SHORT).digest != make_plan(8, SECONDS, 3, SHORT).digest


@pytest.mark.parametrize("seed", range(1, 21))
def test_a_plan_has_every_kind_of_fault_and_ends_healed(seed: int) -> None:
    actions = make_plan(seed, SECONDS, 3, SHORT).actions
    assert {action.act for action in actions} == set(BATCHES.acts)
    assert actions[-1].act is Act.HEAL


@pytest.mark.slow
def test_a_short_run_is_clean(tmp_path: Path, prepared: Prepared) -> None:
    prepared(tmp_path / "data")
    outcome = run(Settings(tmp_path, make_plan(1, SECONDS, 3, SHORT), lines=1_500))
    print(table(outcome))
    # Whether every fault found something to hit depends on the machine, in so short a time: `make chaos` insists on it.
    assert not outcome.report.found, table(outcome)
    assert not outcome.problems, table(outcome)
    assert outcome.report.seen["kill"], table(outcome)
