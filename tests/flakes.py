"""Looks for tests that fail once in a while: every test, round after round, in random order, on busy cores.

    make flakes MINUTES=60 SEED=1
    make flakes MINUTES=5 TESTS="tests/flow/db/test_pool.py"

A round is one run of the whole selection, its order drawn from the seed and the round's number. Twice as many test
processes as cores, and one process that only burns time, keep every core busy to the end of a round. New rounds are
started until the minutes are over. At the end every test that failed is listed with how often; the log of each round
with a failure is kept in `.flakes/`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

KEPT = Path(".flakes")


def main() -> int:
    parser = argparse.ArgumentParser(description="run tests over and over and list which failed")
    parser.add_argument("--minutes", type=float, default=60.0, help="start rounds for so long (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the orders (default 1)")
    parser.add_argument("tests", nargs="*", help="what pytest is given (default: everything `make test` runs)")
    chosen = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    runs: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    began = time.monotonic()
    number = 0
    burner = multiprocessing.Process(target=_burn, daemon=True)
    burner.start()
    try:
        while not number or time.monotonic() - began < chosen.minutes * 60:
            number += 1
            seed = chosen.seed * 1000 + number
            report, log = KEPT / f"{seed}.xml", KEPT / f"{seed}.log"
            round_began = time.monotonic()
            code = _run_round(seed, report, log, chosen.tests)
            found = _read(report) if report.exists() else {f"round {seed}: no report, see {log}": f"exit code {code}"}
            runs.update(found.keys())
            failed = {name: reason for name, reason in found.items() if reason is not None}
            if code and not failed:
                failed = {f"round {seed}: pytest ended with {code}, see {log}": ""}
            failures.update(failed.keys())
            reasons |= {name: reason or "" for name, reason in failed.items()}
            minutes = (time.monotonic() - round_began) / 60
            print(f"round {number}, --shuffle {seed}: {len(found)} tests, {len(failed)} failed, {minutes:.1f} min")
            for name, reason in failed.items():
                print(f"  {name}\n    {reason}", flush=True)
            report.unlink(missing_ok=True)
            if not failed:
                log.unlink()
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        burner.terminate()
    spent = (time.monotonic() - began) / 60
    print(f"{number} rounds, {sum(runs.values())} test runs, {spent:.0f} minutes, {len(failures)} tests failed")
    for name, times in failures.most_common():
        print(f"  {times} of {runs[name] or number}  {name}\n      {reasons[name]}")
    return 1 if failures else 0


def _burn() -> None:
    while os.getppid() != 1:
        sum(range(100_000))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure in the log at once: a round may be ended before its report is written."""
    if report.failed:
        print(f"\n{report.nodeid} failed in its {report.when}\n{report.longreprtext[-2000:]}", flush=True)


def _run_round(seed: int, report: Path, log: Path, tests: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-n", str(2 * (os.cpu_count() or 1)), "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "-p", "tests.flakes", "--shuffle", str(seed), f"--junitxml={report}", *tests]
    with log.open("wb") as out:
        return subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode


def _read(report: Path) -> dict[str, str | None]:
    """Each test and why it failed, None if it did not."""
    found: dict[str, str | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        wrong = next((part for kind in ("failure", "error") if (part := case.find(kind)) is not None), None)
        reason = None if wrong is None else " ".join((wrong.get("message") or "").split())[:300]
        found[name] = found.get(name) or reason
    return found


if __name__ == "__main__":
    sys.exit(main())
