"""Batches of which a worker holds nothing any more: finished at once if they are over, before the next maintenance."""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

import psycopg

from penstock.batches.finish import finish_batches
from penstock.db.pool import Pool, borrowed
from penstock.model import Lease
from penstock.settle.buffer import SettleBuffer
from penstock.worker.inventory import Inventory

_log = logging.getLogger("penstock.worker")


class FinishedBatches:
    """Tries to finish a batch once this worker's last result of it is written. The worker that writes last succeeds; a
    batch that is missed, because a process died or a statement failed, is found by the maintenance round."""

    def __init__(self, database: Pool, inventory: Inventory, buffer: SettleBuffer) -> None:
        self._database = database
        self._inventory = inventory
        self._buffer = buffer
        self._left: set[UUID] = set()
        """Batches of which no lease is held here. Their results may not be written yet."""
        self._over: set[UUID] = set()
        """Batches whose results are all written."""
        self._any_over = asyncio.Event()

    def note_released(self, lease: Lease) -> None:
        """Note that no item of the lease is held any more."""
        if not lease.session and not self._inventory.holds_batch(lease.batch_id):
            self._left.add(lease.batch_id)

    def note_written(self) -> None:
        """Note that results were written."""
        gone = {batch_id for batch_id in self._left if not self._inventory.holds_batch(batch_id)}
        over = gone - self._buffer.batches if gone else gone
        self._left -= over
        if over:
            self._over |= over
            self._any_over.set()

    async def run(self) -> None:
        while True:
            await self._any_over.wait()
            self._any_over.clear()
            over, self._over = self._over, set()
            try:
                async with borrowed(self._database) as connection:
                    await finish_batches(connection, over)
            except psycopg.Error as error:
                _log.warning("batches could not be finished, the next maintenance round tries again: %s", error)
