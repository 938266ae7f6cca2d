"""How near intake comes to a bare COPY of the same rows, and what memory it needs.

Bare COPY: the rows packed beforehand and in memory, into the same table with the same index, one
transaction, each block flushed (without that, psycopg is three times slower). Intake: the file read,
checked, stored and sealed. Both alternate, and the median of each counts.

    python bench/intake.py [--lines 1000000] [--rounds 3] [--database-url URL]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.db.embedded import postgres
from penstock.db.migrate import migrate
from penstock.intake.copying import PromptWriter
from penstock.intake.ingest import ingest_file
from penstock.intake.jsonl import JsonlParser
from penstock.intake.source import Source

BODY_BYTES = 600
SIGNATURE, TRAILER = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
COPY = sql.load("penstock.intake", "intake.sql")["copy_templates"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    options.add_argument("--lines", type=int, default=1_000_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--database-url", help="default: an embedded server of its own")
    chosen = options.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = chosen.database_url or stack.enter_context(postgres.acquire(folder / "pg")).conninfo
        conninfo = stack.enter_context(ScratchDatabase(server)).conninfo
        small = write_file(folder / "small.jsonl", 10_000)
        large = write_file(folder / "large.jsonl", chosen.lines)

        print(f"peak memory, 10,000 lines: {peak_mib(conninfo, small):6.0f} MiB")
        print(f"peak memory, {chosen.lines:,} lines: {peak_mib(conninfo, large):6.0f} MiB")
        parse_s, blocks = parse(large)
        print(f"parsing alone: {chosen.lines / parse_s:10,.0f} rows/s, {parse_s / chosen.lines * 1e6:.2f} µs a line")
        pairs = [(bare_copy_s(conninfo, blocks), intake_s(conninfo, large)) for _ in range(chosen.rounds)]
    for bare_s, own_s in pairs:
        print(
            f"bare COPY {chosen.lines / bare_s:10,.0f} rows/s   intake {chosen.lines / own_s:10,.0f} rows/s"
            f"   ratio {bare_s / own_s:.2f}"
        )
    print(f"median ratio {statistics.median(bare_s / own_s for bare_s, own_s in pairs):.2f}")


class ScratchDatabase:
    """A migrated database that is dropped afterwards."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._name = f"bench_intake_{uuid4().hex[:8]}"
        self.conninfo = make_conninfo(server, dbname=self._name)

    def __enter__(self) -> ScratchDatabase:
        self._execute(f"CREATE DATABASE {self._name}")
        migrate(self.conninfo)
        return self

    def __exit__(self, *_: object) -> None:
        self._execute(f"DROP DATABASE {self._name} WITH (FORCE)")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._server, autocommit=True) as connection:
            connection.execute(statement.encode())


def write_file(path: Path, lines: int) -> Path:
    start = '{"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "'
    end = '"}], "max_tokens": 100}'
    text = ("The quick brown fox jumps over the lazy dog. " * 20)[: BODY_BYTES - len(start) - len(end)]
    with path.open("w") as file:
        for number in range(lines):
            file.write(
                f'{{"custom_id": "request-{number:08d}", "method": "POST", '
                f'"url": "/v1/chat/completions", "body": {start}{text}{end}}}\n'
            )
    return path


def parse(path: Path) -> tuple[float, list[bytes]]:
    blocks: list[bytes] = []
    parser = JsonlParser(path.name, 0, IntakeLimits(), lambda rows, _: blocks.append(rows))
    started = time.perf_counter()
    for chunk in Source(path).chunks():
        parser.feed(chunk)
    parser.finish()
    return time.perf_counter() - started, blocks


def emptied(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("TRUNCATE penstock.templates")
        connection.execute("CHECKPOINT")


def bare_copy_s(conninfo: str, blocks: list[bytes]) -> float:
    emptied(conninfo)
    with psycopg.connect(conninfo) as connection, connection.cursor() as cursor:
        started = time.perf_counter()
        with cursor.copy(COPY, writer=PromptWriter(cursor)) as copy:
            for block in (SIGNATURE, *blocks, TRAILER):
                copy.write(block)
        connection.commit()
        return time.perf_counter() - started


def intake_s(conninfo: str, path: Path) -> float:
    emptied(conninfo)
    started = time.perf_counter()
    ingest_file(conninfo, path, owner="bench", worker_id=uuid4())
    return time.perf_counter() - started


def peak_mib(conninfo: str, path: Path) -> float:
    """Peak resident memory of a process that does one intake and nothing else."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_peak_of_intake, (conninfo, path))


def _peak_of_intake(conninfo: str, path: Path) -> float:
    intake_s(conninfo, path)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
