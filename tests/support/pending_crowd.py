"""One large job, with many others beside it: rows that were never claimed, in flight, put off, failed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol
from uuid import UUID, uuid4

from penstock.batches.error_groups import fingerprint
from penstock.export.pending import Position

POOL, ROUTE = "crowd", "price"
OWNERS = ("ann", "bob")
SPAN = 500
"""Rows of a lease or a deferral of the large job."""
SPANS = 20
ERRORS = 200
"""Rows of the large job that failed in one way, at its beginning; as many others failed, each in a way of its own."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_START = datetime(2024, 5, 1, tzinfo=UTC)


class Executes(Protocol):
    def execute(self, query: str, parameters: Any = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Crowd:
    batch: UUID
    lane: int
    rows: int
    deep: Position
    """In the middle of the large job's rows that were never claimed."""
    behind: Position
    """Behind all of them."""
    deferred_at: datetime
    fingerprint: str
    newest: list[UUID]
    """A page of jobs."""


def fill_crowd(session: Executes, jobs: int, rows: int, *, whole: bool = False) -> Crowd:
    """A job with so many rows pending, made first, and so many small ones of two owners beside it. Of the large one not
    every row has an input, unless it is to be `whole`: those at its beginning, in the middle and at the end do."""
    batch, span = uuid4(), min(SPAN, rows // (4 * SPANS))
    total, claimed = rows + 2 * ERRORS, 2 * ERRORS + 2 * SPANS * span
    deep = (claimed + total) // 2
    values = {
        "batch": batch,
        "rows": total,
        "failed": 2 * ERRORS,
        "next": claimed,
        "deep": deep,
        "whole": whole,
        "jobs": jobs,
        "spans": SPANS,
        "span": span,
        "pool": POOL,
        "route": ROUTE,
        "start": _START,
        "owners": list(OWNERS),
        "fingerprint": int(_FINGERPRINT, 16),
    }
    for statement in _STATEMENTS:
        session.execute(statement, values)
    ((lane,),) = session.execute("SELECT id FROM penstock.lanes WHERE batch_id = %(batch)s", values)
    newest = session.execute("SELECT id FROM penstock.batches WHERE dialect = 'job' ORDER BY created_at, id LIMIT 20")
    start = (_START - _EPOCH) // timedelta(microseconds=1)
    return Crowd(
        batch,
        lane,
        total,
        Position(start, 0, lane, deep),
        Position(start, 0, lane, 2**31 - 2),
        _START + timedelta(days=1),
        _FINGERPRINT,
        [name for (name,) in newest],
    )


_FINGERPRINT = fingerprint("sold_out", None, "sold out")

_STATEMENTS = (
    # The large job, then the small ones, a second apart.
    "CREATE TEMP TABLE crowd AS"
    " SELECT n, CASE WHEN n = 0 THEN %(batch)s ELSE gen_random_uuid() END AS batch_id, gen_random_uuid() AS file_id,"
    "        (%(owners)s::text[])[1 + n %% 2] AS owner, CASE WHEN n = 0 THEN %(rows)s ELSE 10 END AS rows,"
    "        %(start)s::timestamptz + make_interval(secs => n) AS at"
    "   FROM generate_series(0, %(jobs)s) AS n",
    "INSERT INTO penstock.files (id, owner, filename, purpose, worker_id, lines, state, created_at, sealed_at)"
    " SELECT file_id, owner, 'rows.csv', 'job', gen_random_uuid(), rows, 'ready', at, at FROM crowd ORDER BY n",
    "INSERT INTO penstock.batches (id, owner, dialect, file_id, pool, total, created_at, validated_at)"
    " SELECT batch_id, owner, 'job', file_id, %(pool)s, rows, at, at FROM crowd",
    "INSERT INTO penstock.jobs (batch_id, owner, job_type, spec, client, created_at, ingested_at)"
    " SELECT batch_id, owner, 'prices', '{}', '', at, at FROM crowd",
    "INSERT INTO penstock.lanes (batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, next,"
    "  total, tag)"
    " SELECT c.batch_id, c.owner, c.at, %(pool)s, %(route)s, 'rows', f.source_id, 0,"
    "        CASE WHEN c.n = 0 THEN %(next)s ELSE 0 END, c.rows, c.n"
    "   FROM crowd c JOIN penstock.files f ON f.id = c.file_id ORDER BY c.n",
    "INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, summary, body)"
    ' SELECT f.source_id, 0, o, o + 1, o + 1, \'Chair\', \'{"row": {"sku": 1}, "raw": ["1"]}\''
    "   FROM crowd c JOIN penstock.files f ON f.id = c.file_id, generate_series(0, c.rows - 1) AS o"
    "  WHERE %(whole)s OR o < %(next)s + 1000 OR o >= c.rows - 1000 OR abs(o - %(deep)s) < 1000",
    "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
    " SELECT gen_random_uuid(), %(pool)s, 'h', 'm', 1, 0, now(), now()"
    "   FROM generate_series(1, greatest(5, %(jobs)s / 10))",
    # Of the large job, leases and deferrals of many rows; of every other one, two of one row each.
    "INSERT INTO penstock.leases (lane_id, batch_id, owner, pool, route, limited, worker_id, ordinals, attempt,"
    "  claimed_at, progressed_at)"
    " SELECT l.id, l.batch_id, l.owner, l.pool, l.route, false,"
    "        (SELECT id FROM penstock.workers ORDER BY id LIMIT 1),"
    "        int4multirange(int4range(s.start, s.start + s.size)), 1, l.created_at + interval '2 days', now()"
    "   FROM penstock.lanes l CROSS JOIN LATERAL ("
    "     SELECT %(failed)s + n * %(span)s AS start, %(span)s AS size FROM generate_series(0, %(spans)s - 1) AS n"
    "      WHERE l.batch_id = %(batch)s"
    "     UNION ALL SELECT n, 1 FROM generate_series(0, 1) AS n WHERE l.batch_id <> %(batch)s) AS s",
    "INSERT INTO penstock.deferrals (lane_id, batch_id, owner, pool, route, limited, ordinals, attempt, reason,"
    "  deferred_at, due_at)"
    " SELECT l.id, l.batch_id, l.owner, l.pool, l.route, false, int4multirange(int4range(s.start, s.start + s.size)),"
    "        2, 'retry', l.created_at + interval '1 day', now() + interval '1 day'"
    "   FROM penstock.lanes l CROSS JOIN LATERAL ("
    "     SELECT %(failed)s + (%(spans)s + n) * %(span)s AS start, %(span)s AS size"
    "       FROM generate_series(0, %(spans)s - 1) AS n"
    "      WHERE l.batch_id = %(batch)s"
    "     UNION ALL SELECT 2 + n, 1 FROM generate_series(0, 1) AS n WHERE l.batch_id <> %(batch)s) AS s",
    "UPDATE penstock.lanes SET next = 4 WHERE batch_id <> %(batch)s AND endpoint = 'rows'",
    "INSERT INTO penstock.outcomes (lane_id, ordinal, line, state, attempts, lease_id, finished_at, custom_id,"
    "  error_code, error_message, fingerprint)"
    " SELECT l.id, n, n + 1, 'failed', 1, 0, now(), n + 1, 'sold_out', 'sold out',"
    "        CASE WHEN n < %(failed)s / 2 THEN %(fingerprint)s ELSE n END"
    "   FROM penstock.lanes l, generate_series(0, %(failed)s - 1) AS n WHERE l.batch_id = %(batch)s",
    # Groups as a fold leaves them: the large job has one for each way to fail, and many that come after.
    "INSERT INTO penstock.job_errors (batch_id, fingerprint, count, folded, first_at, last_at, code, line, message)"
    " SELECT %(batch)s, g, 1, true, now(), now(), 'sold_out', 1, 'sold out'"
    "   FROM (SELECT %(fingerprint)s + n AS g FROM generate_series(0, %(jobs)s * 10) AS n) AS groups",
    "INSERT INTO penstock.job_errors (batch_id, fingerprint, count, folded, first_at, last_at, code, line, message)"
    " SELECT batch_id, n2, 1, true, now(), now(), 'sold_out', 1, 'sold out' FROM crowd, generate_series(1, 3) AS n2"
    "  WHERE batch_id <> %(batch)s",
    "INSERT INTO penstock.audit (at, owner, actor, client, action, object_id)"
    " SELECT now(), owner, owner, '', 'pause', batch_id FROM crowd, generate_series(1, 20)",
    "DROP TABLE crowd",
)
