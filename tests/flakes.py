"""Looks for tests that fail once in a while: every test, round after round, in random order, on busy cores.

    make flakes MINUTES=60 SEED=1
    make flakes MINUTES=5 TESTS="tests/flow/db/test_pool.py"

A round is one run of the whole selection, its order drawn from the seed and the round's number. Twice as many test
processes as cores, and one process that only burns time, keep every core busy to the end of a round. Rounds follow one
another until the minutes are over; the round under way is interrupted then, and what it has run counts. A failure is
printed when it happens. At the end every test that failed is listed with how often; the log of each round with a
failure is kept in `.flakes/`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

KEPT = Path(".flakes")
SAY_EVERY_S = 60.0
_RESULTS = "FLAKES_RESULTS"
"""The variable that tells a round where to write its results, a JSON array of name and reason for each."""


def main() -> int:
    parser = argparse.ArgumentParser(description="run tests over and over and list which failed")
    parser.add_argument("--minutes", type=float, default=60.0, help="for so long (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of the orders (default 1)")
    parser.add_argument("tests", nargs="*", help="what pytest is given (default: everything `make test` runs)")
    chosen = parser.parse_args()
    KEPT.mkdir(exist_ok=True)
    burner = multiprocessing.Process(target=_burn, daemon=True)
    burner.start()
    tally = Tally()
    began = time.monotonic()
    until = began + chosen.minutes * 60
    number = 0
    try:
        while time.monotonic() < until:
            number += 1
            _run_round(chosen.seed * 1000 + number, chosen.tests, until, tally)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        burner.terminate()
    spent = (time.monotonic() - began) / 60
    print(f"{number} rounds, {tally.runs.total()} test runs, {spent:.0f} minutes, {len(tally.failures)} tests failed")
    for name, times in tally.failures.most_common():
        print(f"  {times} of {tally.runs[name]}  {name}\n      {tally.reasons[name]}")
    return 1 if tally.failures else 0


class Tally:
    """How often each test was run and has failed, and why it last did."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def add_failure(self, name: str, reason: str) -> None:
        self.failures[name] += 1
        self.reasons[name] = reason
        print(f"  {name}\n    {reason}", flush=True)


def _run_round(seed: int, tests: list[str], until: float, tally: Tally) -> None:
    """One run of the selection, interrupted when the time is over."""
    results, log = KEPT / f"{seed}.results", KEPT / f"{seed}.log"
    results.write_bytes(b"")
    command = [sys.executable, "-m", "pytest", "-n", str(2 * (os.cpu_count() or 1)), "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "-p", "tests.flakes", "--shuffle", str(seed), *tests]
    print(f"round --shuffle {seed}, log in {log}", flush=True)
    began, ran, failed_before = time.monotonic(), set[str](), tally.failures.total()
    with log.open("wb") as out, results.open(encoding="utf-8") as lines:
        environment = os.environ | {_RESULTS: str(results)}
        with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as process:
            code = None
            while code is None and (left_s := until - time.monotonic()) > 0:
                try:
                    code = process.wait(min(SAY_EVERY_S, left_s))
                except subprocess.TimeoutExpired:
                    print(f"  {len(ran)} tests after {(time.monotonic() - began) / 60:.0f} min", flush=True)
                for name, reason in _read(lines):
                    if name not in ran:
                        ran.add(name)
                        tally.runs[name] += 1
                    if reason is not None:
                        tally.add_failure(name, reason)
            if code is None:  # what fails from here on fails of the interrupt
                process.send_signal(signal.SIGINT)
    failed = tally.failures.total() - failed_before
    if code and not failed:
        tally.add_failure(f"round {seed}: see {log}", f"pytest ended with {code}")
    print(f"  {len(ran)} tests in {(time.monotonic() - began) / 60:.1f} min, {failed} failed", flush=True)
    results.unlink()
    if tally.failures.total() == failed_before:
        log.unlink()


def _read(lines: Iterator[str]) -> Iterator[tuple[str, str | None]]:
    """What came since the last time: each test, and why it failed if it did."""
    for line in lines:
        name, reason = json.loads(line)
        yield name, reason


def _burn() -> None:
    while os.getppid() != 1:
        sum(range(100_000))


def pytest_configure(config: pytest.Config) -> None:
    """Have the process that collects what the test processes report write it down."""
    if not hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind `&` ignores interrupts
        config.pluginmanager.register(_Recorder(Path(os.environ[_RESULTS])))


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._lines = path.open("a", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\n{report.nodeid} failed in its {report.when}\n{report.longreprtext[-2000:]}", flush=True)
        if report.failed or report.when == "call":
            self._lines.write(json.dumps([report.nodeid, _reason(report) if report.failed else None]) + "\n")
            self._lines.flush()

    def pytest_unconfigure(self) -> None:
        self._lines.close()


def _reason(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else report.longreprtext).split())[:300]


if __name__ == "__main__":
    sys.exit(main())
