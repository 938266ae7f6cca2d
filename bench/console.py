"""Throughput of a job with open tabs of the console, and without: its ticks and the rows that its grid pulls.

    python -m bench.console [--rows 100000] [--tabs 10] [--turns 3] [--quick]

A server with one worker process and a Python function; jobs one after the other, in turns without tabs and with them.
A tab does as the console's: it reads one stream of ticks, and 60 rows of the grid when a tick says that rows moved,
once a second at most, until none of them can change any more. The tabs are threads of one process beside; their work
counts against the job, on the same two cores.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from multiprocessing.synchronize import Event
from pathlib import Path
from random import Random
from time import monotonic, sleep

from bench.ground import median, options, print_table, scratch_database, server, settle_down, sized
from tests.support.jobs import jobs_server, post_job, until_state
from tests.support.server import ServerProcess

WINDOW = 60
# As in `console/static/app/work/row_source.js`.
REFRESH_S = 1.0
OPEN = ("PENDING", "PROCESSING")
PROCESSORS = """
def price(item):
    return {"price": item.body["sku"] * 2, "currency": "EUR"}
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tabs", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    chosen = parser.parse_args()
    rows = chosen.rows or sized(chosen, 100_000, 5_000)
    content = "\n".join(["sku", *map(str, range(1, rows + 1)), ""]).encode()
    alone: list[float] = []
    watched: list[float] = []
    pulls = 0
    with (
        server() as conninfo,
        scratch_database(conninfo) as database,
        tempfile.TemporaryDirectory() as folder,
        jobs_server(Path(folder), "--quiet", database=database, processors=PROCESSORS) as running,
    ):
        _work_off(running, content, rows, 0)  # the first job starts processes
        for _ in range(chosen.turns):
            settle_down(database)
            alone.append(_work_off(running, content, rows, 0)[0])
            settle_down(database)
            rate, counted = _work_off(running, content, rows, chosen.tabs)
            watched.append(rate)
            pulls += counted
    ratio = median([with_tabs / without for with_tabs, without in zip(watched, alone, strict=True)])
    print_table(
        [f"job of {rows:,} rows", "rows/s", "of none"],
        [
            ["no tab", f"{median(alone):,.0f}", "1.00"],
            [f"{chosen.tabs} tabs ({pulls:,} pulls of {WINDOW} rows)", f"{median(watched):,.0f}", f"{ratio:.2f}"],
        ],
    )


def _work_off(running: ServerProcess, content: bytes, rows: int, tabs: int) -> tuple[float, int]:
    """Rows a second of one job, from its first to its last outcome; and how often tabs pulled rows."""
    with running.frozen_workers():
        name: str = post_job(running, content, {"processor": "price"}).json["jobId"]
        _until_stored(running, name, rows)
        with _open_tabs(running.port, name, rows, tabs) as pulled:
            began = monotonic()
            for worker in running.worker_pids:
                _resume(worker)
            job = until_state(running, name, "DONE", deadline_s=600)
            seconds = monotonic() - began
            ended = datetime.fromisoformat(job["endedAt"])
            seconds = min(seconds, max(0.001, seconds - (datetime.now(ended.tzinfo) - ended).total_seconds()))
    return rows / seconds, pulled.value


def _resume(pid: int) -> None:
    import psutil

    psutil.Process(pid).resume()


def _until_stored(running: ServerProcess, name: str, rows: int) -> None:
    while running.ask("GET", f"/api/jobs/{name}").json["total"] < rows:
        sleep(0.05)


class _Pulled:
    value = 0


@contextmanager
def _open_tabs(port: int, name: str, rows: int, tabs: int) -> Iterator[_Pulled]:
    pulled = _Pulled()
    if not tabs:
        yield pulled
        return
    context = multiprocessing.get_context("spawn")
    ends, ready, counted = context.Event(), context.Event(), context.Value("q", 0)
    process = context.Process(target=_show, args=(port, name, rows, tabs, ready, ends, counted))
    process.start()
    ready.wait()
    try:
        yield pulled
    finally:
        ends.set()
        process.join()
        pulled.value = counted.value


def _show(port: int, name: str, rows: int, tabs: int, ready: Event, ends: Event, counted: object) -> None:
    threads = [threading.Thread(target=_tab, args=(port, name, rows, Random(n), ends, counted)) for n in range(tabs)]
    for thread in threads:
        thread.daemon = True
        thread.start()
    ready.set()
    ends.wait()


def _tab(port: int, name: str, rows: int, chance: Random, ends: Event, counted: object) -> None:
    """One tab: its stream, and the rows it shows, somewhere in the job."""
    stream, calls = (HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2))
    start = chance.randrange(1, max(2, rows - WINDOW))
    seen, pulled_at, is_open = "", 0.0, True
    try:
        stream.request("GET", f"/api/ticks?work={name}")
        for line in stream.getresponse():
            if ends.is_set():
                return
            if not line.startswith(b"data: "):
                continue
            changes = json.loads(line[6:]).get("changes", "")
            if not is_open or changes == seen or monotonic() < pulled_at + REFRESH_S:
                continue
            seen, pulled_at = changes, monotonic()
            calls.request("GET", f"/api/jobs/{name}/items?from={start}&pageSize={WINDOW}&cellBytes=240")
            items = json.loads(calls.getresponse().read())["items"]
            is_open = any(item["status"] in OPEN for item in items)
            with counted.get_lock():  # type: ignore[attr-defined]
                counted.value += 1  # type: ignore[attr-defined]
    except (OSError, HTTPException):
        return


if __name__ == "__main__":
    main()
