"""Pending rows of jobs, a page at a time, by the time of their last change: those that wait, and those in flight.

Pending rows are not stored as such. They are what is left of lanes, what deferrals hold and what leases hold: spans,
each of which is one row of a table however many rows of a job it stands for. A page merges the three by time, kind and
id, and takes ordinals out of each span in turn, so that it costs its size.

A row that stays where it is has one place in this order, and a walk shows it exactly once. A row that is claimed, put
off or given back meanwhile moves to a later place, and is shown there, too. The time of a row that was never claimed is
that at which its job's first rows were stored.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from time import perf_counter
from typing import Any, Literal, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection
from penstock.export.grid import PAGE_BYTES, PENDING, PROCESSING, Grid, GridRow, LiveRows, read_grid, stretches
from penstock.export.order import ranges_of

_log = logging.getLogger("penstock.pending")
_SQL = sql.load("penstock.export", "pending.sql")

PENDING_STATUSES = (PENDING, PROCESSING)

_KINDS = ("lanes", "deferrals", "leases")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EVER, _NEVER = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
_FIRST_ID, _LAST_ID = -(2**63), 2**63 - 1
_LAST_ORDINAL = 2**31 - 2
_ANY_BYTES = 2**62
# Spans to look at, first few: a large lane fills a page by itself. Then as many as rows are missing, each has one at
# least. A page that has looked so often among rows of others ends early, and says where the next one begins.
_LEAST_LOOK, _MOST_LOOK = 16, 256
_LOOKS = 5


class Position(NamedTuple):
    """Place of a row in the order of a walk."""

    at_us: int
    """Microseconds since 1970."""
    kind: int
    id: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class PendingQuery:
    """Which pending rows are asked for: of one job, of an owner's jobs, or of all."""

    statuses: Collection[str] = PENDING_STATUSES
    batch_id: UUID | None = None
    owner: str | None = None
    job_type: str | None = None
    since: datetime | None = None
    """Rows that have not changed since before this time are left out."""
    until: datetime | None = None
    """Rows that changed at this time or later are left out."""

    @property
    def scope(self) -> Literal["batch", "owner", "all"]:
        if self.batch_id is not None:
            return "batch"
        return "all" if self.owner is None else "owner"


