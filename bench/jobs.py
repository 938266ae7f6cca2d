"""Jobs over tables: what memory they need at any size, and how near they come to COPY.

    python -m bench.jobs [--rows 1000000] [--rounds 3] [--quick]

*Memory*: a server with one worker process takes a CSV file in over the API, works it off with a function, and exports
it in every format; counted is the largest resident set of server and worker, for a short table and for a long one.
*Rates*: the rows of a CSV file stored, against a bare COPY of the same rows packed beforehand; a sheet of a job that is
done, against `COPY … TO STDOUT` of the same inputs and results; with three short columns, and with a text of 500
characters beside them. What is compared takes turns; medians count.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter
from uuid import UUID, uuid4

import psycopg

from bench.ground import median, options, print_table, scratch_database, server, settle_down, words
from penstock.config import IntakeLimits, TableLimits
from penstock.db import arrays, sql
from penstock.export.sheet_file import sheet_blocks
from penstock.intake.copying import PromptWriter
from penstock.intake.ingest import ingest_table
from penstock.intake.local_table import find_table
from penstock.intake.rows import pack_table_rows, table_lane
from penstock.intake.tables.table import TableSpec
from penstock.model import parse_id
from tests.support.jobs import jobs_server, start_job, table, until_state
from tests.support.server import ServerProcess

COPY = sql.load("penstock.intake", "intake.sql")["copy_templates"]
SIGNATURE, TRAILER = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
FORMATS = ("csv", "jsonl", "xlsx")
DEADLINE_S = 3_600
SHEET = (
    "COPY (SELECT t.line, t.body, o.state, o.attempts, o.response, o.error_message FROM penstock.templates t"
    " JOIN penstock.lanes l ON l.source_id = t.source_id AND l.source_lane = t.source_lane"
    " LEFT JOIN penstock.outcomes o ON o.lane_id = l.id AND o.ordinal = t.ordinal ORDER BY t.ordinal) TO STDOUT"
)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    large = chosen.rows or (20_000 if chosen.quick else 1_000_000)
    small = min(10_000, large // 10)
    rounds = 1 if chosen.quick else chosen.rounds
    with server() as conninfo, tempfile.TemporaryDirectory() as folder:
        short = _measure_job(conninfo, Path(folder), table(small), small, 1)
        long = _measure_job(conninfo, Path(folder), table(large), large, rounds)
        rates = long.rates | _measure_intake(conninfo, Path(folder), table(large), large, rounds)
        some = large // 5
        with_text = _table_with_text(some)
        text_rates = _measure_job(conninfo, Path(folder), with_text, some, rounds).rates
        text_rates |= _measure_intake(conninfo, Path(folder), with_text, some, rounds)
    print_table(
        ["peak MiB", f"{small:,} rows", f"{large:,} rows", "ratio"],
        [
            [name, f"{short.peaks[name]:.0f}", f"{long.peaks[name]:.0f}", f"{long.peaks[name] / short.peaks[name]:.2f}"]
            for name in long.peaks
        ],
    )
    for title, found in ((f"{large:,} rows", rates), (f"{some:,} rows with a text", text_rates)):
        print_table(
            [title, "rows/s", "of COPY"],
            [
                ["bare COPY of packed rows", f"{found['bare']:,.0f}", "1.00"],
                ["CSV stored", f"{found['stored']:,.0f}", f"{found['stored'] / found['bare']:.2f}"],
                ["COPY … TO STDOUT", f"{found['copy']:,.0f}", "1.00"],
                *([f"{name} written", f"{found[name]:,.0f}", f"{found[name] / found['copy']:.2f}"] for name in FORMATS),
            ],
        )


def _table_with_text(rows: int) -> bytes:
    """A CSV file of articles, each with a description."""
    chance = random.Random(rows)
    texts = [words(500, chance) for _ in range(100)]
    lines = [f"{number},Chair {number},{texts[number % 100]}" for number in range(1, rows + 1)]
    return "\n".join(["SKU,Product Title,Description", *lines, ""]).encode()


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of one job."""

    peaks: dict[str, float]
    """Of server and worker, in MiB."""
    rates: dict[str, float]
    """Rows per second, by format; `copy` is that of COPY."""


