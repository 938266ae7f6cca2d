"""What one worker does for all of them, once a round: take back from the lost, end batches, fold counters."""

from __future__ import annotations

import logging
import math
from time import monotonic
from uuid import UUID
from weakref import WeakKeyDictionary

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
_WALK_AT_ONCE = 50
# A retry that misses a pause was being written when it was made: no statement takes longer than its time limit.
_STEERED_WITHIN_S = 120.0


# When the idle workers of this process have last made a round.
_rounds: WeakKeyDictionary[Pool, float] = WeakKeyDictionary()


def take_idle_round(database: Pool, every_s: float) -> bool:
    """Take the next round of this process, in which no worker has anything to do, if the last is so long ago."""
    due = monotonic() - _rounds.get(database, -math.inf) >= every_s
    if due:
        _rounds[database] = monotonic()
    return due


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


class BatchKeeper:
    """Ends batches for which there is nothing left to do, whichever workers they had, and keeps the others tidy.

    A round looks at batches that have changed since the last. As no such mark is beyond doubt (a process may be killed
    between taking note and acting on it), it also walks through all that are open, a few at a time.
    """

    def __init__(self, database: Pool) -> None:
        self._database = database
        self._walked_to: UUID | None = None

    async def round(self) -> None:
        async with borrowed(self._database) as connection:
            changed = await batches.changed(connection, limit=_BATCHES_AT_ONCE)
            await batches.fold(connection, changed)
            steered = await batches.steered(connection, _STEERED_WITHIN_S, limit=_BATCHES_AT_ONCE)
            if steered:
                await batches.hold_strays(connection, steered)
            await batches.keep_line(connection, limit=_BATCHES_AT_ONCE)
            closing = await batches.closing(connection, limit=_BATCHES_AT_ONCE)
            walked = await batches.unfinished(connection, after=self._walked_to, limit=_WALK_AT_ONCE)
            self._walked_to = walked[-1] if len(walked) == _WALK_AT_ONCE else None
            if some := {*changed, *closing, *walked}:
                await batches.finish_all(connection, some)
