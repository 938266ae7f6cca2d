"""Batches read at one instant: one of them, or a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.errors import PenstockError
from penstock.model import BatchState, Counts, Usage

_SQL = sql.load("penstock.batches", "read.sql")

_FIRST, _LAST = UUID(int=0), UUID(int=2**128 - 1)
_EVER, _NEVER = datetime(1, 1, 2, tzinfo=UTC), datetime(9999, 12, 30, tzinfo=UTC)
# Ids carry the time of the process that made them, which need not be the database's.
_CLOCKS_DIFFER = timedelta(minutes=10)

Which = Literal["output", "errors"]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch at one instant."""

    id: UUID
    owner: str
    dialect: str
    state: BatchState
    pool: str
    target: str | None
    file_id: UUID | None
    """None once the file is deleted."""
    endpoint: str | None
    model: str | None
    """Set if all requests have the same."""
    completion_window: str | None
    window_s: float | None
    metadata: dict[str, str]
    priority: int
    deadline: datetime | None
    created_at: datetime
    validated_at: datetime | None
    paused_at: datetime | None
    cancelling_at: datetime | None
    completed_at: datetime | None
    cancelled_at: datetime | None
    expired_at: datetime | None
    failed_at: datetime | None
    problems: list[dict[str, Any]] | None
    fingerprint: bytes | None
    reruns: int
    output_file_id: UUID | None
    """Reserved from the beginning; None once the output is deleted. The same goes for the errors."""
    error_file_id: UUID | None
    counts: Counts
    usage: Usage
    output_bytes: int
    error_bytes: int
    eta_s: float | None
    """Seconds left at the pace of the last minute; None if there is no pace."""

    @property
    def ended_at(self) -> datetime | None:
        return self.completed_at or self.cancelled_at or self.expired_at or self.failed_at


async def get_batch(connection: Connection, batch_id: UUID, owner: str | None, *, now: Now = None) -> Batch | None:
    """Read a batch of this owner; of any owner if none is named."""
    batch = await _read(connection, batch_id, owner)
    return await _with_pace(connection, batch, now) if batch else None


async def read_status(connection: Connection, batch_id: UUID) -> Batch:
    """Read the batch of any owner, without the time that is left. Raises if there is none."""
    batch = await _read(connection, batch_id, None)
    if batch is None:
        raise PenstockError(f"no batch {batch_id}", hint="It may have been deleted, or belong to another database.")
    return batch


async def list_batches(
    connection: Connection,
    *,
    owner: str,
    dialect: str | Sequence[str],
    after: UUID | None = None,
    before: UUID | None = None,
    limit: int,
    states: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    now: Now = None,
) -> list[Batch]:
    """Read a page of batches, newest first: those older than `after`, or the nearest that are newer than `before`.

    Neither need exist any more. `created_after` is part of the time asked for, `created_before` is not.
    """
    since, until = created_after or _EVER, created_before or _NEVER
    below = min(after or _LAST, _id_at(until, _CLOCKS_DIFFER) if created_before else _LAST)
    above = max(before or _FIRST, _id_at(since, -_CLOCKS_DIFFER) if created_after else _FIRST)
    parameters = {
        "owner": owner,
        "dialects": [dialect] if isinstance(dialect, str) else list(dialect),
        "states": [state.value for state in BatchState] if states is None else list(states),
        "below": below,
        "above": above,
        "backwards": before is not None,
        "metadata": json.dumps(dict(metadata)) if metadata else None,
        "created_after": since,
        "created_before": until,
        "limit": limit,
    }
    cursor = await connection.execute(_SQL["list_batches"], parameters)
    return [await _with_pace(connection, _batch(row), now) for row in await cursor.fetchall()]


async def find_batch_of_result(
    connection: Connection, file_id: UUID, owner: str | None, *, now: Now = None
) -> tuple[Batch, Which] | None:
    """Find the batch whose output or error file has this id, while it is running or as long as that file is there."""
    parameters = {"file_id": file_id, "owner": owner, "now": now}
    row = await (await connection.execute(_SQL["find_batch_of_result"], parameters)).fetchone()
    batch = await get_batch(connection, row[0], owner, now=now) if row else None
    return (batch, row[1]) if row and batch else None


async def _read(connection: Connection, batch_id: UUID, owner: str | None) -> Batch | None:
    row = await (await connection.execute(_SQL["read_batch"], {"id": batch_id, "owner": owner})).fetchone()
    return _batch(row) if row else None


async def _with_pace(connection: Connection, batch: Batch, now: Now) -> Batch:
    """Add the estimated time that is left, if the batch is running."""
    if batch.state is not BatchState.IN_PROGRESS:
        return batch
    parameters = {"id": batch.id, "validated_at": batch.validated_at, "now": now}
    row = await (await connection.execute(_SQL["read_pace"], parameters)).fetchone()
    if row is None or not row[0]:
        return batch
    return replace(batch, eta_s=float((batch.counts.pending + batch.counts.in_flight) / row[0]))


def _id_at(moment: datetime, margin: timedelta) -> UUID:
    """First id of a moment: ids begin with the milliseconds since 1970."""
    # As numbers: a moment at either end of the calendar has no other beyond it.
    milliseconds = int((moment.timestamp() + margin.total_seconds()) * 1000)
    return UUID(int=min(max(milliseconds, 0), 2**48 - 1) << 80)


def _batch(row: Sequence[Any]) -> Batch:
    head = list(row[:27])
    total, in_flight, completed, failed, not_found, skipped, retried = row[27:34]
    output_bytes, error_bytes, *tokens = row[34:]
    head[3] = state = BatchState(head[3])
    counts = Counts(total, 0, in_flight, completed, failed, not_found, skipped, retried=retried)
    rest = total - counts.settled - in_flight
    match state:
        case BatchState.CANCELLED | BatchState.CANCELLING:
            counts.cancelled = rest
        case BatchState.EXPIRED:
            counts.expired = rest
        case _:
            counts.pending = rest
    figures: list[Any] = [counts, Usage(*tokens), output_bytes, error_bytes, None]
    return Batch(*head, *figures)
