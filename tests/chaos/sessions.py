"""python -m tests.chaos.sessions --seed N --sessions S --requests R --replicas P"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.plan import SESSIONS, make_plan
from tests.chaos.session_run import SECTIONS, SessionSettings, run_sessions
from tests.chaos.table import table
from tests.support.schedule import Rhythm

SECONDS = 150
FINISH_S = 240.0
LONG = Rhythm(
    storm_ms=50_000, calm_ms=25_000, gap_min_ms=500, gap_max_ms=2_000, freeze_min_ms=4_500, freeze_max_ms=7_000
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.sessions", description="A seeded run of faults over sessions; see docs/chaos.md."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--requests", type=int, default=20, help="per session")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of storms and calms; then all must be answered")
    parser.add_argument("--directory", type=Path, help="where everything is kept (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep histories and logs of a clean run too")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"{directory} is not empty")
    plan = make_plan(options.seed, options.seconds, options.replicas, LONG, SESSIONS)
    print(f"seed {plan.seed}, schedule {plan.digest}, in {directory}", flush=True)
    outcome = run_sessions(
        SessionSettings(directory, plan, options.replicas, options.sessions, options.requests, FINISH_S)
    )
    print(table(outcome, SECTIONS))
    if outcome.clean and not options.keep and options.directory is None:
        shutil.rmtree(directory)
    else:
        print(f"histories and logs are in {directory}")
    return 0 if outcome.clean else 1


if __name__ == "__main__":
    sys.exit(main())
