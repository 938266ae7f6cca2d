"""A table through everything: uploaded, its server killed while the rows are stored, paused, resumed, workers killed
and their server after them, exported; then read back with other libraries and compared, row by row.

    python -m tests.chaos.jobs --rows 100000 --kind xlsx
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openpyxl
import psycopg
from openpyxl.cell import WriteOnlyCell

from penstock.db.embedded import postgres
from penstock.db.migrate import migrate
from tests.support.cli import ask, slow_down_rows
from tests.support.jobs import items_of, job_of, jobs_server, start_job, table, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

LIVENESS = ("--set", "heartbeat_interval_s=0.3", "--set", "heartbeat_grace_s=2")
DEADLINE_S = 1_800
HEADERS = ["sku", "product_title", "note", "price", "currency", "status", "attempts", "error"]
# Where there are rows already, more of them wait for the lock.
_HOLD_ROWS = """
CREATE FUNCTION penstock.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF EXISTS (SELECT FROM penstock.templates) THEN PERFORM pg_advisory_xact_lock_shared(0); END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER hold BEFORE INSERT ON penstock.templates EXECUTE FUNCTION penstock.hold();
"""


def write_table(kind: str, rows: int) -> bytes:
    """A table of so many articles, as CSV or as a workbook."""
    content = table(rows)
    if kind == "csv":
        return content
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("Articles")
    for number, cells in enumerate(csv.reader(io.StringIO(content.decode()), delimiter=";")):
        sheet.append([int(cells[0]), *(_text(sheet, cell) for cell in cells[1:])] if number else cells)
    file = io.BytesIO()
    book.save(file)
    return file.getvalue()


def _text(sheet: Any, value: str) -> Any:
    """A cell with a text: one that begins with "=" would be taken for a formula that was never calculated."""
    cell = WriteOnlyCell(sheet, value)
    cell.data_type = "s"
    return cell


def run(directory: Path, database: str, kind: str, rows: int, say: Callable[[str], None]) -> None:
    """Take a table through everything; an AssertionError says what was lost, doubled or changed."""
    numbers = itertools.count(1)

    def serving() -> Any:
        return jobs_server(directory, *LIVENESS, database=database, name=f"serve{next(numbers)}")

    with psycopg.connect(database, autocommit=True) as connection:
        slow_down_rows(connection, 0.05)
        connection.execute(_HOLD_ROWS)
        connection.execute("SELECT pg_advisory_lock(0)")
        with serving() as server:
            name = start_job(server, write_table(kind, rows), {"processor": "price"}, filename=f"rows.{kind}")
            wait_until(lambda: job_of(server, name)["ingest"]["rows"] > 0, DEADLINE_S)
            server.process.kill()
        connection.execute("SELECT pg_advisory_unlock(0)")
        stored = ask(connection, "SELECT rows FROM penstock.jobs")
        say(f"the server was killed with {stored:,} of {rows:,} rows stored")
        assert 0 < stored < rows
        with serving() as server:
            _settle_beyond(server, name, rows // 10)
            assert server.ask("POST", f"/api/jobs/{name}/pause").json["state"] == "PAUSED"
            wait_until(lambda: job_of(server, name)["inFlight"] == 0, DEADLINE_S)
            paused_at = job_of(server, name)["processed"]
            say(f"paused at {paused_at:,}")
            assert server.ask("POST", f"/api/jobs/{name}/resume").status == 200
            for _ in range(2):
                _settle_beyond(server, name, job_of(server, name)["processed"] + rows // 20)
                for pid in server.worker_pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            say(f"workers were killed, the last time at {job_of(server, name)['processed']:,}")
            _settle_beyond(server, name, rows // 2)
            server.process.kill()
        with serving() as server:
            job = until_state(server, name, "DONE", deadline_s=DEADLINE_S)
            say(f"done: {job['processed']:,} processed, {job['failed']:,} failed, {job['notFound']:,} not found")
            tenth = rows // 10
            assert [job[key] for key in ("total", "processed", "failed", "notFound", "inFlight", "pending")] == [
                *(rows, rows, tenth, tenth, 0, 0)
            ]
            _compare(server, name, rows)
        assert ask(connection, "SELECT count(*) FROM penstock.outcomes") == rows
        left = "SELECT (SELECT count(*) FROM penstock.leases) + (SELECT count(*) FROM penstock.deferrals)"
        assert ask(connection, left) == 0


def _settle_beyond(server: ServerProcess, name: str, rows: int) -> None:
    wait_until(lambda: (job := job_of(server, name))["processed"] > rows or job["state"] == "DONE", DEADLINE_S)


def _compare(server: ServerProcess, name: str, rows: int) -> None:
    """Items, CSV, workbook and JSON Lines all show the same rows, in order."""
    text = _export(server, name, "csv").decode()
    sheets = csv.reader(io.StringIO(text))
    book = openpyxl.load_workbook(io.BytesIO(_export(server, name, "xlsx")), read_only=True)
    cells: Iterator[tuple[Any, ...]] = book.worksheets[0].iter_rows(values_only=True)
    lines = iter(_export(server, name, "jsonl").splitlines())
    assert next(sheets) == list(next(cells)) == HEADERS
    for number, item in enumerate(items_of(server, name), 1):
        shown = _shown(item)
        assert (item["row"], item["input"]["sku"]) == (number, number)
        assert _expected(number, item), item
        assert list(json.loads(next(lines)).values()) == shown
        read = next(cells)  # without the empty cells at its end
        assert [*read, *[None] * (len(HEADERS) - len(read))] == shown
        assert next(sheets) == ["" if cell is None else str(cell).replace("=1+1", "'=1+1") for cell in shown]
    assert number == rows
    for rest in (sheets, lines, cells):
        assert next(rest, None) is None
    book.close()


def _export(server: ServerProcess, name: str, kind: str) -> bytes:
    answer = server.ask("POST", f"/api/jobs/{name}/export?format={kind}", timeout_s=DEADLINE_S)
    assert answer.status == 200, answer.content
    return answer.content


def _shown(item: Any) -> list[Any]:
    """An item as a row of the sheet."""
    result = item["result"] or {}
    return [
        *(item["input"][name] for name in HEADERS[:3]),
        *(result.get(name) for name in HEADERS[3:5]),
        *(item["status"], item["attempts"], item["error"]),
    ]


def _expected(sku: int, item: Any) -> bool:
    if sku % 10 == 0:
        return bool(item["status"] == "NOT_FOUND")
    if sku % 10 == 5:
        return bool(item["status"] == "ERROR")
    return bool(item["status"] == "DONE" and item["result"] == {"price": sku * 2, "currency": "EUR"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.jobs", description="A table through everything.")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kind", choices=("csv", "xlsx"), default="csv")
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    with (
        tempfile.TemporaryDirectory(prefix="chaos-jobs-") as directory,
        postgres.acquire(Path(directory) / "postgres") as running,
    ):
        migrate(running.conninfo)
        run(Path(directory), running.conninfo, options.kind, options.rows, say)
    say(f"{options.rows:,} rows of {options.kind}: items, CSV, XLSX and JSONL agree; nothing lost, nothing twice")
    return 0


if __name__ == "__main__":
    sys.exit(main())
