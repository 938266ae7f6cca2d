"""The most memory `penstock run` ever needs, for a short file and for a long one.

    python -m bench.memory [--quick]

The whole way: a JSONL file stored, worked off by a function that does nothing, and exported again. Counted is the
process that was started (its largest resident set, as the kernel reports it at its end); PostgreSQL has its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from bench.ground import options, print_table, sized
from penstock.model import Item

ROOT = Path(__file__).parents[1]
BODY = '{"model": "m", "input": "' + "x" * 570 + '"}'
ANSWER = b'{"output": "' + b"y" * 486 + b'"}'
COMMAND = ["run", "in.jsonl", "--processor", "bench.memory:answer", "--data-dir", "data", "--json", "-o", "out.jsonl"]


def answer(_: Item) -> bytes:
    return ANSWER


def main() -> None:
    chosen = options(__doc__).parse_args()
    sizes = (sized(chosen, 10_000, 1_000), sized(chosen, 1_000_000, 20_000))
    found = [_measure(lines) for lines in sizes]
    least = found[0][0]
    print_table(
        ["lines", "peak MiB", "ratio", "seconds"],
        [
            [f"{lines:,}", f"{peak:.0f}", f"{peak / least:.2f}", f"{seconds:.1f}"]
            for lines, (peak, seconds) in zip(sizes, found, strict=True)
        ],
    )


def _measure(lines: int) -> tuple[float, float]:
    """Peak MiB and seconds of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        _write(folder / "in.jsonl", lines)
        started = perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *COMMAND],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        with (folder / "out.jsonl").open("rb") as output:
            answers = sum(1 for _ in output)
    if process.returncode != 0 or answers != lines:
        raise AssertionError(f"exit code {process.returncode}, {answers} answers of {lines}")
    return usage.ru_maxrss / 1024, seconds


def _write(path: Path, lines: int) -> None:
    with path.open("w", encoding="ascii") as file:
        for line in range(lines):
            file.write(f'{{"custom_id": "r{line}", "method": "POST", "url": "/v1/responses", "body": {BODY}}}\n')


if __name__ == "__main__":
    main()
