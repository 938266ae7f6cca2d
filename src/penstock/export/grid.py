"""A job's rows with what became of each, in the order of the input: what the grid shows and every sheet exports."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import Int4Array
from penstock.db.pool import Connection, fetch_one
from penstock.export.order import ranges_of

_SQL = sql.load("penstock.export", "grid.sql")

PAGE_BYTES: Final = 8 * 1024 * 1024
"""Of inputs, and of results, that a page has at most, unless a single row has more."""

_LAST: Final = 2**31 - 1

PENDING: Final = "PENDING"
PROCESSING: Final = "PROCESSING"
STATUS_OF: Final = {"completed": "DONE", "failed": "ERROR", "not_found": "NOT_FOUND", "skipped": "SKIPPED"}


STATUSES: Final = (PENDING, PROCESSING, *STATUS_OF.values())


class Grid(NamedTuple):
    """Where a job's rows are."""

    lane_id: int
    source_id: int
    source_lane: int
    total: int
    next: int
    """Rows from here on were never claimed."""
    created_at: datetime


class GridRow(NamedTuple):
    """A row and what became of it."""

    ordinal: int
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
    updated_at: datetime
    """When the job's first rows were stored, for a row that was not claimed yet."""


class _Live(NamedTuple):
    stop: int
    attempts: int
    worker_id: UUID | None
    since: datetime
    rerun: bool

    @property
    def status(self) -> str:
        return PENDING if self.worker_id is None else PROCESSING


@dataclass(frozen=True, slots=True)
class LiveRows:
    """Rows of a job that are in flight or wait to be tried again, at one instant."""

    starts: list[int]
    ranges: list[_Live]

    @classmethod
    def of(cls, listed: Iterable[tuple[Any, ...]]) -> LiveRows:
        """Of (start, stop, attempts, worker, since, rerun), in any order."""
        found = [(start, _Live(*rest)) for start, *rest in listed]
        found.sort(key=lambda entry: entry[0])
        return cls([start for start, _ in found], [live for _, live in found])

    @property
    def reruns(self) -> int:
        """Rows at most that are live and have an outcome, too."""
        return sum(live.stop - start for start, live in zip(self.starts, self.ranges, strict=True) if live.rerun)

    def next_of(self, statuses: Collection[str], start: int, limit: int) -> list[int]:
        """The next rows that are live with one of some statuses."""
        found: list[int] = []
        for first, live in zip(self.starts, self.ranges, strict=True):
            if live.stop > start and live.status in statuses:
                found += range(max(first, start), min(live.stop, max(first, start) + limit))
            if len(found) >= limit:
                break
        return found[:limit]

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
    row = await fetch_one(connection, _SQL["read_columns"], {"batch": batch_id})
    return JobColumns(*row) if row else None


async def find_grid(connection: Connection, batch_id: UUID) -> Grid | None:
    """Find where a job's rows are; None while there are none."""
    row = await fetch_one(connection, _SQL["find_grid"], {"batch": batch_id})
    return Grid(*row) if row else None


async def list_live(connection: Connection, batch_id: UUID, start: int = 0, stop: int = _LAST) -> LiveRows:
    """List the rows of a job, of those from `start` up to `stop`, that are in flight or wait to be tried again."""
    where = {"batch": batch_id, "start": start, "stop": stop}
    listed = await (await connection.execute(_SQL["list_live"], where)).fetchall()
    return LiveRows.of((*span, *rest) for ordinals, *rest in listed for span in ranges_of(ordinals))


async def read_grid(
    connection: Connection,
    grid: Grid,
    live: LiveRows,
    ranges: Sequence[tuple[int, int]],
    max_bytes: int = PAGE_BYTES,
) -> list[GridRow]:
    """Read the first rows of some half-open ranges of ordinals: as many as the bound allows for inputs and for results,
    at least one."""
    rows, outcomes = await _read(connection, grid, ranges, max_bytes)
    return [_grid_row(row, outcome, live.at(row[0])) for row, outcome in zip(rows, outcomes, strict=True)]


class Stretch(NamedTuple):
    """Rows of a job that follow each other, column by column."""

    stop: int
    """Ordinal behind the last."""
    bodies: Sequence[bytes]
    results: Sequence[bytes | None]
    statuses: Sequence[str]
    attempts: Sequence[int]
    errors: Sequence[str | None]


_UNTOUCHED: Final = (None, 0, None, None)
"""The outcome of a row that has none, as a sheet shows it."""


