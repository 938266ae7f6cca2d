"""Kill a run three times on the way, run the same command each time, and count what was lost and what repeated.

    python -m bench.kill_resume [--lines 100000] [--kills 3] [--seed 1] [--concurrency 64] [--workers 1]

Exits with 1 unless every request has exactly one answer and no call was repeated that no kill explains.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.support.cli import (
    ask,
    call_count,
    calls_by_key,
    check_agreement,
    check_answers,
    finish,
    ids_of,
    opened,
    start_cli,
    write_requests,
)
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.wait import wait_until

DEADLINE_S = 600.0
_CLIENTS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'penstock run%'"


@dataclass(frozen=True, slots=True)
class Standing:
    """What the upstream saw and what the database knows, once both have come to rest."""

    calls: int
    outcomes: int
    retries: int

    @property
    def unrecorded(self) -> int:
        return self.calls - self.outcomes - self.retries


def read_standing(mock: MockProcess, data_dir: Path) -> Standing:
    wait_until(lambda: mock.stats()["in_flight"] == 0, DEADLINE_S)
    with opened(data_dir) as connection:
        # A statement that was sent before the kill is still carried out.
        wait_until(lambda: ask(connection, _CLIENTS) == 0, DEADLINE_S)
        return Standing(
            call_count(mock),
            ask(connection, "SELECT count(*) FROM penstock.outcomes"),
            ask(connection, "SELECT count(*) FROM penstock.attempts WHERE not_before IS NOT NULL"),
        )


def measure(arguments: argparse.Namespace, directory: Path, mock: MockProcess) -> int:
    lines, kills = arguments.lines, arguments.kills
    source = write_requests(directory / "requests.jsonl", lines, models=("small", "large"))
    output, data_dir = directory / "answers.jsonl", directory / "data"
    command = (
        *("run", source, "--base-url", mock.base_url, "-o", output, "--data-dir", data_dir, "--json"),
        *("--concurrency", str(arguments.concurrency), "--workers", str(arguments.workers)),
    )
    rng, lost, begun = random.Random(arguments.seed), 0, monotonic()
    for number in range(kills):
        point = int(lines * (number + rng.uniform(0.1, 0.9)) / kills)
        with start_cli(*command, cwd=directory) as process:
            wait_until(lambda point=point: call_count(mock) >= point, DEADLINE_S)  # type: ignore[misc]
            process.kill()
            process.wait()
        seen = read_standing(mock, data_dir)
        print(f"kill {number + 1}: {seen.outcomes:,} recorded, {seen.unrecorded - lost:,} calls lost with the process")
        lost = seen.unrecorded
    with start_cli(*command, cwd=directory) as process:
        summary = finish(process, DEADLINE_S).expect(0).summary
    seconds = monotonic() - begun
    check_answers(output, ids_of(lines))
    with opened(data_dir) as connection:
        check_agreement(connection)
    seen = read_standing(mock, data_dir)
    print(f"{lines:,} requests, {summary['completed']:,} answers, each exactly once, in {seconds:.1f} s")
    print(f"{seen.calls:,} calls = {lines:,} + {seen.retries:,} retries on record + {seen.unrecorded:,} repeated")
    print(f"lost with {kills} kills: {lost:,}; repeated beyond that: {seen.unrecorded - lost:,}")
    return 0 if seen.unrecorded == lost and len(calls_by_key(mock)) == lines else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    behaviour = ("--latency", "5ms..20ms", "--error-rate", "0.5%", "--seed", str(arguments.seed))
    with tempfile.TemporaryDirectory() as directory, start_mock_process(*behaviour) as mock:
        return measure(arguments, Path(directory), mock)


if __name__ == "__main__":
    sys.exit(main())
