"""Claims of a worker that works for one job alone: what `Turns` is for all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from penstock.claim.claim_job import claim_job, read_work
from penstock.db.pool import Connection
from penstock.model import Lease


class JobTurns:
    """Claims the rows of one job, outside of all turns."""

    nothing_due = False
    """It polls often, for as short as it works."""

    def __init__(self, pool: str, batch_id: UUID) -> None:
        self._pool = pool
        self._batch_id = batch_id
        self.news = False
        self.due_in_s: float | None = None
        """Seconds until the next row is to be tried again, as of the last claim."""

    def note_news(self) -> None:
        """New work of others is none of its own."""

    async def routes(self, connection: Connection) -> list[str]:
        """The job's route, while it has rows to claim now or later."""
        work = await read_work(connection, self._batch_id)
        if work is None or work.pool != self._pool or not work.open:
            return []
        self.due_in_s = work.due_in_s
        return [work.route]

    async def claim(
        self,
        connection: Connection,
        wants: Mapping[str, int],
        *,
        worker_id: UUID,
        suspect_ok: bool,
        **_: Any,
    ) -> list[Lease]:
        """Lease rows of the job, as many as are wanted of its route."""
        want = max(wants.values())
        return await claim_job(
            connection, self._batch_id, pool=self._pool, want=want, worker_id=worker_id, suspect_ok=suspect_ok
        )
