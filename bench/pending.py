"""Pages of pending rows, 1,000,000 in one job and 1,000 jobs beside it; and claims while a client pages through them.

    python -m bench.pending [--claims 400] [--pause-ms 5] [--quick]

Pages: milliseconds in the database by EXPLAIN ANALYZE, the median of some runs, all statements of a page together;
plans are kept, as by a server. Claims: medians, in turns: alone, beside a client that reads pages with a short pause
after each, and beside one that keeps the machine busy in the same way and reads no table of Penstock's.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.sharedctypes import Synchronized
from time import perf_counter
from typing import NamedTuple
from uuid import uuid4

import psycopg

from bench.ground import median, options, print_table, scratch_database, server, settle_down, sized
from penstock.batches.error_groups import list_error_groups, list_failures_of
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db import arrays
from penstock.db.pool import Connection
from penstock.export.grid import find_grid, find_ordinals, list_live, read_grid, stretches
from penstock.export.pending import PendingQuery, Position, list_pending, read_summaries
from tests.support.pending_crowd import POOL, ROUTE, Crowd, fill_crowd
from tests.support.plans import Mode, Plan, Session

PAGE = 100
RUNS = 9
BLOCK = 20
CLAIM = 100

_RESTS, _PAGES, _ASKS, _ENDS = range(4)

Operation = Callable[[Connection], Awaitable[object]]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--claims", type=int)
    parser.add_argument("--pause-ms", type=float, default=5, help="between two pages of the client")
    chosen = parser.parse_args()
    rows, jobs = sized(chosen, 1_000_000, 20_000), sized(chosen, 1_000, 50)
    repeats = chosen.claims or sized(chosen, 400, 40)
    with server() as conninfo, scratch_database(conninfo) as database:
        with Session(database) as session:
            crowd = fill_crowd(session, jobs, rows, whole=True)
            settle_down(database)
            found = [(name, _explained(session, page)) for name, page in _pages(crowd).items()]
        print_table(
            ["page of 100 rows", "ms", "buffers"],
            [[name, f"{median([_ms(plan) for plan in plans]):.2f}", f"{plans[-1].buffers:,}"] for name, plans in found],
        )
        (alone, paging, other), pages = asyncio.run(_claims(database, repeats, chosen.pause_ms / 1000))
    print_table(
        ["claim of 100, while a client", "p50, ms", "of alone"],
        [
            ["rests", f"{alone:.2f}", "1.00"],
            [f"reads pages of pending rows ({pages:,})", f"{paging:.2f}", f"{paging / alone:.2f}"],
            ["asks for rows that are in no table", f"{other:.2f}", f"{other / alone:.2f}"],
        ],
    )


def _pages(crowd: Crowd) -> Mapping[str, Operation]:
    job = PendingQuery(batch_id=crowd.batch)
    return {
        "pending of the job, first": lambda c: _pending(c, job),
        "pending of the job, deep": lambda c: _pending(c, job, crowd.deep),
        "pending of all, first": lambda c: _pending(c, PendingQuery()),
        "pending of all, behind 1,000,000 rows": lambda c: _pending(c, PendingQuery(), crowd.behind),
        "pending of an owner": lambda c: _pending(c, PendingQuery(owner="bob")),
        "in flight, of all": lambda c: _pending(c, PendingQuery(statuses=["PROCESSING"])),
        "items by status": lambda c: _items(c, crowd, {"PENDING", "PROCESSING"}, crowd.deep.ordinal),
        "items that failed": lambda c: _items(c, crowd, {"ERROR"}, 0),
        "items by row number": lambda c: _items(c, crowd, None, crowd.deep.ordinal),
        "items, last page": lambda c: _items(c, crowd, None, crowd.rows - PAGE),
        "error groups": lambda c: list_error_groups(c, crowd.batch, None, PAGE),
        "rows of an error group": lambda c: list_failures_of(c, crowd.lane, crowd.fingerprint, -1, PAGE),
    }


async def _pending(connection: Connection, query: PendingQuery, after: Position | None = None) -> None:
    page = await list_pending(connection, query, after, PAGE)
    await read_summaries(connection, page.rows)


async def _items(connection: Connection, crowd: Crowd, statuses: set[str] | None, start: int) -> None:
    grid = await find_grid(connection, crowd.batch)
    if grid is None:
        raise AssertionError("the job has rows")
    live = await list_live(connection, crowd.batch)
    ordinals = list(range(start, start + PAGE))
    if statuses is not None:
        ordinals = await find_ordinals(connection, grid, live, statuses, start, PAGE + 1)
    await read_grid(connection, grid, live, stretches(ordinals[:PAGE]))


def _explained(session: Session, page: Operation) -> list[Plan]:
    return [session.explain(page, Mode.GENERIC) for _ in range(RUNS)]


def _ms(plan: Plan) -> float:
    statements = plan.root["Plans"] if plan.root["Node Type"] == "Statements" else [plan.root]
    return float(sum(statement["Actual Total Time"] for statement in statements))


async def _claims(database: str, repeats: int, pause_s: float) -> tuple[list[float], int]:
    """Medians by what the client does meanwhile, and how many pages it read."""
    context = multiprocessing.get_context("spawn")
    client = _Client(context.Value("i", _RESTS), context.Value("q", 0))
    process = context.Process(target=_be_client, args=(database, pause_s, client.does, client.done))
    process.start()
    spent: list[list[float]] = [[], [], []]
    pages = 0
    try:
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
            arrays.register(connection)
            worker_id = uuid4()
            await liveness.register(connection, worker_id, POOL)
            for number in range(3 * repeats // BLOCK):
                what = number % 3
                client.does.value, before = what, client.done.value
                async with asyncio.timeout(10):
                    while client.done.value < before + 2:  # noqa: ASYNC110 - another process counts
                        await asyncio.sleep(0.001)
                for _ in range(BLOCK):
                    started = perf_counter()
                    await claims.claim_in_line(
                        connection, pool=POOL, wants={ROUTE: CLAIM}, worker_id=worker_id, taper_floor=CLAIM
                    )
                    spent[what].append(perf_counter() - started)
                if what == _PAGES:
                    pages += client.done.value - before
    finally:
        client.does.value = _ENDS
        process.join()
    # The first block of each warms up.
    return [1e3 * median(seconds[BLOCK:]) for seconds in spent], pages


class _Client(NamedTuple):
    does: Synchronized[int]
    done: Synchronized[int]
    """How often it has done it."""


def _be_client(database: str, pause_s: float, does: Synchronized[int], done: Synchronized[int]) -> None:
    async def run() -> None:
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
            arrays.register(connection)
            after = None
            while (what := does.value) != _ENDS:
                if what == _PAGES:
                    page = await list_pending(connection, PendingQuery(), after, PAGE)
                    await read_summaries(connection, page.rows)
                    after = page.next
                elif what == _ASKS:
                    # A query of about as much work that reads no table.
                    rows = await connection.execute("SELECT n, n::text FROM generate_series(1, 500) AS n")
                    await rows.fetchall()
                done.value += 1
                await asyncio.sleep(pause_s)

    asyncio.run(run())


if __name__ == "__main__":
    main()
