"""A database with one batch to look at, and any number of neighbours that must not matter to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from uuid import UUID, uuid4

import psycopg
from psycopg.conninfo import make_conninfo

from penstock.batches.create import create_batch
from penstock.batches.steer import cancel_batch, pause_batch
from penstock.claim import claim as claims
from penstock.claim.claim import LinePlace
from penstock.db import sql
from penstock.db.pool import Connection
from penstock.model import Lease
from tests.support.plans import Session

POOL = "plans"
ROUTE = "model-busy"
"""Has the lane to look at, and the neighbours' runnable lanes behind it."""
DEFERRED_ROUTE = "model-deferred"
LINED_UP_ROUTE = "lined-up"
"""Has deferrals alone: tomorrow's, and held ones that would be due."""
LEASED = 100

TABLES = (
    *("files", "file_lanes", "templates", "batches", "lanes", "leases"),
    *("deferrals", "outcomes", "attempts", "reclaims", "progress", "journal", "samples", "workers", "gates"),
    *("sessions", "session_requests", "operations", "row_keys"),
    *("file_chunks", "erasures", "erasure_pieces", "webhook_endpoints", "webhook_deliveries"),
    *("jobs", "job_columns", "job_errors", "blobs", "blob_bytes", "blob_uses"),
    *("uploads", "upload_parts", "reservations", "ingested_files", "sighted_files"),
)

_names = (f"plan{number}" for number in count())

