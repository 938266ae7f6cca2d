"""What any worker does for all of them, once a round: take back from the lost, end batches, fold counters."""

from __future__ import annotations

import logging
from uuid import UUID

from penstock.claim import liveness
from penstock.config import Config
from penstock.db.pool import Pool, borrowed
from penstock.model import Lease
from penstock.work import batches

_log = logging.getLogger("penstock.housekeeping")


async def reclaim_lost(database: Pool, worker_id: UUID, config: Config) -> list[Lease]:
    """Take back what lost workers held; returns what is given up, leased to this worker to be failed."""
    async with borrowed(database) as connection:
        gone = await liveness.gone_from_here(connection)
        stuck_s = config.dispatch.attempt_timeout_s + config.liveness.stuck_buffer_s
        lost = await liveness.reclaim(connection, worker_id, config.liveness, stuck_s=stuck_s, gone=gone)
    if lost.leases:
        _log.warning("took back %d items on %d leases of workers that are lost", lost.ordinals, lost.leases)
    return lost.given_up


async def end_batches(database: Pool, pool: str) -> None:
    """End the pool's batches for which there is nothing left to do, and keep the others tidy."""
    async with borrowed(database) as connection:
        for batch_id in await batches.unfinished(connection, pool):
            await batches.tidy(connection, batch_id)
            await batches.finish(connection, batch_id)
