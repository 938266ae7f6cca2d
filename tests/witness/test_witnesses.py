"""Each guard of the engine is missed: without it, a named test fails. With it, the same test passes in this suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broken import VARIANTS
from tests.support.db import RUNNING_18

ROOT = Path(__file__).parent.parent.parent

WITNESSES = {
    "lease_check": "tests/flow/settle/test_fence.py::test_another_worker_cannot_settle[18]",
    "nonce": "tests/flow/settle/test_fence.py::test_a_lease_from_before_a_restore_settles_nothing[18]",
    "ordinal_check": "tests/flow/settle/test_fence.py::test_an_ordinal_the_lease_no_longer_holds_is_refused[18]",
    "counters_from_input": "tests/flow/settle/test_settle_buffer.py::test_results_of_a_lost_lease_are_refused[18]",
    "head_guard": "tests/flow/settle/test_fence.py::test_a_lane_of_width_one_waits_for_its_head[18]",
    "bisect": "tests/flow/settle/test_settle_buffer.py::test_one_row_that_cannot_be_stored_fails_alone[18-NUL]",
    "self_fence": "tests/flow/worker/test_liveness.py::TestWorker::test_silent_past_its_grace_it_fences_itself",
    "unseen_key": "tests/race/test_session_races.py::test_a_key_makes_one_request_whoever_comes_first[18-idle]",
    "session_head": "tests/flow/sessions/test_sessions_engine.py"
    "::test_each_request_is_claimed_for_what_it_asks_for[18]",
    "pause_lock": "tests/flow/batches/test_batches.py::test_a_deferral_written_during_a_pause_is_not_claimed",
}


def test_every_variant_has_a_witness() -> None:
    assert WITNESSES.keys() == VARIANTS.keys()


# Without these two the test waits for what will not come, until its time is up.
LONG = {"bisect", "self_fence"}


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=[pytest.mark.again] if name in LONG else []) for name in sorted(WITNESSES)],
)
def test_without_its_guard_a_named_test_fails(variant: str, server_18: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.broken", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "--timeout=20", WITNESSES[variant]],
        cwd=ROOT,
        env={**os.environ, RUNNING_18: server_18, "PENSTOCK_BROKEN": variant},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 1, f"the test passed, or did not run, without {variant}:\n{run.stdout}\n{run.stderr}"
    assert "1 failed" in run.stdout
    if variant not in LONG:
        assert "from pytest-timeout" not in run.stdout, f"the test did not fail, it hung:\n{run.stdout}"
