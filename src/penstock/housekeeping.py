"""What one worker does for all of them, once a round: take back from the lost, end batches, fold counters."""

from __future__ import annotations

import logging
from collections.abc import Collection
from uuid import UUID

from penstock.claim import liveness
from penstock.config import Config
from penstock.db.pool import Pool, borrowed
from penstock.model import Lease
from penstock.work import batches

_log = logging.getLogger("penstock.housekeeping")

# Rounds of many workers fall anywhere within the same second: whoever comes a little early has the turn.
_EARLY = 0.75
# Finding what is stuck reads every lease, and takes its time anyway.
_STUCK_EVERY_S = 10.0
_BATCHES_AT_ONCE = 500


async def take_turn(database: Pool, round_s: float) -> bool:
    """Whether this worker keeps house in this round."""
    async with borrowed(database) as connection:
        return await batches.take_turn(connection, "round", round_s * _EARLY)


async def reclaim_lost(database: Pool, worker_id: UUID, config: Config, *, everywhere: bool = True) -> list[Lease]:
    """Take back what lost workers held; returns what is given up, leased to this worker to be failed.

    Who is gone from a machine is seen from there alone; who is silent, from `everywhere`.
    """
    async with borrowed(database) as connection:
        gone = await liveness.gone_from_here(connection)
        if not gone and not everywhere:
            return []
        stuck_s = config.dispatch.attempt_timeout_s + config.liveness.stuck_buffer_s
        every_s = min(_STUCK_EVERY_S, stuck_s / 4)
        look = everywhere and await batches.take_turn(connection, "stuck", every_s)
        lost = await liveness.reclaim(
            connection, worker_id, config.liveness, stuck_s=stuck_s, gone=gone, look_for_stuck=look
        )
    if lost.leases:
        _log.warning("took back %d items on %d leases of workers that are lost", lost.ordinals, lost.leases)
    return lost.given_up


async def end_batches(database: Pool) -> None:
    """End batches for which there is nothing left to do, whoever worked on them, and keep the others tidy."""
    async with borrowed(database) as connection:
        last: UUID | None = None
        while some := await batches.unfinished(connection, after=last, limit=_BATCHES_AT_ONCE):
            await batches.tidy(connection, *some)
            await batches.finish_all(connection, some)
            last = some[-1]


async def finish_touched(database: Pool, touched: Collection[UUID]) -> set[UUID]:
    """End those of some batches that are over; returns those that are not."""
    async with borrowed(database) as connection:
        await batches.finish_all(connection, touched)
        return await batches.still_unfinished(connection, touched)
