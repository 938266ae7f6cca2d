"""Maintenance that one worker does for all, once a round: reclaim from lost workers, finish batches, fold counters, sum
up samples."""

from __future__ import annotations

import logging
import math
from time import monotonic
from uuid import UUID
from weakref import WeakKeyDictionary

from penstock.batches.finish import finish_batches
from penstock.batches.samples import roll_up_samples
from penstock.batches.upkeep import (
    fold_progress,
    hold_strays,
    list_changed,
    list_closing,
    list_steered,
    list_unfinished,
    refresh_places,
)
from penstock.claim import liveness
from penstock.config import Config
from penstock.db.duties import take_turn
from penstock.db.pool import Connection, Pool, borrowed
from penstock.model import Lease
from penstock.observe import catalogue
from penstock.observe.logs import event

_log = logging.getLogger("penstock.maintenance")

# Finding stuck leases reads every lease, and a lease counts as stuck only after minutes.
_STUCK_EVERY_S = 10.0
_ROLL_UP_EVERY_S = 10.0
_BATCHES_AT_ONCE = 500
_WALK_AT_ONCE = 50
# A retry that misses a pause was being written during the pause: no statement takes longer than its time limit.
_STEERED_WITHIN_S = 120.0


# When the idle workers of this process last did a round, by database.
_rounds: WeakKeyDictionary[Pool, float] = WeakKeyDictionary()


def take_idle_round(database: Pool, every_s: float) -> bool:
    """Take this process's next idle round if the last was `every_s` ago; called while no worker has anything to do."""
    due = monotonic() - _rounds.get(database, -math.inf) >= every_s
    if due:
        _rounds[database] = monotonic()
    return due


async def take_round(database: Pool, round_s: float) -> bool:
    """Take this round's maintenance for this process; false if another process has it."""
    async with borrowed(database) as connection:
        return await take_turn(connection, "round", round_s)


async def reclaim_lost(database: Pool, worker_id: UUID, config: Config, *, everywhere: bool = True) -> list[Lease]:
    """Take back the leases of lost workers; returns those that are given up, leased to this worker to be failed.

    Exited processes are seen from their own machine alone; silent workers are looked for only with `everywhere`.
    """
    async with borrowed(database) as connection:
        gone = await liveness.list_exited_workers(connection)
        if not gone and not everywhere:
            return []
        stuck_s = config.dispatch.attempt_timeout_s + config.liveness.stuck_buffer_s
        every_s = min(_STUCK_EVERY_S, stuck_s / 4)
        look = everywhere and await take_turn(connection, "stuck", every_s)
        lost = await liveness.reclaim(
            connection, worker_id, config.liveness, stuck_s=stuck_s, gone=gone, look_for_stuck=look
        )
    if lost.leases:
        catalogue.RECLAIMED_LEASES.add((), lost.leases)
        catalogue.RECLAIMED_ITEMS.add((), lost.ordinals)
        fields = event(
            "leases_reclaimed", items=lost.ordinals, leases=lost.leases, given_up=len(lost.given_up), worker=worker_id
        )
        _log.warning("took back %d items on %d leases of lost workers", lost.ordinals, lost.leases, extra=fields)
    return lost.given_up


class BatchMaintenance:
    """Finishes batches for which there is nothing left to do, and folds the counters of the others.

    A round looks at batches that have changed since the last. A mark of change can be missed (a process may be killed
    between noting it and acting on it), so a round also walks through all unfinished batches, a few at a time.
    """

    def __init__(self, database: Pool) -> None:
        self._database = database
        self._walked_to: UUID | None = None
        self._rolled_up_at = monotonic()
        self._samples_left = False

    async def round(self) -> None:
        async with borrowed(self._database) as connection:
            changed = await list_changed(connection, limit=_BATCHES_AT_ONCE)
            await fold_progress(connection, changed)
            steered = await list_steered(connection, _STEERED_WITHIN_S, limit=_BATCHES_AT_ONCE)
            if steered:
                await hold_strays(connection, steered)
            await refresh_places(connection, limit=_BATCHES_AT_ONCE)
            closing = await list_closing(connection, limit=_BATCHES_AT_ONCE)
            walked = await list_unfinished(connection, after=self._walked_to, limit=_WALK_AT_ONCE)
            self._walked_to = walked[-1] if len(walked) == _WALK_AT_ONCE else None
            if some := {*changed, *closing, *walked}:
                await finish_batches(connection, some)
            await self._roll_up(connection)

    async def _roll_up(self, connection: Connection) -> None:
        """Sum up samples, some at a time: with more to do, again in the next round."""
        if not self._samples_left:
            if monotonic() < self._rolled_up_at + _ROLL_UP_EVERY_S:
                return
            self._rolled_up_at = monotonic()
            if not await take_turn(connection, "samples", _ROLL_UP_EVERY_S):
                return
        self._samples_left = await roll_up_samples(connection)
