"""Jobs of the rows that a worker holds: what is asked for each row, read once per job."""

from __future__ import annotations

from collections import OrderedDict
from uuid import UUID

from penstock.batches.jobs import Job, read_jobs
from penstock.db.pool import Connection
from penstock.dispatch.rows.definition import parse_stored_definition
from penstock.model import RowJob

_REMEMBERED_JOBS = 1_000


class RowJobs:
    """Jobs by their batch. A job's spec never changes, so what was read once is kept."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[UUID, RowJob | None] = OrderedDict()

    async def find(self, connection: Connection, batch_id: UUID) -> RowJob | None:
        """Find a batch's job; None for a batch that is none."""
        if batch_id not in self._jobs:
            job = (await read_jobs(connection, [batch_id])).get(batch_id)
            self._jobs[batch_id] = None if job is None else _row_job(job)
            if len(self._jobs) > _REMEMBERED_JOBS:
                self._jobs.popitem(last=False)
        self._jobs.move_to_end(batch_id)
        return self._jobs[batch_id]


def _row_job(job: Job) -> RowJob:
    processor, most = job.spec["processor"], job.spec.get("maxAttempts")
    definition = None if isinstance(processor, str) else parse_stored_definition(processor)
    return RowJob(definition, most if isinstance(most, int) else None, job.images)
