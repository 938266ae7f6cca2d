"""Run the measurements, all of them or those named, each in a process of its own.

python -m bench                     print every table
python -m bench peers memory        these alone
python -m bench --quick             small sizes, to see that everything runs
python -m bench --record [NAME...]  write what was measured into RESULTS.md
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"

# In the order they are run, with what makes each a matter of seconds.
QUICK: Mapping[str, Sequence[str]] = {
    "peers": ["--quick"],
    "engine": ["--quick"],
    "constant_cost": ["--quick"],
    "memory": ["--quick"],
    "intake": ["--lines", "20000", "--rounds", "1"],
    "intake_batches": ["--quick"],
    "limits": ["--quick"],
    "dispatch_overhead": ["--items", "20000", "--rounds", "1"],
    "http_clients": ["--requests", "1000", "--rounds", "1"],
    "kill_resume": ["--lines", "3000", "--kills", "1"],
    "lost_worker": ["--quick"],
    "upload": ["--quick"],
    "erase": ["--quick"],
    "followers": ["--quick"],
    "sessions": ["--quick"],
    "idle": ["--quick"],
    "turns": ["--quick"],
    "shares": ["--quick"],
    "bodies": ["--quick"],
    "held_snapshot": ["--quick"],
    "pending": ["--quick"],
    "console_queries": ["--quick"],
    "jobs": ["--quick"],
    "moving": ["--quick"],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run the measurements.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of: {', '.join(QUICK)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--record", action="store_true", help=f"write the figures into {RESULTS.name}")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in QUICK:
            parser.error(f"there is no measurement '{name}': choose from {', '.join(QUICK)}")
    if chosen.quick and chosen.record:
        parser.error("figures of --quick runs are not worth recording")
    failed = []
    for name in chosen.names or QUICK:
        print(f"# {name}\n", flush=True)
        code, printed = run(name, QUICK[name] if chosen.quick else [])
        if code:
            failed.append(name)
        elif chosen.record:
            record(name, printed)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Its exit code and what it printed, which is passed on as it comes."""
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", f"bench.{name}", *arguments],
        cwd=HERE.parent,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    print(flush=True)
    return process.returncode, "".join(lines)


def record(name: str, printed: str) -> None:
    """Replace what stands between the measurement's marks."""
    text = printed.strip()
    if not text.startswith("|"):
        text = f"```text\n{text}\n```"
    day = datetime.now(UTC).date().isoformat()
    section = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    results, count = section.subn(
        lambda marks: f"{marks[1]}\nMeasured on {day}.\n\n{text}\n\n{marks[2]}", RESULTS.read_text("utf-8")
    )
    if count != 1:
        raise AssertionError(f"{RESULTS.name} has no place for '{name}'")
    RESULTS.write_text(results, "utf-8")


if __name__ == "__main__":
    sys.exit(main())
