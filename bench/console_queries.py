"""Milliseconds in the database of every query of the console's pages about work, one of them with 1,000,000 rows.

    python -m bench.console_queries [--quick]

By EXPLAIN ANALYZE, the median of nine runs; plans are kept, as by a server. 1,000,000 rows are pending in one job and
1,000 jobs are beside it; it has the samples of an hour and 200 operations. The same rows are read as a job's and as a
batch's. A page may come to several statements: the bound of 2 ms is that of the slowest of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID

from bench.ground import median, options, print_table, scratch_database, server, settle_down, sized
from bench.pending import RUNS, Operation
from penstock.api.work import read_details
from penstock.batches import reprocess, work
from penstock.batches.error_groups import list_error_groups, list_failures_of, stored_fingerprint
from penstock.batches.samples import choose_resolution_s, find_span, read_points
from penstock.db.pool import Connection
from penstock.export.custom_ids import find_custom_id
from penstock.export.grid import find_grid, find_ordinals, list_live, read_grid, stretches
from penstock.export.merged import read_attempts_page, read_bodies, read_results_page
from penstock.export.pending import PendingQuery, Position, list_pending, read_pending
from penstock.latency import LATENCY_BUCKETS
from tests.support.pending_crowd import Crowd, fill_crowd
from tests.support.plans import Mode, Plan, Session

WINDOW = 60
LISTED = 25
PAGE = 100
_NEWEST = UUID(int=2**128 - 1)
_FILL = (
    "INSERT INTO penstock.samples (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried, refused,"
    "  input_tokens, output_tokens, latency)"
    " SELECT %(batch)s, step, date_bin(make_interval(secs => step), now() - make_interval(secs => age), 'epoch'),"
    "        900 * step, 5, 5, 0, 3, 0, 0, 0, array_fill(9::int8, ARRAY[%(buckets)s::int4])"
    "   FROM (SELECT 1 AS step, age FROM generate_series(1, 600) AS age"
    "         UNION ALL SELECT 10, age FROM generate_series(610, 3600, 10) AS age) AS samples",
    "INSERT INTO penstock.operations (id, batch_id, kind, wish, state, created_at, ended_at)"
    " SELECT gen_random_uuid(), %(batch)s, 'reprocess', '{}', 'done', now(), now() FROM generate_series(1, 200)",
)


def main() -> None:
    parser = options(__doc__)
    chosen = parser.parse_args()
    rows, jobs = sized(chosen, 1_000_000, 20_000), sized(chosen, 1_000, 50)
    with server() as conninfo, scratch_database(conninfo) as database, Session(database) as session:
        crowd = fill_crowd(session, jobs, rows, whole=True)
        for statement in _FILL:
            session.execute(statement, {"batch": crowd.batch, "buckets": LATENCY_BUCKETS})
        settle_down(database)
        found = [
            (name, [_statements_ms(session.explain(page, Mode.GENERIC)) for _ in range(RUNS)])
            for name, page in _pages(crowd).items()
        ]
    print_table(
        [f"query of a page, {crowd.rows:,} rows", "statements", "slowest, ms", "all, ms"],
        [
            [
                name,
                str(len(runs[-1])),
                f"{median([max(run) for run in runs]):.2f}",
                f"{median([sum(run) for run in runs]):.2f}",
            ]
            for name, runs in found
        ],
    )


def _statements_ms(plan: Plan) -> list[float]:
    statements = plan.root["Plans"] if plan.root["Node Type"] == "Statements" else [plan.root]
    return [float(statement["Actual Total Time"]) for statement in statements]


def _pages(crowd: Crowd) -> Mapping[str, Operation]:
    batch, middle = crowd.batch, crowd.deep.ordinal
    pending = PendingQuery(batch_id=batch)
    group = stored_fingerprint(crowd.fingerprint)
    return {
        "work: list of all": lambda c: _list_work(c, None),
        "work: list of an owner": lambda c: _list_work(c, "bob"),
        "work: list, by a text that none has": lambda c: _list_work(c, None, "nowhere"),
        "work: a tick of one": lambda c: work.read_work(c, [batch], None),
        "work: a page of one": lambda c: read_details(c, batch, None, grace_s=30, for_admin=True),
        "job: rows in view": lambda c: _rows(c, crowd, list(range(middle, middle + WINDOW))),
        "job: last rows": lambda c: _rows(c, crowd, list(range(crowd.rows - WINDOW, crowd.rows))),
        "job: rows that failed": lambda c: _rows_of(c, crowd, {"ERROR"}, 0),
        "job: rows that wait": lambda c: _rows_of(c, crowd, {"PENDING", "PROCESSING"}, middle),
        "job: rows of an error group": lambda c: _rows_of_group(c, crowd),
        "job: one row": lambda c: _row(c, crowd, middle),
        "job: pending, first": lambda c: _pending_rows(c, pending, None),
        "job: pending, deep": lambda c: _pending_rows(c, pending, crowd.deep),
        "batch: requests in view": lambda c: read_results_page(c, batch, middle, WINDOW),
        "batch: last requests": lambda c: read_results_page(c, batch, crowd.rows - WINDOW, WINDOW),
        "batch: requests that failed": lambda c: read_results_page(c, batch, 0, WINDOW, ["failed"]),
        "batch: requests that wait": lambda c: read_results_page(c, batch, middle, WINDOW, ["pending", "processing"]),
        "batch: requests of an error group": lambda c: read_results_page(c, batch, 0, WINDOW, fingerprint=group),
        "batch: pending, first": lambda c: _pending_requests(c, pending, None),
        "batch: pending, deep": lambda c: _pending_requests(c, pending, crowd.deep),
        "batch: a custom id, near its number": lambda c: find_custom_id(c, batch, str(middle), 1),
        "error groups": lambda c: list_error_groups(c, batch, None, 201),
        "charts": lambda c: _charts(c, batch),
        "operations": lambda c: reprocess.list_operations(c, batch, limit=21),
    }


async def _list_work(connection: Connection, owner: str | None, text: str | None = None) -> None:
    met = await work.find_work(
        connection,
        owner=owner,
        dialects=work.DIALECTS,
        states=work.states_behind(work.STATES),
        below=_NEWEST,
        look=200 if text else LISTED + 1,
        text=text,
    )
    found = await work.read_work(connection, [id_ for id_, fits in met if fits], owner)
    await work.read_paces(connection, found)


async def _rows(connection: Connection, crowd: Crowd, ordinals: list[int]) -> None:
    if (grid := await find_grid(connection, crowd.batch)) is None:
        raise AssertionError("the job has rows")
    live = await list_live(connection, crowd.batch, ordinals[0], ordinals[-1] + 2)
    await read_grid(connection, grid, live, stretches(ordinals))


async def _rows_of(connection: Connection, crowd: Crowd, statuses: set[str], start: int) -> None:
    if (grid := await find_grid(connection, crowd.batch)) is None:
        raise AssertionError("the job has rows")
    live = await list_live(connection, crowd.batch, start)
    ordinals = await find_ordinals(connection, grid, live, statuses, start, WINDOW + 1)
    await read_grid(connection, grid, live, stretches(ordinals[:WINDOW]))


async def _rows_of_group(connection: Connection, crowd: Crowd) -> None:
    await _rows(connection, crowd, await list_failures_of(connection, crowd.lane, crowd.fingerprint, -1, WINDOW))


async def _row(connection: Connection, crowd: Crowd, ordinal: int) -> None:
    await read_attempts_page(connection, crowd.batch, None, 200, ordinal + 1)
    await _rows(connection, crowd, [ordinal])


async def _pending_rows(connection: Connection, query: PendingQuery, after: Position | None) -> None:
    page = await list_pending(connection, query, after, PAGE)
    if query.batch_id is None or (grid := await find_grid(connection, query.batch_id)) is None:
        raise AssertionError("the job has rows")
    await read_pending(connection, grid, page)


async def _pending_requests(connection: Connection, query: PendingQuery, after: Position | None) -> None:
    page = await list_pending(connection, query, after, PAGE)
    await read_bodies(connection, [(row.span.source_id, row.span.source_lane, row.ordinal) for row in page.rows])


async def _charts(connection: Connection, batch_id: UUID) -> None:
    if (span := await find_span(connection, batch_id)) is None:
        raise AssertionError("it has samples")
    start, end = span[0], span[1] + timedelta(seconds=1)
    await read_points(connection, batch_id, start, end, choose_resolution_s(start, end))


if __name__ == "__main__":
    main()