async def read_stretch(connection: Connection, grid: Grid, live: LiveRows, start: int, limit: int) -> Stretch | None:
    """Read the next rows from an ordinal on, for a sheet: as `read_grid` does, and no more than a sheet shows of them.
    None if there are no more."""
    source = {"source_id": grid.source_id, "source_lane": grid.source_lane}
    where = {"start": start, "stop": start + limit, "bytes": PAGE_BYTES}
    cursor = await connection.execute(_SQL["read_sheet_rows"], {**source, **where}, binary=True)
    ((ordinals, bodies),) = await cursor.fetchall()
    if ordinals is None:
        return None
    where |= {"lane_id": grid.lane_id, "stop": ordinals[-1] + 1}
    cursor = await connection.execute(_SQL["read_sheet_outcomes"], where, binary=True)
    ((settled, *outcomes),) = await cursor.fetchall()
    if settled is None:
        settled, outcomes = [], [[], [], [], []]
    if sum(map(len, filter(None, outcomes[3]))) >= PAGE_BYTES:
        kept = bisect_right(ordinals, settled[-1])
        ordinals, bodies = ordinals[:kept], bodies[:kept]
    if len(settled) < len(ordinals):
        found = dict(zip(settled, zip(*outcomes, strict=True), strict=True))
        outcomes = list(zip(*(found.get(ordinal, _UNTOUCHED) for ordinal in ordinals), strict=True))
    states, counts, errors, results = outcomes
    attempts: Sequence[int] = counts
    statuses = [STATUS_OF.get(state, PENDING) for state in states]
    if live.ranges:
        lively = [live.at(ordinal) for ordinal in ordinals]
        statuses = [one.status if one else status for one, status in zip(lively, statuses, strict=True)]
        attempts = [one.attempts if one else count for one, count in zip(lively, attempts, strict=True)]
    return Stretch(ordinals[-1] + 1, bodies, results, statuses, attempts, errors)


async def _read(
    connection: Connection, grid: Grid, ranges: Sequence[tuple[int, int]], max_bytes: int
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Read the first rows of some ranges, and the outcome of each."""
    where = {"starts": Int4Array([start for start, _ in ranges]), "stops": Int4Array([stop for _, stop in ranges])}
    source = {"source_id": grid.source_id, "source_lane": grid.source_lane}
    bound = {**where, "bytes": max_bytes}
    rows = await (await connection.execute(_SQL["read_rows"], {**bound, **source}, binary=True)).fetchall()
    if not rows:
        return [], []
    known = {**bound, "lane_id": grid.lane_id, "end": rows[-1][0] + 1}
    settled = await (await connection.execute(_SQL["read_row_outcomes"], known, binary=True)).fetchall()
    if sum(len(row[5] or b"") for row in settled) >= max_bytes:
        rows = [row for row in rows if row[0] <= settled[-1][0]]
    outcomes = {row[0]: row for row in settled}
    untouched = (None, None, 0, None, None, None, grid.created_at)
    return rows, [outcomes.get(row[0], untouched) for row in rows]


async def find_ordinals(
    connection: Connection, grid: Grid, live: LiveRows, statuses: Collection[str], start: int, limit: int
) -> list[int]:
    """Find the next rows, from an ordinal on, that have one of some statuses."""
    found: set[int] = set()
    for state, status in STATUS_OF.items():
        if status in statuses:
            where = {"lane_id": grid.lane_id, "state": state, "start": start, "rows": limit + live.reruns}
            rows = await (await connection.execute(_SQL["list_ordinals_of_state"], where)).fetchall()
            # What is run again has an outcome still, and is not in its state.
            found.update(ordinal for (ordinal,) in rows if live.at(ordinal) is None)
    if PENDING in statuses or PROCESSING in statuses:
        found.update(live.next_of(statuses, start, limit))
    if PENDING in statuses:
        first = max(start, grid.next)
        found.update(range(first, min(first + limit, grid.total)))
    return sorted(found)[:limit]


def stretches(ordinals: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending ordinals as half-open ranges, as few as there can be."""
    found: list[tuple[int, int]] = []
    for ordinal in ordinals:
        if found and found[-1][1] == ordinal:
            found[-1] = found[-1][0], ordinal + 1
        else:
            found.append((ordinal, ordinal + 1))
    return found


def _grid_row(row: tuple[Any, ...], outcome: tuple[Any, ...], live: _Live | None) -> GridRow:
    ordinal, line, custom_id, body = row
    _, state, attempts, code, error, result, updated_at = outcome
    worker_id = None
    status = STATUS_OF.get(state, PENDING)
    if live is not None:
        # Claimed for the first time, to be tried again, or run again on purpose: then an old outcome is there too.
        attempts, worker_id, updated_at, status = live.attempts, live.worker_id, live.since, live.status
    return GridRow(ordinal, line, custom_id, body, status, attempts, code, error, result, worker_id, updated_at)