def _measure_job(conninfo: str, folder: Path, content: bytes, rows: int, rounds: int) -> _Figures:
    with scratch_database(conninfo) as database:
        with jobs_server(folder, database=database, name=f"serve{rows}") as running:
            name = start_job(running, content, {"processor": "price"})
            until_state(running, name, "DONE", deadline_s=DEADLINE_S)
            for file_format in FORMATS:
                _download(running, name, file_format)
            workers = [_peak_mib(pid) for pid in running.worker_pids]
            peaks = {"server": _peak_mib(running.process.pid), "worker": max(workers)}
        settle_down(database)
        job_id = parse_id("job", name)
        assert job_id is not None
        found: dict[str, list[float]] = {kind: [] for kind in ("copy", *FORMATS)}
        for _ in range(rounds):
            found["copy"].append(rows / _copy_out_s(database))
            for file_format in FORMATS:
                found[file_format].append(rows / asyncio.run(_export_s(database, job_id, file_format, rows)))
    return _Figures(peaks, {kind: median(rates) for kind, rates in found.items()})


def _download(running: ServerProcess, name: str, file_format: str) -> None:
    connection = HTTPConnection("127.0.0.1", running.port, timeout=DEADLINE_S)
    connection.request("POST", f"/api/jobs/{name}/export?format={file_format}")
    answer = connection.getresponse()
    while answer.read(1024 * 1024):
        pass
    connection.close()


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"process {pid} has no peak")


def _copy_out_s(database: str) -> float:
    with psycopg.connect(database) as connection, connection.cursor() as cursor:
        started = perf_counter()
        with cursor.copy(SHEET) as copy:
            for _ in copy:
                pass
        return perf_counter() - started


async def _export_s(database: str, job_id: UUID, file_format: str, rows: int) -> float:
    async with await psycopg.AsyncConnection.connect(database) as connection:
        arrays.register(connection)
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        started = perf_counter()
        written = 0
        async for _, count in sheet_blocks(connection, job_id, file_format, gzip=False):
            written += count
        if written != rows:
            raise AssertionError(f"{written} rows of {rows}")
        return perf_counter() - started


def _measure_intake(conninfo: str, folder: Path, content: bytes, rows: int, rounds: int) -> dict[str, float]:
    """Rows per second: of a bare COPY, and of a table's whole way in."""
    path = folder / "rows.csv"
    path.write_bytes(content)
    bare: list[float] = []
    own: list[float] = []
    with scratch_database(conninfo) as database:
        for _ in range(rounds):
            with _emptied(database):
                bare.append(rows / _bare_copy_s(database, path))
            with _emptied(database):
                own.append(rows / _ingest_s(database, path))
    return {"bare": median(bare), "stored": median(own)}


@contextmanager
def _emptied(database: str) -> Iterator[None]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("TRUNCATE penstock.templates")
        connection.execute("CHECKPOINT")
    yield


def _bare_copy_s(database: str, path: Path) -> float:
    lane = table_lane(1)
    with find_table([path]).open(TableSpec(), TableLimits(), IntakeLimits()) as opened:
        packed = pack_table_rows(lane, 0, list(opened.rows()))
    with psycopg.connect(database) as connection, connection.cursor() as cursor:
        started = perf_counter()
        with cursor.copy(COPY, writer=PromptWriter(cursor)) as copy:
            copy.write(SIGNATURE)
            for at in range(0, len(packed), 256 * 1024):
                copy.write(packed[at : at + 256 * 1024])
            copy.write(TRAILER)
        connection.commit()
        return perf_counter() - started


def _ingest_s(database: str, path: Path) -> float:
    started = perf_counter()
    ingest_table(
        database,
        find_table([path]),
        owner="bench",
        worker_id=uuid4(),
        route="m",
        spec=TableSpec(),
        limits=IntakeLimits(),
        table_limits=TableLimits(),
    )
    return perf_counter() - started


if __name__ == "__main__":
    main()