_NEIGHBOURS = (
    # Files of two lines, a batch of each, one runnable and one used-up lane in every batch.
    "INSERT INTO penstock.files (id, owner, filename, worker_id, lines, state, created_at, sealed_at)"
    " SELECT gen_random_uuid(), 'local', 'f', gen_random_uuid(), 2, 'ready', now(), now()"
    "   FROM generate_series(1, %(few)s)",
    "INSERT INTO penstock.file_lanes"
    " SELECT source_id, n, 'model-' || n, '/v1', 1 FROM penstock.files, generate_series(0, 1) AS n"
    " ON CONFLICT DO NOTHING",
    "INSERT INTO penstock.batches (id, owner, file_id, pool, total, created_at, validated_at)"
    " SELECT gen_random_uuid(), 'local', id, %(pool)s, 2, now(), now() FROM penstock.files WHERE kind = 'input'",
    "INSERT INTO penstock.lanes (batch_id, owner, pool, route, endpoint, source_id, source_lane, next, total, tag)"
    " SELECT b.id, 'owner-' || f.source_id %% 7, %(pool)s, %(route)s, '/v1', f.source_id, n, n, 1, f.source_id"
    "   FROM penstock.batches b JOIN penstock.files f ON f.id = b.file_id, generate_series(0, 1) AS n",
    "INSERT INTO penstock.jobs (batch_id, owner, job_type, spec, client, created_at, ingested_at)"
    " SELECT id, owner, 'job', '{}', '', now(), now() FROM penstock.batches ON CONFLICT DO NOTHING",
    "INSERT INTO penstock.job_columns (batch_id, name)"
    " SELECT batch_id, 'column_' || n FROM penstock.jobs, generate_series(1, 3) AS n ON CONFLICT DO NOTHING",
    "INSERT INTO penstock.progress (batch_id) SELECT id FROM penstock.batches, generate_series(1, 5)",
    "INSERT INTO penstock.journal_heads (batch_id) SELECT id FROM penstock.batches ON CONFLICT DO NOTHING",
    "INSERT INTO penstock.journal (batch_id, lane_id, completed, others, written_at)"
    " SELECT id, 0, '{[0,1)}', '{}', now() FROM penstock.batches, generate_series(1, 5)",
    "INSERT INTO penstock.row_keys (source_id, key, ordinal)"
    " SELECT source_id, n::text, n FROM penstock.files, generate_series(0, 4) AS n ON CONFLICT DO NOTHING",
    "INSERT INTO penstock.job_errors (batch_id, fingerprint, count)"
    " SELECT id, n, 1 FROM penstock.batches, generate_series(1, 3) AS n",
    "INSERT INTO penstock.operations (id, batch_id, kind, wish, state, created_at, ended_at)"
    " SELECT gen_random_uuid(), id, 'reprocess', '{}', 'done', now(), now()"
    "   FROM penstock.batches, generate_series(1, 5)",
    "INSERT INTO penstock.sessions (id, owner, key, lane_id, created_at)"
    " SELECT id, 'local', id::text, -row_number() OVER (), now() FROM penstock.batches ON CONFLICT DO NOTHING",
    "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
    " SELECT gen_random_uuid(), %(pool)s, 'h', 'm', 1, 0, now(), now() FROM generate_series(1, %(few)s)",
    "INSERT INTO penstock.leases (lane_id, batch_id, pool, route, limited, worker_id, ordinals, attempt,"
    "  claimed_at, progressed_at)"
    " SELECT l.id, l.batch_id, l.pool, l.route, false, w.id, '{[0,1)}', 1, now(), now()"
    "   FROM (SELECT *, row_number() OVER () AS n FROM penstock.lanes WHERE NOT runnable) AS l"
    "   JOIN (SELECT id, row_number() OVER () AS n FROM penstock.workers) AS w USING (n)",
)
_DEFERRALS = (
    "INSERT INTO penstock.deferrals (lane_id, batch_id, owner, pool, route, limited, ordinals, attempt, reason, due_at,"
    "  held, tag)"
    " SELECT l.id, l.batch_id, l.owner, l.pool, kind.route, false, '{[0,1)}', 1, 'retry', now() + wait, held, kind.tag"
    "   FROM penstock.lanes l,"
    "        (VALUES (%(deferred)s, interval '1 day', false, NULL), (%(deferred)s, interval '-1 day', true, NULL),"
    "                (%(lined_up)s, interval '-1 day', false, 1::float8)) AS kind (route, wait, held, tag),"
    "        generate_series(1, 5)"
    "  WHERE l.runnable"
)
_TEMPLATES = (
    "INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, body)"
    ' SELECT %(source)s, 0, n, n + 1, n, \'{"prompt": "some words to answer"}\''
    "   FROM generate_series(0, %(lines)s - 1) AS n"
)
_OUTCOMES = (
    "INSERT INTO penstock.outcomes (lane_id, ordinal, line, state, attempts, lease_id, finished_at, custom_id,"
    "  response)"
    " SELECT %(lane)s, n, n + 1,"
    "        CASE n %% 50 WHEN 0 THEN 'failed' ELSE 'completed' END::penstock.outcome_state, 1, 0, now(), n,"
    "        CASE n %% 50 WHEN 0 THEN NULL ELSE '\"an answer\"'::bytea END"
    "   FROM generate_series(0, %(half)s - 1) AS n"
)
_JOURNAL = (
    "INSERT INTO penstock.journal (batch_id, lane_id, completed, others, written_at)"
    " SELECT %(batch)s, %(lane)s, '{}', int4multirange(int4range(50 * n, 50 * n + 1)), now()"
    "   FROM generate_series(0, 9) AS n"
)
_ATTEMPTS = (
    "INSERT INTO penstock.attempts (lane_id, ordinal, attempt, lease_id, worker_id, ended_at, duration_ms,"
    "  counted, error_code, error_message)"
    " SELECT %(lane)s, n, 1, 0, gen_random_uuid(), now(), 1, true, 'e', 'm'"
    "   FROM generate_series(0, %(half)s - 1) AS n"
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The batch to look at: half of its lines have outcomes, a few are leased, the rest is to be claimed."""

    file: UUID
    batch: UUID
    lane: int
    source: int
    lines: int
    worker: UUID


@dataclass(frozen=True, slots=True)
class World:
    """One populated database."""

    session: Session
    subject: Subject
    lease: Lease
    """Ordinals of the subject's lane, as many as LEASED."""
    paused: UUID
    settled: UUID
    """A batch of which every line has an outcome."""
    drained: UUID
    """A cancelled batch with nothing in flight."""


@dataclass(frozen=True, slots=True)
class Worlds:
    """The same at two sizes."""

    statistics: str
    """When the planner's were gathered."""
    small: World
    large: World


@contextmanager
def fresh_database(server: str) -> Iterator[Session]:
    """A session in a database of its own, in which statistics and dead rows stay as the test makes them."""
    name = next(_names)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock")
        with Session(make_conninfo(server, dbname=name)) as session:
            for table in TABLES:
                session.execute(f"ALTER TABLE penstock.{table} SET (autovacuum_enabled = false)")
            yield session
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


_TABLES = "SELECT oid FROM pg_class WHERE relnamespace = 'penstock'::regnamespace"
# The first time, before anything was analysed again.
_REMEMBER_EMPTY = (
    "CREATE TABLE IF NOT EXISTS public.analysed_empty AS"
    f" SELECT oid AS relation, relpages, reltuples, relallvisible FROM pg_class WHERE oid IN ({_TABLES})"
)
_FORGET_ROWS = f"DELETE FROM pg_statistic WHERE starelid IN ({_TABLES})"
_FORGET_SIZES = (
    "UPDATE pg_class SET relpages = e.relpages, reltuples = e.reltuples, relallvisible = e.relallvisible"
    "  FROM public.analysed_empty e WHERE pg_class.oid = e.relation"
)


def inform(session: Session, statistics: str) -> None:
    """Statistics of tables that were analysed while they were empty: as they were then, or taken anew. One database
    serves for both, in any order."""
    session.execute(_REMEMBER_EMPTY)
    if statistics == "analysed":
        session.execute("ANALYZE")
    else:
        session.execute(_FORGET_ROWS)
        session.execute(_FORGET_SIZES)
    ((known,),) = session.execute(
        "SELECT max(reltuples) FROM pg_class WHERE relnamespace = 'penstock'::regnamespace AND relkind = 'r'"
    )
    assert (known > 100) == (statistics == "analysed"), known


def sweep(session: Session) -> None:
    """Take away what was rolled back so far. What the planner believes of the tables' sizes stays as it is."""
    believed = f"SELECT oid, relpages, reltuples, relallvisible FROM pg_class WHERE oid IN ({_TABLES})"
    session.execute(f"CREATE TABLE public.believed AS {believed}")
    session.execute("VACUUM")
    session.execute(
        "UPDATE pg_class c SET relpages = b.relpages, reltuples = b.reltuples, relallvisible = b.relallvisible"
        "  FROM public.believed b WHERE c.oid = b.oid"
    )
    session.execute("DROP TABLE public.believed")


def populate(session: Session, lines: int) -> World:
    """A subject of so many lines, neighbours in proportion, and a few batches in other states."""
    subject = fill(session, lines)
    paused, settled, drained = (make_subject(session, 2, priority=0).batch for _ in range(3))
    session.run(lambda connection: pause_batch(connection, paused))
    session.run(lambda connection: cancel_batch(connection, drained))
    session.execute("INSERT INTO penstock.progress (batch_id, completed) VALUES (%(id)s, 1)", {"id": settled})
    (lease,) = session.run(lambda connection: claim(connection, subject, LEASED))
    return World(session, subject, lease, paused, settled, drained)


def fill(session: Session, lines: int) -> Subject:
    """Rows in every table; with one line, one or two rows in each."""
    for statement in _NEIGHBOURS:
        session.execute(statement, {"few": max(1, lines // 20), "pool": POOL, "route": ROUTE})
    subject = make_subject(session, lines)
    session.execute(_DEFERRALS, {"deferred": DEFERRED_ROUTE, "lined_up": LINED_UP_ROUTE})
    return subject


async def claim(
    connection: Connection, subject: Subject, want: int, places: dict[str, LinePlace] | None = None
) -> list[Lease]:
    """From the front of the line, or from where it began the last time, which is noted."""
    claimed = await claims.claim_in_line(
        connection,
        pool=POOL,
        wants={ROUTE: want},
        worker_id=subject.worker,
        taper_floor=want,
        places=places,
        due_from=None if places is None else datetime.now(UTC) - timedelta(seconds=1),
    )
    if places is not None:
        places.update({route: line[0] for route, line in claimed.places.items()})
    return claimed.leases


def make_subject(session: Session, lines: int, priority: int = 1) -> Subject:
    """A batch over a file of its own, before all neighbours in the claim's order."""
    file, worker, half = uuid4(), uuid4(), (lines + 1) // 2
    ((source,),) = session.execute(
        "INSERT INTO penstock.files (id, owner, filename, worker_id, lines, state, created_at, sealed_at)"
        " VALUES (%(file)s, 'local', 'f', %(worker)s, %(lines)s, 'ready', now(), now()) RETURNING source_id",
        {"file": file, "worker": worker, "lines": lines},
    )
    session.execute(
        "INSERT INTO penstock.file_lanes VALUES (%(source)s, 0, %(route)s, '/v1', %(lines)s)",
        {"source": source, "route": ROUTE, "lines": lines},
    )
    session.execute(_TEMPLATES, {"source": source, "lines": lines})
    batch = session.run(
        lambda connection: create_batch(connection, file_id=file, owner="local", pool=POOL, priority=priority)
    )
    ((lane,),) = session.execute(
        "UPDATE penstock.lanes SET next = %(half)s WHERE batch_id = %(batch)s RETURNING id",
        {"half": half, "batch": batch},
    )
    session.execute(_OUTCOMES, {"lane": lane, "half": half})
    session.execute(_ATTEMPTS, {"lane": lane, "half": half})
    session.execute(_JOURNAL, {"batch": batch, "lane": lane})
    session.execute(
        "INSERT INTO penstock.progress (batch_id, completed) VALUES (%(batch)s, %(half)s)",
        {"batch": batch, "half": half},
    )
    session.execute(
        "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
        " VALUES (%(worker)s, %(pool)s, 'h', 'm', 1, 0, now(), now())",
        {"worker": worker, "pool": POOL},
    )
    return Subject(file, batch, lane, source, lines, worker)


async def check_in(connection: Connection, worker: UUID) -> bool:
    """A heartbeat, on a connection of the test's."""
    parameters = {"ids": [worker], "draining": [], "now": None}
    statement = sql.load("penstock.worker", "heartbeat.sql")["heartbeat_if_known"]
    return await (await connection.execute(statement, parameters)).fetchone() is not None
