"""Work: batches and jobs in one list, as the console shows them, with their pace and the time that is left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple
from uuid import UUID

from penstock.batches.runs import is_run_pool
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.latency import latency_percentile_ms
from penstock.model import BatchState
from penstock.pools import provider_in

_SQL = sql.load("penstock.batches", "work.sql")

DIALECTS: Final = ("openai", "anthropic", "job", "run")

# Of a batch with more, the number of rows that wait for another try is a lower bound.
_MOST_DEFERRALS: Final = 5_000

# A rate is told once the work has gone on for some seconds and some rows, or for long.
_FIRST_S: Final = 5.0
_FIRST_ROWS: Final = 50
_LONG_S: Final = 30.0
# Workers write the samples of a second when it is over.
_LATE_S: Final = 1.0
# The pace of the last minute is taken to hold within this share.
_PACE_SPREAD: Final = 0.15


@dataclass(frozen=True, slots=True)
class Work:
    """A batch or a job at one instant."""

    id: UUID
    owner: str
    dialect: str
    batch_state: str
    pool: str
    given_name: str | None
    map_name: str | None
    """Of the rows of `penstock.map`."""
    created_at: datetime
    ended_at: datetime | None
    total: int
    in_flight: int
    completed: int
    failed: int
    not_found: int
    skipped: int
    retrying: int
    """Rows that wait for another try; with very many of them, at least."""
    input_tokens: int
    output_tokens: int
    retried: int
    reruns: int
    job_type: str | None
    """None if it is no job."""
    ingested_at: datetime | None
    rows: int | None
    """Rows of a job that are stored."""
    problem: str | None
    """Why a job's rows could not be read to their end."""
    filename: str | None
    route: str | None
    """Its model or processor, if it has one only."""

    @property
    def is_job(self) -> bool:
        return self.job_type is not None

    @property
    def settled(self) -> int:
        return self.completed + self.failed + self.not_found + self.skipped

    @property
    def left(self) -> int:
        """Rows without an outcome that are not in flight."""
        return max(0, self.total - self.settled - self.in_flight)

    @property
    def state(self) -> str:
        """State as the console tells it, in the words of jobs."""
        if self.problem is not None:
            return "FAILED"
        match BatchState(self.batch_state):
            case BatchState.COMPLETED:
                return "DONE"
            case BatchState.IN_PROGRESS if self.is_job and self.ingested_at is None:
                return "INGESTING"
            case BatchState.IN_PROGRESS:
                return "RUNNING" if self.settled or self.in_flight or self.retried else "QUEUED"
            case other:
                return other.value.upper()


class Pace(NamedTuple):
    """How fast work goes on."""

    per_s: float | None
    eta_s: float | None
    """Seconds left; None if there is no telling yet, or nothing goes on."""
    eta_range_s: tuple[float, float] | None


NO_PACE: Final = Pace(None, None, None)


def states_behind(states: Collection[str]) -> list[str]:
    """States of batches among which those of these states of work are found. A job whose input cannot be read was
    cancelled for it."""
    behind = {
        "INGESTING": ("in_progress",),
        "QUEUED": ("in_progress",),
        "RUNNING": ("in_progress",),
        "DONE": ("completed",),
        "FAILED": ("failed", "cancelled", "cancelling"),
    }
    return sorted({found for state in states for found in behind.get(state, (state.lower(),))})


STATES: Final = (
    *("VALIDATING", "INGESTING", "QUEUED", "RUNNING", "PAUSED", "CANCELLING"),
    *("DONE", "FAILED", "CANCELLED", "EXPIRED"),
)


async def find_work(
    connection: Connection,
    *,
    owner: str | None,
    dialects: Sequence[str],
    states: Sequence[str],
    below: UUID,
    look: int,
    text: str | None = None,
) -> list[tuple[UUID, bool]]:
    """Find the next batches and jobs, newest first, of an owner or of all: `look` of them at most, and whether each has
    the text in its name, type or id."""
    parameters = {
        "owner": owner,
        "dialects": list(dialects),
        "states": list(states),
        "below": below,
        "look": look,
        "text": text,
    }
    return [(row[0], row[1]) for row in await (await connection.execute(_SQL["find_work"], parameters)).fetchall()]


