"""Adaptive batches of an intake against every fixed size, for rows of three sizes and for small files.

    python -m bench.intake_batches [--megabytes 20] [--rounds 3] [--quick]

A batch is one COPY and one transaction. The sizes take turns; the least of each size's rounds counts, in seconds and in
CPU seconds of client and server, which other work on the machine disturbs less. Ratios are of the best fixed size to
adaptive: above 1 where adaptive takes less.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import process_time, sleep
from typing import NamedTuple
from unittest import mock
from uuid import uuid4

import psutil
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


class Cost(NamedTuple):
    """Of one intake."""

    seconds: float
    cpu_s: float
    """Of this process and of the server's."""

    def rate(self, size: int) -> str:
        return f"{size / self.seconds / 1e6:,.0f} / {size / self.cpu_s / 1e6:,.0f}"

    def ratios(self, other: Cost) -> tuple[str, str]:
        return f"{self.seconds / other.seconds:.2f}", f"{self.cpu_s / other.cpu_s:.2f}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    amount = (2 if chosen.quick else chosen.megabytes) * 1_000_000
    rounds = 1 if chosen.quick else chosen.rounds
    with server() as running, scratch_database(running) as conninfo, tempfile.TemporaryDirectory() as folder:
        table = []
        for row_bytes, sizes in ROWS.items():
            lines = amount // row_bytes
            path = _write(Path(folder) / f"{row_bytes}.jsonl", row_bytes, lines)
            found = _measure(conninfo, path, (*sizes, ADAPTIVE), rounds)
            rates = [f"{found[rows].rate(amount)} ({rows:,})" for rows in sizes]
            best = Cost(min(found[rows].seconds for rows in sizes), min(found[rows].cpu_s for rows in sizes))
            table.append([f"{row_bytes:,} B", *rates, found[ADAPTIVE].rate(amount), *best.ratios(found[ADAPTIVE])])
        head = [
            "MB a second / a CPU second",
            *["fixed (rows)"] * 4,
            "adaptive",
            "ratio",
            "CPU ratio",
        ]
        print_table(head, table)
        table = []
        for lines in SMALL:
            path = _write(Path(folder) / f"small-{lines}.jsonl", 200, lines)
            found = _measure(conninfo, path, (50_000, ADAPTIVE), 4 * rounds)
            times = [f"{each.seconds * 1000:.0f}" for each in found.values()]
            table.append([f"{lines:,} rows", *times, found[50_000].ratios(found[ADAPTIVE])[0]])
        print_table(["small files", "one batch, ms", "adaptive, ms", "ratio"], table)


def _measure(conninfo: str, path: Path, sizes: Sequence[int], rounds: int) -> dict[int, Cost]:
    """The least cost of an intake, by rows a batch."""
    costs: dict[int, list[Cost]] = {rows: [] for rows in sizes}
    for number in range(rounds):
        for rows in random.Random(number).sample(sizes, len(sizes)):
            with psycopg.connect(conninfo, autocommit=True) as connection, _batches_of(rows):
                connection.execute("TRUNCATE penstock.templates")
                before_s = _cpu_s(connection)
                seconds = timed(lambda: ingest_file(conninfo, path, owner="bench", worker_id=uuid4()))
                costs[rows].append(Cost(seconds, _cpu_s(connection) - before_s))
    return {rows: Cost(min(c.seconds for c in each), min(c.cpu_s for c in each)) for rows, each in costs.items()}


def _cpu_s(connection: psycopg.Connection) -> float:
    """CPU seconds so far of this process and of all connections that have ended, once only this one is left."""
    server = psutil.Process(connection.info.backend_pid).parent()
    others = b"SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    while server is None or connection.execute(others).fetchone() == (True,):
        sleep(0.005)
    sleep(0.02)  # until the server has seen the process end
    times = server.cpu_times()
    return process_time() + times.children_user + times.children_system


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
