"""python -m tests.chaos --seed N --minutes M"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.plan import make_plan
from tests.chaos.run import Settings, run
from tests.chaos.table import table
from tests.support.schedule import Rhythm

FINISH_S = 30.0
# Calms are a little longer than what is demanded of them, so that they count.
LONG = Rhythm(storm_ms=30_000, calm_ms=31_000, gap_max_ms=1_500, freeze_min_ms=3_500, freeze_max_ms=6_000)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description="A seeded run of faults; see docs/chaos.md."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--lines", type=int, default=2_000, help="requests per file")
    parser.add_argument("--directory", type=Path, help="where everything is kept (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep histories and logs of a clean run too")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        parser.error(f"{directory} is not empty")
    plan = make_plan(options.seed, round(60 * options.minutes), options.workers, LONG)
    print(f"seed {plan.seed}, schedule {plan.digest}, in {directory}", flush=True)
    outcome = run(Settings(directory, plan, options.workers, options.lines, FINISH_S))
    print(table(outcome))
    if outcome.clean and not options.keep and options.directory is None:
        shutil.rmtree(directory)
    else:
        print(f"histories and logs are in {directory}")
    return 0 if outcome.clean else 1


if __name__ == "__main__":
    sys.exit(main())
