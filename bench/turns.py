"""A small batch beside a large one of another owner, through the whole product.

    python -m bench.turns [--large 1000000] [--quick]

A server with two owners and a mock upstream of 20 ms. A batch of 100 lines is timed from its upload to its end, first
alone, then while the other owner's large one, of the same model and window, is being worked off.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter, sleep

import openai
import psycopg

from bench.ground import median, options, print_table, server, sized
from penstock.db.migrate import migrate
from tests.support.batch_api import Ground, jsonl, open_ground, submit
from tests.support.cli import run_cli

SMALL = 100
LATENCY = "20ms"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--large", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    large = chosen.large or sized(chosen, 1_000_000, 20_000)
    rounds = sized(chosen, chosen.rounds, 1)
    with tempfile.TemporaryDirectory() as folder, server() as conninfo:
        with psycopg.connect(conninfo, autocommit=True) as connection:
            connection.execute("CREATE DATABASE template_penstock")
        migrate(conninfo.replace("dbname=penstock", "dbname=template_penstock"))
        with open_ground(Path(folder), conninfo, "--latency", LATENCY, settings=("concurrency=32",)) as ground:
            small, other = (_client(Path(folder), ground, owner) for owner in ("small", "large"))
            _time(small)
            alone = [_time(small) for _ in range(rounds)]
            batch = submit(other, jsonl(large))
            while not _counts(other, batch.id):
                sleep(0.1)
            beside = [_time(small) for _ in range(rounds)]
            done = _counts(other, batch.id)
            other.batches.cancel(batch.id)
    print_table(
        [f"{SMALL} lines", "s", "ratio"],
        [
            ["alone", f"{median(alone):.2f}", "1.00"],
            [f"beside {large:,}, {done:,} done", f"{median(beside):.2f}", f"{median(beside) / median(alone):.2f}"],
        ],
    )


def _client(folder: Path, ground: Ground, owner: str) -> openai.OpenAI:
    made = run_cli("keys", "create", "--owner", owner, "--database-url", ground.database, "--json", cwd=folder).expect(
        0
    )
    return ground.client(made.summary["key"])


def _time(client: openai.OpenAI) -> float:
    began = perf_counter()
    batch = submit(client, jsonl(SMALL))
    while client.batches.retrieve(batch.id).status != "completed":
        sleep(0.01)
    return perf_counter() - began


def _counts(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


if __name__ == "__main__":
    main()
