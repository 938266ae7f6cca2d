"""Claims of one job's rows alone, and what there is to do for it."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from penstock.claim.claim import as_lease
from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.model import Lease

_SQL = sql.load("penstock.claim", "claim_job.sql")


async def claim_job(
    connection: Connection,
    batch_id: UUID,
    *,
    pool: str,
    want: int,
    worker_id: UUID,
    suspect_ok: bool = True,
    now: Now = None,
) -> list[Lease]:
    """Lease up to `want` rows of a job, if it is in this pool."""
    parameters = {
        "batch_id": batch_id,
        "pool": pool,
        "want": want,
        "worker": worker_id,
        "suspect_ok": suspect_ok,
        "now": now,
    }
    cursor = await connection.execute(_SQL["claim_job"], parameters)
    return [as_lease(row) for row in await cursor.fetchall()]


class JobWork(NamedTuple):
    """What there is to do for a job at one moment."""

    pool: str
    route: str
    open: bool
    """It is neither paused nor being cancelled."""
    runnable: bool
    """Rows can be claimed that were never claimed."""
    in_flight: bool
    due_in_s: float | None
    """Until the next row is to be tried again; not above 0 if one is to be now. None if none waits."""
    closed_for_s: float | None
    """For as long its route must wait; infinite until a person acts. None if it need not."""
    operating: bool
    """An operation is to put rows back, also into a job that has ended."""

    @property
    def has_rows(self) -> bool:
        """Whether rows are to be claimed, now or later, or are in flight."""
        return self.open and (self.runnable or self.in_flight or self.due_in_s is not None)

    @property
    def over(self) -> bool:
        """Whether there is nothing to do, in flight or later."""
        return not (self.has_rows or self.operating)

    @property
    def wait_s(self) -> float | None:
        """Seconds until something can be claimed; None if that is not known."""
        if self.closed_for_s is not None:
            return self.closed_for_s
        if self.runnable:
            return 0.0
        return None if self.due_in_s is None else max(0.0, self.due_in_s)


async def read_work(connection: Connection, batch_id: UUID, *, now: Now = None) -> JobWork | None:
    """Read what there is to do for a job; None while it has no rows."""
    row = await fetch_one(connection, _SQL["read_work"], {"batch_id": batch_id, "now": now})
    return JobWork(*row) if row else None
