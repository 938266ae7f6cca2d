"""python -m tests.attacks --minutes M"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from penstock.db.embedded import postgres
from penstock.db.migrate import migrate
from tests.attacks.attackers import NAMES
from tests.attacks.run import MIB, run, table
from tests.attacks.test_attacks import RSS_BUDGET_MIB
from tests.support.disks import disk, in_a_mount_namespace

DISK_BYTES = 4 * 1024 * MIB
MAX_RATIO = 3.0
_TIMED = ("upload", "batch", "session", "list")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attacks", description="Attacks beside a tenant that behaves; see docs/testing.md."
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", default="", choices=NAMES, help="one of the attacks, to find out what it does alone")
    options = parser.parse_args()
    if (again := in_a_mount_namespace()) is not None:
        return again
    with tempfile.TemporaryDirectory(prefix="attacks-") as place:
        directory = Path(place)
        data = disk(directory / "data", DISK_BYTES)
        with postgres.acquire(data.path) as database:
            migrate(database.conninfo)
            seconds = 60 * options.minutes
            outcome = run(
                directory,
                database.conninfo,
                alone_s=max(20, seconds / 10),
                beside_s=seconds,
                only=options.only,
                data=data,
            )
        data.unmount()
    print(table(outcome))
    slow = [step for step in _TIMED if outcome.ratio(step) > MAX_RATIO]
    if slow:
        print(f"more than {MAX_RATIO:g} times as slow as alone: {', '.join(slow)}")
    heavy = outcome.max_rss > RSS_BUDGET_MIB * MIB
    if heavy:
        print(f"more memory than {RSS_BUDGET_MIB} MiB")
    return 1 if slow or heavy or outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
