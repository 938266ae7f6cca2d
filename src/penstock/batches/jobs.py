"""Jobs: what a batch over rows has besides, and the columns of its results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now

_SQL = sql.load("penstock.batches", "jobs.sql")


@dataclass(frozen=True, slots=True)
class Job:
    """What a batch has as a job."""

    batch_id: UUID
    owner: str
    job_type: str
    spec: dict[str, Any]
    parts: list[tuple[str, int]] | None
    """Name and size of each of the files that came together; None if it was one."""
    client: str
    """The address that the upload came from, or the adapter that found the file."""
    created_at: datetime
    ingested_at: datetime | None
    """When all rows were stored; None while more may come."""
    columns: list[str]
    """The input's columns."""


async def insert_job(
    connection: Connection,
    batch_id: UUID,
    *,
    owner: str,
    job_type: str,
    spec: Mapping[str, Any],
    client: str,
    parts: Sequence[tuple[str, int]] | None = None,
    columns: Sequence[str] = (),
    ingested: bool = False,
    now: Now = None,
) -> None:
    """Make a batch a job, in the transaction that creates it."""
    parameters = {
        "batch_id": batch_id,
        "owner": owner,
        "job_type": job_type,
        "spec": json.dumps(spec),
        "parts": None if parts is None else json.dumps(parts),
        "client": client,
        "columns": list(columns),
        "ingested": ingested,
        "now": now,
    }
    await connection.execute(_SQL["insert_job"], parameters)


async def read_jobs(connection: Connection, batches: Sequence[UUID]) -> dict[UUID, Job]:
    """Read the jobs among some batches."""
    cursor = await connection.execute(_SQL["read_jobs"], {"batches": list(batches)})
    return {row[0]: Job(*row) for row in await cursor.fetchall()}
