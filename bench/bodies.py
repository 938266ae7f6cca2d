"""How bodies and answers are best stored: compressed from 2 KB on, as PostgreSQL does by itself, or as they are.

    python -m bench.bodies [--megabytes 200] [--rounds 3] [--quick]

For each size a file of as many bodies as make up the amount is taken in, then claimed, read and settled with answers of
the same size on one connection, 1,000 at a time or 4 MB. Bodies are words drawn at random, so that they compress as
text does. The ways take turns; medians count.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from uuid import UUID, uuid4

import psycopg

from bench.ground import median, options, print_table, scratch_database, server, settle_down, words
from penstock.batches.create import create_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db import arrays
from penstock.intake.ingest import ingest_file
from penstock.model import Outcome, OutcomeState
from penstock.settle.write import Changes, settle

POOL, ROUTE = "bench", "m"
SIZES = (600, 4_000, 40_000)
WAYS = {"compressed (pglz)": "EXTENDED", "as they are": "EXTERNAL"}
COLUMNS = (("templates", "body"), ("outcomes", "response"))


@dataclass(frozen=True, slots=True)
class Figures:
    intake: float
    """Megabytes per second."""
    engine: float
    """Items per second."""
    stored: float
    """Bytes on disk for each byte given."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    amount = 2_000_000 if chosen.quick else chosen.megabytes * 1_000_000
    rounds = 1 if chosen.quick else chosen.rounds
    rows: list[list[str]] = []
    with server() as conninfo, tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            path = _write(Path(folder) / f"{size}.jsonl", size, max(100, amount // size))
            found: dict[str, list[Figures]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way, figures in found.items():
                    figures.append(_measure(conninfo, path, size, max(100, amount // size), way))
            rows += [
                [
                    f"{size:,} B, {way}",
                    f"{median([each.intake for each in figures]):,.0f}",
                    f"{median([each.engine for each in figures]):,.0f}",
                    f"{median([each.stored for each in figures]):.2f}",
                ]
                for way, figures in found.items()
            ]
    print_table(["bodies and answers", "intake, MB/s", "claim, read, settle, items/s", "bytes on disk per byte"], rows)


def _write(path: Path, size: int, lines: int) -> Path:
    chance = random.Random(size)
    texts = [words(size - 60, chance) for _ in range(100)]
    with path.open("w") as file:
        for number in range(lines):
            body = f'{{"model": "{ROUTE}", "messages": [{{"role": "user", "content": "{texts[number % 100]}"}}]}}'
            file.write(
                f'{{"custom_id": "r{number}", "method": "POST", "url": "/v1/chat/completions", "body": {body}}}\n'
            )
    return path


def _measure(conninfo: str, path: Path, size: int, lines: int, way: str) -> Figures:
    with scratch_database(conninfo) as database:
        with psycopg.connect(database, autocommit=True) as connection:
            for table, column in COLUMNS:
                alter = f"ALTER TABLE penstock.{table} ALTER COLUMN {column} SET STORAGE {WAYS[way]}"
                connection.execute(alter.encode())
        settle_down(database)
        started = perf_counter()
        file_id = ingest_file(database, path, owner="bench", worker_id=uuid4()).file.id
        intake_s = perf_counter() - started
        answers = [f'{{"content": "{words(size - 20, random.Random(n))}"}}'.encode() for n in range(100)]
        engine_s = asyncio.run(_work_off(database, file_id, size, answers))
        with psycopg.connect(database, autocommit=True) as connection:
            row = connection.execute(
                "SELECT pg_table_size('penstock.templates') + pg_table_size('penstock.outcomes')"
            ).fetchone()
            assert row is not None
        return Figures(lines * size / intake_s / 1e6, lines / engine_s, row[0] / (2 * lines * size))


async def _work_off(database: str, file_id: UUID, size: int, answers: list[bytes]) -> float:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        arrays.register(connection)
        worker_id, want = uuid4(), min(1_000, 4_000_000 // size)
        await create_batch(connection, file_id=file_id, owner="bench", pool=POOL)
        await liveness.register(connection, worker_id, POOL)
        settle_down(database)
        started = perf_counter()
        while True:
            claimed = await claims.claim_in_line(
                connection, pool=POOL, wants={ROUTE: want}, worker_id=worker_id, taper_floor=want
            )
            if not claimed.leases:
                return perf_counter() - started
            changes = Changes()
            for lease in claimed.leases:
                ranges = list(lease.ranges)
                while ranges:
                    items = await claims.read_bodies(connection, lease, ranges, max_rows=want, max_bytes=8_000_000)
                    for item in items:
                        answer = answers[item.ordinal % len(answers)]
                        changes.decide(item, Outcome(OutcomeState.COMPLETED, answer, 200))
                    ranges = claims.beyond(ranges, items[-1].ordinal)
            await settle(connection, worker_id, changes)


if __name__ == "__main__":
    main()
