"""Jobs: what a batch over rows has besides, and the columns of its results."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from penstock.batches.lifecycle import log_created
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.errors import PenstockError
from penstock.quotas.quotas import check_open_batches_blocking

_SQL = sql.load("penstock.batches", "jobs.sql")


class KeyTaken(PenstockError):  # noqa: N818 - a verdict on the input
    """Another batch was made under the idempotency key."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a batch has as a job."""

    batch_id: UUID
    owner: str
    job_type: str
    spec: dict[str, Any]
    client: str
    """The address that the upload came from, or the adapter that found the file."""
    created_at: datetime
    ingested_at: datetime | None
    """When all rows were stored; None while more may come."""
    columns: list[str]
    """The input's columns."""
    rows: int
    """Rows stored so far by the ingest."""
    problem: str | None
    """Why its rows could not be read to their end."""
    images: bool
    """Whether its rows stand for images."""
    growing: bool
    """Rows are still to be read, or were when it ended."""
    filename: str | None
    """Name of the input, of the first file if several came together; None once it is deleted."""
    input_bytes: int
    last_heartbeat: datetime | None
    """When a worker that holds some of its rows was last heard of."""
    last_error: str | None
    """Message of the row that failed last, unless it was run again since."""


async def insert_job(
    connection: Connection,
    batch_id: UUID,
    *,
    owner: str,
    job_type: str,
    spec: Mapping[str, Any],
    client: str,
    columns: Sequence[str] = (),
    images: bool = False,
    ingested: bool = False,
    now: Now = None,
) -> None:
    """Make a batch a job, in the transaction that creates it."""
    parameters = {
        "batch_id": batch_id,
        "owner": owner,
        "job_type": job_type,
        "spec": json.dumps(spec),
        "client": client,
        "columns": list(columns),
        "images": images,
        "ingested": ingested,
        "now": now,
    }
    await connection.execute(_SQL["insert_job"], parameters)


def create_job(
    connection: psycopg.Connection,
    batch_id: UUID,
    *,
    owner: str,
    file_id: UUID,
    pool: str,
    key: str | None,
    fingerprint: bytes,
    priority: int,
    job_type: str,
    spec: str,
    client: str,
    actor: str | None = None,
    parts: str | None = None,
    max_open: int = 0,
) -> None:
    """Create a job over an upload, in the transaction that seals it; `actor` is who asked for it, if that is not the
    owner. Raises KeyTaken, and QuotaExceeded if the owner has `max_open` open batches already; 0 is no limit."""
    if max_open:
        check_open_batches_blocking(connection, owner, max_open)
    told = {
        "batch_id": batch_id,
        "owner": owner,
        "file_id": file_id,
        "pool": pool,
        "key": key,
        "fingerprint": fingerprint,
        "priority": priority,
        "job_type": job_type,
        "spec": spec,
        "client": client,
        "actor": owner if actor is None else actor,
        "parts": parts,
        "now": None,
    }
    try:
        connection.execute(_SQL["create_job"], told)
    except psycopg.errors.UniqueViolation:
        raise KeyTaken("the idempotency key was used before", hint="Use a new key for every job.") from None
    log_created(batch_id, owner, "job")


async def find_job_by_key(connection: Connection, owner: str, key: str) -> tuple[UUID, bytes] | None:
    """Find the job that was made under a key: its id, and the fingerprint of what was asked."""
    row = await fetch_one(connection, _SQL["find_job_by_key"], {"owner": owner, "key": key})
    return (row[0], row[1]) if row else None


async def read_jobs(connection: Connection, batches: Sequence[UUID]) -> dict[UUID, Job]:
    """Read the jobs among some batches."""
    cursor = await connection.execute(_SQL["read_jobs"], {"batches": list(batches)})
    return {row[0]: Job(*row) for row in await cursor.fetchall()}


class Ingest(NamedTuple):
    """A job whose rows are to be read."""

    batch_id: UUID
    bytes: int
    """Size of the upload as it came."""
    owner: str
    source_id: int
    filename: str
    pool: str
    spec: dict[str, Any]
    parts: list[tuple[str, int]] | None
    """Name and size of each of the files that came together; None if it was one."""
    rows: int
    """Rows that are stored already."""
    columns: list[str]


async def take_ingest(
    connection: Connection,
    worker_id: UUID,
    grace_s: float,
    reading: Collection[UUID] = (),
    full_owners: Collection[str] = (),
    *,
    now: Now = None,
) -> Ingest | None:
    """Take the ingest of a job that nobody alive reads; None if there is none. `reading` are those that this process
    reads already, `full_owners` those of whom it reads no more at a time."""
    parameters = {
        "worker_id": worker_id,
        "grace_s": grace_s,
        "reading": list(reading),
        "full_owners": list(full_owners),
        "now": now,
    }
    taken = await fetch_one(connection, _SQL["take_ingest_if_free"], parameters)
    if taken is None:
        return None
    row = await fetch_one(connection, _SQL["read_ingest"], {"batch_id": taken[0]})
    if row is None:
        return None
    ((size,),) = await (await connection.execute(_SQL["read_size"], {"source_id": row[1]})).fetchall()
    return Ingest(taken[0], size, *row)


async def count_rows(
    connection: Connection,
    batch_id: UUID,
    worker_id: UUID,
    before: int,
    rows: int,
    columns: Sequence[str],
    *,
    images: bool,
) -> bool:
    """Count rows that this transaction stores after those `before`. False if another reads the job now: then none may
    be stored."""
    parameters = {
        "batch_id": batch_id,
        "worker_id": worker_id,
        "before": before,
        "rows": rows,
        "columns": list(columns),
        "images": images,
    }
    return await fetch_one(connection, _SQL["count_rows_if_reading"], parameters) is not None


async def end_ingest(
    connection: Connection,
    batch_id: UUID,
    worker_id: UUID,
    rows: int,
    columns: Sequence[str],
    problem: str | None = None,
    *,
    broken_off: bool = False,
    now: Now = None,
) -> bool:
    """End the ingest: all rows are stored, or the next cannot be read. False if another reads the job.

    If it is `broken_off` because the job takes no more rows, False too if that takes some again. The batch is locked by
    this transaction.
    """
    parameters = {
        "batch_id": batch_id,
        "worker_id": worker_id,
        "rows": rows,
        "columns": list(columns),
        "problem": problem,
        "broken_off": broken_off,
        "now": now,
    }
    return await fetch_one(connection, _SQL["end_ingest_if_reading"], parameters) is not None
