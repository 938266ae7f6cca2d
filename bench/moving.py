"""Moving in from a database of the eager layout: rows a second beside a bare COPY of the same rows, and memory.

    python -m bench.moving [--quick]

A source of 50 batches in every state lies on the same server as Penstock's database. A bare COPY reads the lines and
requests of the batches that are imported, and writes them, as they are, into tables with the same primary keys; both go
over the same two connections. Memory is the peak of an import in a process of its own, of many requests and of 10,000.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from time import perf_counter

import psycopg

from bench.ground import options, print_table, scratch_database, server, settle_down, sized
from tests.support.eager import Eager, fill

BATCHES = 50
PADDING = 400
FEW = 10_000

_TABLES = {
    "request_templates": "SELECT t.* FROM request_templates t"
    " JOIN files f ON f.id = t.file_id WHERE f.deleted_at IS NULL",
    "requests": "SELECT r.* FROM requests r JOIN batches b ON b.id = r.batch_id WHERE b.deleted_at IS NULL",
}


def bare_copy(source: str, target: str) -> tuple[int, float]:
    """Rows and seconds of a COPY from one database into the other."""
    rows = 0
    with psycopg.connect(source) as reading, psycopg.connect(target, autocommit=True) as writing:
        for table in _TABLES:
            shape = reading.execute(
                "SELECT string_agg(format('%%I %%s', attname, format_type(atttypid, atttypmod)), ', ' ORDER BY attnum)"
                " FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0",
                (table,),
            ).fetchall()[0][0]
            writing.execute(f"CREATE TABLE {table} ({shape}, PRIMARY KEY (id))".encode())
        began = perf_counter()
        for table, query in _TABLES.items():
            out = f"COPY ({query}) TO STDOUT (FORMAT BINARY)"
            into = f"COPY {table} FROM STDIN (FORMAT BINARY)"
            with reading.cursor() as left, writing.cursor() as right:
                with left.copy(out.encode()) as taken, right.copy(into.encode()) as given:
                    for data in taken:
                        given.write(data)
                rows += right.rowcount
        seconds = perf_counter() - began
        for table in _TABLES:
            writing.execute(f"DROP TABLE {table}".encode())
    return rows, seconds


def imported(source: str, target: str) -> tuple[int, float, float]:
    """Rows, seconds, and peak memory in MiB of an import in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.moving", "--import", source, target], check=True, capture_output=True, text=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return told["rows"], told["seconds"], told["peak_mib"]


def _import_here(source: str, target: str) -> None:
    from click.testing import CliRunner

    from penstock.cli.main import main

    done = CliRunner().invoke(main, ["import", "--from", source, "--database-url", target, "--json"])
    if done.exit_code != 0:
        raise SystemExit(done.output + done.stderr)
    report = json.loads(done.stdout)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"rows": report["rows"], "seconds": report["seconds"], "peak_mib": peak}))


def measure(conninfo: str, requests: int, rounds: int) -> tuple[list[list[str]], float]:
    """Lines of the table, and the memory of an import of so many requests."""
    lines: list[list[str]] = []
    peak = 0.0
    with scratch_database(conninfo, migrated=False) as source:
        fill(Eager(source), BATCHES, requests // BATCHES, PADDING)
        for number in range(rounds):
            with scratch_database(conninfo, migrated=False) as empty:
                settle_down(conninfo)
                rows, copy_s = bare_copy(source, empty)
            with scratch_database(conninfo) as target:
                settle_down(conninfo)
                brought, import_s, peak = imported(source, target)
            ratio = (brought / import_s) / (rows / copy_s)
            lines.append(
                [
                    f"{requests:,} requests, round {number + 1}",
                    f"{rows / copy_s:,.0f}",
                    f"{brought / import_s:,.0f}",
                    f"{ratio:.2f}",
                    f"{peak:.0f}",
                ]
            )
    return lines, peak


def main() -> None:
    if "--import" in sys.argv:
        _import_here(*sys.argv[-2:])
        return
    parser = options(__doc__)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rounds", type=int)
    chosen = parser.parse_args()
    requests = chosen.requests or sized(chosen, 1_000_000, 20_000)
    rounds = chosen.rounds or sized(chosen, 3, 1)
    with server() as conninfo:
        few, small = measure(conninfo, FEW, 1)
        many, large = measure(conninfo, requests, rounds)
    head = ["import", "bare COPY, rows/s", "import, rows/s", "of COPY", "peak, MiB"]
    print_table(head, [*few, *many])
    print(f"\nMemory of {requests:,} requests: {large / small:.2f} times that of {FEW:,}.")


if __name__ == "__main__":
    main()
