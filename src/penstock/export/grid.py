"""A job's rows with what became of each, in the order of the input: what the grid shows and every sheet exports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection
from penstock.export.order import Lane, ranges_of

_SQL = sql.load("penstock.export", "grid.sql")

PENDING: Final = "PENDING"
PROCESSING: Final = "PROCESSING"
STATUS_OF: Final = {"completed": "DONE", "failed": "ERROR", "not_found": "NOT_FOUND", "skipped": "SKIPPED"}


class GridRow(NamedTuple):
    """A row and what became of it."""

    line: int
    """Number of the row, from 1."""
    custom_id: str
    body: bytes
    """The input as it was stored: `{"row": …, "raw": …}`."""
    status: str
    attempts: int
    error_code: str | None
    error: str | None
    result: bytes | None
    """The result's columns, one JSON object. A row that is run again keeps its last result until it has a new one."""
    worker_id: UUID | None
    """The worker that holds the row now."""
    updated_at: datetime | None
    """None for a row that was not claimed yet."""


class _Live(NamedTuple):
    stop: int
    attempts: int
    worker_id: UUID | None
    since: datetime


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a job that are in flight or wait to be tried again, at one instant."""

    starts: list[int]
    ranges: list[_Live]

    @classmethod
    def of(cls, listed: Iterable[tuple[str, int, UUID | None, datetime]]) -> LiveRows:
        found = sorted(
            (start, _Live(stop, attempts, worker_id, since))
            for ordinals, attempts, worker_id, since in listed
            for start, stop in ranges_of(ordinals)
        )
        return cls([start for start, _ in found], [live for _, live in found])

    def at(self, ordinal: int) -> _Live | None:
        place = bisect_right(self.starts, ordinal) - 1
        return self.ranges[place] if place >= 0 and ordinal < self.ranges[place].stop else None


class JobColumns(NamedTuple):
    """Columns of a job, by where they come from."""

    job_type: str
    input: list[str]
    result: list[str]


async def read_columns(connection: Connection, batch_id: UUID) -> JobColumns | None:
    """Read a job's columns; None if the batch is no job."""
    row = await (await connection.execute(_SQL["read_columns"], {"batch": batch_id})).fetchone()
    return JobColumns(*row) if row else None


async def find_grid(connection: Connection, batch_id: UUID) -> Lane | None:
    """Find the lane that a job's rows are in; None while there are none."""
    row = await (await connection.execute(_SQL["find_grid"], {"batch": batch_id})).fetchone()
    return Lane(*row) if row else None


async def list_live(connection: Connection, batch_id: UUID) -> LiveRows:
    """List the rows of a job that are in flight or wait to be tried again."""
    return LiveRows.of(await (await connection.execute(_SQL["list_live"], {"batch": batch_id})).fetchall())


async def read_grid(connection: Connection, lane: Lane, live: LiveRows, start: int, stop: int) -> list[GridRow]:
    """Read the rows of a stretch of ordinals."""
    stretch = {"start": start, "stop": stop}
    source = {"source_id": lane.source_id, "source_lane": lane.source_lane}
    rows = await (await connection.execute(_SQL["read_rows"], {**stretch, **source}, binary=True)).fetchall()
    cursor = await connection.execute(_SQL["read_row_outcomes"], {**stretch, "lane_id": lane.id}, binary=True)
    outcomes = {row[0]: row[1:] for row in await cursor.fetchall()}
    return [
        _grid_row(line, custom_id, body, outcomes.get(ordinal), live.at(ordinal))
        for ordinal, line, custom_id, body in rows
    ]


def _grid_row(line: int, custom_id: str, body: bytes, outcome: tuple[Any, ...] | None, live: _Live | None) -> GridRow:
    state, attempts, code, error, result, updated_at = outcome or (None, 0, None, None, None, None)
    worker_id = None
    status = STATUS_OF.get(state, PENDING)
    if live is not None:
        # Claimed for the first time, to be tried again, or run again on purpose: then an old outcome is there too.
        attempts, worker_id, updated_at = live.attempts, live.worker_id, live.since
        status = PENDING if worker_id is None else PROCESSING
    return GridRow(line, custom_id, body, status, attempts, code, error, result, worker_id, updated_at)
