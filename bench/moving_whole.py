"""The whole move at full size: killed twice on the way in, compared, run, handed back half way, brought in again.

    python -m bench.moving_whole [--quick] [--requests N]

Not a measurement but a proof: it stops at the first thing that is not as it must be, and prints what it saw.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import psycopg

from bench.ground import options, scratch_database, server, sized
from tests.flow.moving.test_import_runs import TO_BE_RUN, UNFINISHED
from tests.support.cli import ask, calls_by_key, start_cli
from tests.support.eager import Eager, fill
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.moving import bring, check_results, check_whole, hand_back
from tests.support.server import served
from tests.support.wait import wait_until

BATCHES = 50
ENDED = ("completed", "shared", "cancelled", "failed", "without_file")
PATIENCE_S = 3_600.0


@contextmanager
def told(what: str) -> Iterator[None]:
    began = perf_counter()
    yield
    print(f"{perf_counter() - began:8.1f} s  {what}", flush=True)


def until(connection: psycopg.Connection, query: str, *, at_least: int) -> None:
    wait_until(lambda: ask(connection, query) >= at_least, PATIENCE_S)


def kill_twice(source: Eager, target: str, cwd: Path) -> None:
    """Kill an import among the files, and another among the batches."""
    command = ("import", "--from", source.conninfo, "--database-url", target, "--json")
    for kind, least in (("file", 10), ("batch", 10)):
        with start_cli(*command, cwd=cwd) as process, psycopg.connect(target, autocommit=True) as connection:
            query = f"SELECT count(*) FROM penstock.imports WHERE kind = '{kind}'"
            until(connection, query, at_least=least)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            print(f"           killed with {ask(connection, query)} of kind '{kind}' imported", flush=True)


def run_until(target: str, mock: MockProcess, cwd: Path, query: str, most: int) -> None:
    with (
        psycopg.connect(target, autocommit=True) as connection,
        served(cwd, "--base-url", mock.base_url, database=target) as running,
    ):
        wait_until(lambda: ask(connection, query) <= most, PATIENCE_S)
        running.process.terminate()
        running.process.wait(PATIENCE_S)


LEFT = """
SELECT coalesce(sum(b.total - p.settled), 0)
  FROM penstock.batches b, LATERAL (
    SELECT coalesce(sum(completed + failed + not_found + skipped), 0) AS settled FROM penstock.progress
     WHERE batch_id = b.id) AS p
 WHERE b.state = 'in_progress'
"""


def check_handed_back(source: Eager, target: str) -> None:
    """The old system's own questions: what is pending for each batch, and how many are in each state."""
    pending = source.pending()
    with psycopg.connect(target, autocommit=True) as connection:
        for kind in ("halfway", "scattered", "untouched"):
            for batch_id in source.batches(kind):
                states = source.states(batch_id)
                here = connection.execute(
                    "SELECT count(*) FILTER (WHERE o.state = 'completed'), count(*) FILTER (WHERE o.state = 'failed')"
                    " FROM penstock.outcomes o JOIN penstock.lanes l ON l.id = o.lane_id WHERE l.batch_id = %s",
                    (batch_id,),
                ).fetchall()
                assert (states.get("completed", 0), states.get("failed", 0)) == here[0], (kind, batch_id, states, here)
                assert pending.get(batch_id, 0) == states.get("pending", 0)
                assert not states.keys() & {"claimed", "processing"}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--requests", type=int)
    chosen = parser.parse_args()
    requests = chosen.requests or sized(chosen, 1_000_000, 5_000)
    with server() as conninfo, tempfile.TemporaryDirectory() as folder, start_mock_process() as mock:
        cwd = Path(folder)
        with scratch_database(conninfo, migrated=False) as old, scratch_database(conninfo) as target:
            source = Eager(old)
            with told(f"filled with {requests:,} requests in {BATCHES} batches"):
                fill(source, BATCHES, requests // BATCHES, 200)
            expected = {key for (key,) in source.rows(TO_BE_RUN)}
            print(f"           {len(expected):,} of them to be run")
            with told("killed twice"):
                kill_twice(source, target, cwd)
            with told("brought to the end, and compared"):
                report = bring(source, target, cwd, "--verify").expect(0).summary
            print(f"           {report['totals']} {report['verified']} {report['left_behind']}")
            with told("checked: sums, rows without owner, keys"):
                check_whole(target)
            with told("result files compared byte by byte with the old rows"):
                print(f"           {check_results(source, target, ENDED)} batches")
            with told("half of the rest run"):
                run_until(target, mock, cwd, LEFT, len(expected) // 2)
            first = set(calls_by_key(mock))
            with told("handed back"):
                print(f"           {hand_back(source, target, cwd).expect(0).summary['totals']}")
            check_handed_back(source, target)
            with told("brought in again, and compared"):
                bring(source, target, cwd, "--verify", "--workers-stopped").expect(0)
            with told("the rest run"):
                run_until(target, mock, cwd, UNFINISHED, 0)
            check_whole(target)
            calls = calls_by_key(mock)
            assert set(calls) == expected, (len(calls), len(expected))
            print(f"           {len(first):,} called before the way back, {len(calls):,} in all, as expected")
            print(f"           calls of one request at most: {mock.stats()['max_calls_per_key']}")


if __name__ == "__main__":
    main()
