"""A database with one batch to look at, and any number of neighbours that must not matter to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from tests.support.plans import Session

POOL = "plans"
BUSY_ROUTE = "model-busy"
"""Has the lane to look at, and the neighbours' runnable lanes behind it."""
DUE_ROUTE = "model-due"
"""Has due deferrals, and many that are not due or held."""

TABLES = (
    *("files", "file_lanes", "templates", "batches", "lanes", "leases"),
    *("deferrals", "outcomes", "attempts", "progress", "workers", "gates"),
)

_POPULATE = (
    # The neighbours: files of two lines each, their batches, one runnable and one used-up lane per batch.
    "INSERT INTO penstock.files (id, owner, filename, worker_id, lines, state, created_at, sealed_at)"
    " SELECT gen_random_uuid(), 'local', 'f', gen_random_uuid(), 2, 'ready', now(), now()"
    "   FROM generate_series(1, %(few)s)",
    "INSERT INTO penstock.file_lanes SELECT source_id, n, 'model-' || n, '/v1', 1"
    "   FROM penstock.files, generate_series(0, 1) AS n ON CONFLICT DO NOTHING",
    "INSERT INTO penstock.batches (id, owner, file_id, pool, total, created_at)"
    " SELECT gen_random_uuid(), 'local', id, %(pool)s, 2, now() FROM penstock.files",
    "INSERT INTO penstock.lanes (batch_id, pool, route, endpoint, source_id, source_lane, next, total)"
    " SELECT b.id, %(pool)s, %(busy)s, '/v1', f.source_id, n, n, 1"
    "   FROM penstock.batches b JOIN penstock.files f ON f.id = b.file_id, generate_series(0, 1) AS n",
    "INSERT INTO penstock.progress (batch_id, completed)"
    " SELECT id, 0 FROM penstock.batches, generate_series(1, 10)",
    "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
    " SELECT gen_random_uuid(), %(pool)s, 'h', 'm', 1, 0, now(), now() FROM generate_series(1, %(few)s)",
    # What the neighbours have in flight, and what they are to run again.
    "INSERT INTO penstock.leases (lane_id, batch_id, pool, route, limited, worker_id, ordinals, attempt,"
    "  claimed_at, progressed_at)"
    " SELECT l.id, l.batch_id, l.pool, l.route, false, w.id, '{[0,1)}', 1, now(), now()"
    "   FROM (SELECT *, row_number() OVER () AS n FROM penstock.lanes WHERE NOT runnable) AS l"
    "   JOIN (SELECT id, row_number() OVER () AS n FROM penstock.workers) AS w USING (n)",
    "INSERT INTO penstock.deferrals (lane_id, batch_id, pool, route, limited, ordinals, attempt, reason, due_at,"
    "  held)"
    " SELECT l.id, l.batch_id, l.pool, %(due)s, false, '{[0,1)}', 1, 'retry', now() + kind.wait, kind.held"
    "   FROM penstock.lanes l, (VALUES (interval '1 day', false), (interval '-1 day', true)) AS kind (wait, held),"
    "        generate_series(1, 5) WHERE l.runnable",
)

_OUTCOMES = (
    "INSERT INTO penstock.outcomes (lane_id, ordinal, line, state, attempts, lease_id, finished_at, custom_id,"
    "  response)"
    " SELECT %(lane)s, n, n + 1,"
    "        CASE n %% 50 WHEN 0 THEN 'failed' ELSE 'completed' END::penstock.outcome_state, 1, 0, now(), n,"
    "        CASE n %% 50 WHEN 0 THEN NULL ELSE '\"an answer\"'::bytea END"
    "   FROM generate_series(0, %(half)s - 1) AS n"
)
_ATTEMPTS = (
    "INSERT INTO penstock.attempts (lane_id, ordinal, attempt, lease_id, worker_id, ended_at, duration_ms,"
    "  counted, error_code, error_message)"
    " SELECT %(lane)s, n, 1, 0, gen_random_uuid(), now(), 1, true, 'e', 'm'"
    "   FROM generate_series(0, %(half)s - 1) AS n"
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The batch to look at: half of its lines have outcomes, the other half is still to be claimed."""

    file: UUID
    batch: UUID
    lane: int
    source: int
    lines: int
    worker: UUID


def without_autovacuum(session: Session) -> None:
    """Leave statistics and dead rows as the test makes them."""
    for table in TABLES:
        session.execute(f"ALTER TABLE penstock.{table} SET (autovacuum_enabled = false)")


def populate(session: Session, lines: int) -> Subject:
    """A subject of so many lines, and neighbours in proportion."""
    subject = make_subject(session, lines)
    few = max(1, lines // 20)
    for statement in _POPULATE:
        session.execute(statement, {"few": few, "pool": POOL, "busy": BUSY_ROUTE, "due": DUE_ROUTE})
    return subject


def make_subject(session: Session, lines: int) -> Subject:
    file, batch, worker = uuid4(), uuid4(), uuid4()
    half = (lines + 1) // 2
    common: dict[str, Any] = {"file": file, "batch": batch, "worker": worker, "pool": POOL, "lines": lines}
    ((source,),) = session.execute(
        "INSERT INTO penstock.files (id, owner, filename, worker_id, lines, state, created_at, sealed_at)"
        " VALUES (%(file)s, 'local', 'f', %(worker)s, %(lines)s, 'ready', now(), now()) RETURNING source_id",
        common,
    )
    common |= {"source": source, "half": half, "route": BUSY_ROUTE}
    for statement in (
        "INSERT INTO penstock.file_lanes VALUES (%(source)s, 0, %(route)s, '/v1', %(lines)s)",
        "INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, body)"
        " SELECT %(source)s, 0, n, n + 1, n, '{\"prompt\": \"some words to answer\"}'"
        "   FROM generate_series(0, %(lines)s - 1) AS n",
        "INSERT INTO penstock.batches (id, owner, file_id, pool, total, created_at)"
        " VALUES (%(batch)s, 'local', %(file)s, %(pool)s, %(lines)s, now())",
        "INSERT INTO penstock.progress (batch_id, completed) SELECT %(batch)s, 1 FROM generate_series(1, 10)",
        "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
        " VALUES (%(worker)s, %(pool)s, 'h', 'm', 1, 0, now(), now())",
    ):
        session.execute(statement, common)
    ((lane,),) = session.execute(
        "INSERT INTO penstock.lanes (batch_id, pool, route, endpoint, source_id, source_lane, next, total, priority)"
        " VALUES (%(batch)s, %(pool)s, %(route)s, '/v1', %(source)s, 0, %(half)s, %(lines)s, 1) RETURNING id",
        common,
    )
    session.execute(_OUTCOMES, {"lane": lane, "half": half})
    session.execute(_ATTEMPTS, {"lane": lane, "half": half})
    return Subject(file, batch, lane, source, lines, worker)
