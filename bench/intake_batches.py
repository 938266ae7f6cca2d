"""Adaptive batches of an intake against every fixed size, for rows of three sizes and for small files.

    python -m bench.intake_batches [--megabytes 30] [--rounds 5] [--quick]

A batch is one COPY and one transaction. The sizes take turns; the fastest round of each counts, which other work on the
machine disturbed least. A ratio above 1 means that adaptive batches are faster than the best fixed size.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from uuid import uuid4

import psycopg

from bench.ground import options, print_table, scratch_database, server, timed, words
from penstock.adapt.intake_batch import IntakeBatchSize, MeasuredBatch
from penstock.config import MIB, IntakeLimits
from penstock.intake.ingest import ingest_file

ADAPTIVE = 0
ROWS = {200: (64, 512, 4_096, 50_000), 2_000: (64, 512, 4_096, 16_000), 200_000: (1, 8, 64, 160)}
"""Fixed sizes, by the bytes of a row. The last is as much as a batch may hold."""
SMALL = (10, 100, 1_000, 5_000)
"""Rows of the small files, of 200 B each."""


class FixedSize(IntakeBatchSize):
    """Learns nothing."""

    def __init__(self, limits: IntakeLimits, rows: int) -> None:
        super().__init__(limits)
        self.rows, self.bytes = rows, 32 * MIB

    def observe(self, batch: MeasuredBatch) -> None:
        pass


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--megabytes", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    amount = (2 if chosen.quick else chosen.megabytes) * 1_000_000
    rounds = 1 if chosen.quick else chosen.rounds
    with server() as running, scratch_database(running) as conninfo, tempfile.TemporaryDirectory() as folder:
        table = []
        for row_bytes, sizes in ROWS.items():
            lines = amount // row_bytes
            path = _write(Path(folder) / f"{row_bytes}.jsonl", row_bytes, lines)
            found = _measure(conninfo, path, (*sizes, ADAPTIVE), rounds)
            rates = [f"{rows:,}: {amount / found[rows] / 1e6:,.0f}" for rows in sizes]
            best_s = min(found[rows] for rows in sizes)
            table.append([f"{row_bytes:,} B", *rates, f"{amount / found[ADAPTIVE] / 1e6:,.0f}"])
            table[-1].append(f"{best_s / found[ADAPTIVE]:.2f}")
        print_table(["rows of", *["rows a batch: MB/s"] * 4, "adaptive, MB/s", "ratio to the best"], table)
        table = []
        for lines in SMALL:
            path = _write(Path(folder) / f"small-{lines}.jsonl", 200, lines)
            found = _measure(conninfo, path, (50_000, ADAPTIVE), 8 * rounds)
            times = [f"{found[rows] * 1000:.1f}" for rows in (50_000, ADAPTIVE)]
            table.append([f"{lines:,} rows", *times, f"{found[50_000] / found[ADAPTIVE]:.2f}"])
        print_table(["small files, 200 B a row", "one batch, ms", "adaptive, ms", "ratio"], table)


def _measure(conninfo: str, path: Path, sizes: Sequence[int], rounds: int) -> dict[int, float]:
    """Least seconds of an intake, by rows a batch."""
    seconds: dict[int, list[float]] = {rows: [] for rows in sizes}
    for number in range(rounds):
        for rows in random.Random(number).sample(sizes, len(sizes)):
            with psycopg.connect(conninfo, autocommit=True) as connection:
                connection.execute("TRUNCATE penstock.templates")
            with _batches_of(rows):
                seconds[rows].append(timed(lambda: ingest_file(conninfo, path, owner="bench", worker_id=uuid4())))
    return {rows: min(times) for rows, times in seconds.items()}


@contextmanager
def _batches_of(rows: int) -> Iterator[None]:
    if rows == ADAPTIVE:
        yield
    else:
        with mock.patch("penstock.intake.copying.IntakeBatchSize", lambda limits: FixedSize(limits, rows)):
            yield


def _write(path: Path, row_bytes: int, lines: int) -> Path:
    start, end = '{"model": "m", "messages": [{"role": "user", "content": "', '"}]}'
    chance = random.Random(row_bytes)
    texts = [words(row_bytes - len(start) - len(end), chance) for _ in range(10)]
    with path.open("w") as file:
        for number in range(lines):
            head = f'{{"custom_id": "r{number}", "method": "POST", "url": "/v1/chat/completions", "body": '
            file.write(f"{head}{start}{texts[number % 10]}{end}}}\n")
    return path


if __name__ == "__main__":
    main()