async def read_work(connection: Connection, ids: Sequence[UUID], owner: str | None) -> list[Work]:
    """Read some batches and jobs, newest first: those of this owner, or of all."""
    parameters = {"ids": list(ids), "owner": owner, "deferrals": _MOST_DEFERRALS}
    return [Work(*row) for row in await (await connection.execute(_SQL["read_work"], parameters)).fetchall()]


async def read_paces(connection: Connection, work: Sequence[Work], *, now: Now = None) -> dict[UUID, Pace]:
    """Read how fast work goes on; of what does not run, there is no pace."""
    running = {one.id: one for one in work if one.batch_state == BatchState.IN_PROGRESS}
    if not running:
        return {}
    cursor = await connection.execute(_SQL["read_rates"], {"ids": list(running), "now": now})
    return {row[0]: pace(running[row[0]], row[1], row[2]) for row in await cursor.fetchall()}


def pace(work: Work, decided: int, seconds: float) -> Pace:
    """Pace of work of which so many rows were decided in the last seconds, at most a minute.

    The time left has a range: the pace is taken to hold about, and rows that wait for another try may each take as long
    as a new one, at the end.
    """
    seconds = max(_LATE_S, seconds - _LATE_S)
    if not decided or seconds < _FIRST_S or (decided < _FIRST_ROWS and seconds < _LONG_S):
        return NO_PACE
    per_s = decided / seconds
    eta_s = (work.left + work.in_flight) / per_s
    longest_s = eta_s * (1 + _PACE_SPREAD) + work.retrying / per_s
    return Pace(round(per_s, 3), round(eta_s, 1), (round(eta_s * (1 - _PACE_SPREAD), 1), round(longest_s, 1)))


async def read_latency(connection: Connection, batch_id: UUID) -> tuple[float | None, ...]:
    """Read how long the calls of the last minute took: the median, and what 95 and 99 of 100 stay below, in
    milliseconds."""
    row = await fetch_one(connection, _SQL["read_latency"], {"id": batch_id})
    calls = row[0] if row else []
    return tuple(latency_percentile_ms(calls, share) for share in (0.5, 0.95, 0.99))


class LimitNow(NamedTuple):
    """How much of a model is called, and why."""

    calls: float | None
    """Calls at a time; None if nothing limits them yet."""
    floor: float | None
    ceiling: float | None
    per_s: float | None
    reason: str | None
    moved_at: datetime | None
    waits_until: datetime | None
    halted_at: datetime | None
    code: str | None
    message: str | None
    """Why the model is not called at the moment."""


async def read_limit(connection: Connection, work: Work, *, now: Now = None) -> LimitNow | None:
    """Read the limit of the model that work is for; None if it has several, or none that is known."""
    if work.route is None:
        return None
    parameters = {"provider": provider_in(work.pool), "route": work.route, "pool": work.pool, "now": now}
    row = await fetch_one(connection, _SQL["read_limit"], parameters)
    return LimitNow(*row) if row and any(value is not None for value in row) else None


async def explain_idle(connection: Connection, work: Work, grace_s: float, *, now: Now = None) -> str | None:
    """Say who goes on with a run that nothing works off now; None if its workers are alive, or it is for servers."""
    if not is_run_pool(work.pool):
        return None
    parameters = {"pool": work.pool, "grace_s": grace_s, "now": now}
    if await fetch_one(connection, _SQL["is_any_worker_alive"], parameters) == (True,):
        return None
    program = None if work.map_name is None else f"program with `penstock.map(name={work.map_name!r})`"
    return f"Nothing works it off now: the {program or '`penstock run` command'} that began it goes on with it."
