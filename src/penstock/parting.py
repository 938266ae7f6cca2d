"""Batches that a worker has nothing more of: they may be over, and whoever waits for them need not wait for a round."""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

import psycopg

from penstock.db.pool import Pool, borrowed
from penstock.hand import Hand
from penstock.model import Lease
from penstock.settle.buffer import SettleBuffer
from penstock.work import batches

_log = logging.getLogger("penstock.worker")


class Parting:
    """Tries to end a batch once the last that this worker had of it is written. Whoever is last to write ends it; what
    is missed, because a process died or a statement failed, is found by the rounds of housekeeping."""

    def __init__(self, database: Pool, hand: Hand, buffer: SettleBuffer) -> None:
        self._database = database
        self._hand = hand
        self._buffer = buffer
        self._left: set[UUID] = set()
        """Nothing of them is in hand. Their results may not be written yet."""
        self._over: set[UUID] = set()
        self._some = asyncio.Event()

    def leave(self, lease: Lease) -> None:
        """Nothing of a lease is in hand any more."""
        if not lease.session and not self._hand.holds_batch(lease.batch_id):
            self._left.add(lease.batch_id)

    def written(self) -> None:
        """Results were written."""
        gone = {batch_id for batch_id in self._left if not self._hand.holds_batch(batch_id)}
        over = gone - self._buffer.batches if gone else gone
        self._left -= over
        if over:
            self._over |= over
            self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            self._some.clear()
            over, self._over = self._over, set()
            try:
                async with borrowed(self._database) as connection:
                    await batches.finish_all(connection, over)
            except psycopg.Error as error:
                _log.warning("batches could not be ended, they are tried again with the next round: %s", error)