class _Span(NamedTuple):
    at: datetime
    kind: int
    id: int
    batch_id: UUID
    owner: str
    job_type: str
    source_id: int
    source_lane: int
    worker_id: UUID | None
    attempts: int
    rerun: bool
    ordinals: str | None

    def rows(self) -> Iterator[PendingRow]:
        for start, stop in ranges_of(self.ordinals or ""):
            for ordinal in range(start, stop):
                yield PendingRow(self, ordinal)

    def position(self, ordinal: int) -> Position:
        return Position((self.at - _EPOCH) // timedelta(microseconds=1), self.kind, self.id, ordinal)


class PendingRow(NamedTuple):
    """A pending row, as far as it is known without its input."""

    span: _Span
    ordinal: int

    @property
    def status(self) -> str:
        return PENDING if self.span.worker_id is None else PROCESSING

    @property
    def position(self) -> Position:
        return self.span.position(self.ordinal)


class PendingPage(NamedTuple):
    rows: list[PendingRow]
    next: Position | None
    """Where the next page goes on; None at the end. A page may be short, or empty, and not be the last."""


async def list_pending(connection: Connection, query: PendingQuery, after: Position | None, limit: int) -> PendingPage:
    """List the next pending rows after a position."""
    started, looked = perf_counter(), 0
    rows: list[PendingRow] = []
    last = after
    look = _LEAST_LOOK
    for _ in range(_LOOKS):
        # One more than the page holds, to know whether another follows.
        want = limit + 1 - len(rows)
        spans = await _list_spans(connection, query, last, look, want)
        looked += len(spans)
        rows += islice((row for span in spans for row in span.rows()), want)
        if len(rows) > limit:
            rows.pop()
            last = rows[-1].position
            break
        if len(spans) < look:
            last = None
            break
        last = spans[-1].position(_LAST_ORDINAL)
        look = min(max(limit + 1 - len(rows), _LEAST_LOOK), _MOST_LOOK)
    spent_ms = (perf_counter() - started) * 1000
    _log.debug("pending: %d rows of %d spans in %.1f ms, after %s to %s", len(rows), looked, spent_ms, after, last)
    return PendingPage(rows, last)


async def _list_spans(
    connection: Connection, query: PendingQuery, after: Position | None, look: int, want: int
) -> list[_Span]:
    parameters: dict[str, Any] = {
        "scope": query.scope,
        "batch": query.batch_id,
        "owner": query.owner,
        "job_type": query.job_type,
        "waiting": PENDING in query.statuses,
        "in_flight": PROCESSING in query.statuses,
        "until": query.until or _NEVER,
        "kind": None if after is None else after.kind,
        "id": None if after is None else after.id,
        "ordinal": 0 if after is None else after.ordinal,
        "look": look,
        "want": want,
    }
    since = query.since or _EVER
    for kind, name in enumerate(_KINDS):
        start = (since, _FIRST_ID)
        if after is not None:
            at = _EPOCH + timedelta(microseconds=after.at_us)
            # At the same time, kinds come one after the other.
            start = max(start, (at, after.id if kind == after.kind else _LAST_ID if kind < after.kind else _FIRST_ID))
        parameters[f"{name}_at"], parameters[f"{name}_id"] = start
    cursor = await connection.execute(_SQL["list_spans"], parameters)
    return [_Span(*row) for row in await cursor.fetchall()]


async def read_pending(
    connection: Connection, grid: Grid, page: PendingPage, max_bytes: int = PAGE_BYTES
) -> tuple[list[GridRow], Position | None]:
    """Read pending rows of one job with their input and their last result, in the same order: as many as the bound
    allows, at least one. Returns also where the next page goes on."""
    rows = await _cut(connection, grid, page.rows, max_bytes)
    live = LiveRows.of(
        (row.ordinal, row.ordinal + 1, span.attempts, span.worker_id, span.at, span.rerun)
        for row in rows
        for span in [row.span]
    )
    # Measured a moment ago: what is settled in between comes on top.
    found = await read_grid(connection, grid, live, _stretches_of(rows), _ANY_BYTES)
    by_ordinal = {row.ordinal: row for row in found}
    shown = [by_ordinal[row.ordinal] for row in rows if row.ordinal in by_ordinal]
    return shown, rows[-1].position if len(rows) < len(page.rows) else page.next


async def _cut(connection: Connection, grid: Grid, rows: Sequence[PendingRow], max_bytes: int) -> Sequence[PendingRow]:
    """Cut rows off that do not fit, in the order of the page; the first one stays."""
    ranges = _stretches_of(rows)
    where = {"starts": Int4Array([start for start, _ in ranges]), "stops": Int4Array([stop for _, stop in ranges])}
    source = {"source_id": grid.source_id, "source_lane": grid.source_lane}
    sizes: Counter[int] = Counter()
    for name, place in (("measure_inputs", source), ("measure_results", {"lane_id": grid.lane_id})):
        measured = await (await connection.execute(_SQL[name], {**where, **place})).fetchall()
        sizes.update(dict(measured))
    total = 0
    for number, row in enumerate(rows):
        total += sizes[row.ordinal]
        if total > max_bytes and number:
            return rows[:number]
    return rows


def _stretches_of(rows: Sequence[PendingRow]) -> list[tuple[int, int]]:
    return stretches(sorted({row.ordinal for row in rows}))


class Summary(NamedTuple):
    line: int
    text: str | None


async def read_summaries(connection: Connection, rows: Sequence[PendingRow]) -> list[Summary | None]:
    """Read the number and the summary of each row; None where the input was deleted."""
    by_source: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        by_source.setdefault((row.span.source_id, row.span.source_lane), []).append(row.ordinal)
    places = [
        (*source, start, stop)
        for source, ordinals in by_source.items()
        for start, stop in stretches(sorted(set(ordinals)))
    ]
    parameters = {
        "sources": Int8Array([place[0] for place in places]),
        "lanes": Int4Array([place[1] for place in places]),
        "starts": Int4Array([place[2] for place in places]),
        "stops": Int4Array([place[3] for place in places]),
    }
    cursor = await connection.execute(_SQL["read_summaries"], parameters)
    found = {tuple(row[:3]): Summary(*row[3:]) for row in await cursor.fetchall()}
    return [found.get((row.span.source_id, row.span.source_lane, row.ordinal)) for row in rows]
