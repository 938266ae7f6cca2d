"""A short chaos run over sessions: every kind of fault, and each caller gets its own answer, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.plan import SESSIONS, Act, make_plan
from tests.chaos.session_run import SECTIONS, SessionSettings, run_sessions
from tests.chaos.table import table
from tests.support.prepared import Prepared
from tests.support.schedule import Rhythm

SHORT = Rhythm(
    storm_ms=22_000, calm_ms=5_000, gap_min_ms=300, gap_max_ms=1_200, freeze_min_ms=4_500, freeze_max_ms=6_000
)
SECONDS = 27


@pytest.mark.parametrize("seed", range(1, 21))
def test_a_plan_has_every_kind_of_fault_and_ends_healed(seed: int) -> None:
    plan = make_plan(seed, SECONDS, 2, SHORT, SESSIONS)
    assert plan == make_plan(seed, SECONDS, 2, SHORT, SESSIONS)
    assert {action.act for action in plan.actions} == set(SESSIONS.acts)
    assert plan.actions[-1].act is Act.HEAL


@pytest.mark.slow
def test_a_short_run_is_clean(tmp_path: Path, prepared: Prepared) -> None:
    prepared(tmp_path / "data")
    settings = SessionSettings(
        tmp_path,
        make_plan(1, SECONDS, 2, SHORT, SESSIONS),
        replicas=2,
        sessions=40,
        requests=8,
        finish_s=120,
        concurrency=2,
        wait_s=3,
    )
    outcome = run_sessions(settings)
    print(table(outcome, SECTIONS))
    # Whether every fault found something to hit depends on the machine, in so short a time: `make chaos` insists on it.
    assert not outcome.report.found, table(outcome, SECTIONS)
    assert not outcome.problems, table(outcome, SECTIONS)
    assert outcome.report.seen["kill"], table(outcome, SECTIONS)
