"""Bodies of leased items, and images of rows: read page by page, as fast as the dispatcher takes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from uuid import UUID

from penstock.blobs.blobs import Place, read_images
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db.pool import Connection, Pool, borrowed
from penstock.dispatch.dispatcher import Dispatcher
from penstock.model import ROWS, Item, Lease, Outcome, OutcomeState
from penstock.settle.buffer import SettleBuffer
from penstock.worker.inventory import Inventory
from penstock.worker.row_jobs import RowJobs

_log = logging.getLogger("penstock.worker")

READ_ROWS = 500

CANCELLED = Outcome(OutcomeState.SKIPPED, error_code="cancelled", error_message="It was cancelled before it was sent.")


class BodyLoader:
    """Reads the bodies of one worker's leases and offers the items to its dispatcher."""

    def __init__(self, database: Pool, inventory: Inventory, dispatcher: Dispatcher, buffer: SettleBuffer) -> None:
        self._database = database
        self._inventory = inventory
        self._dispatcher = dispatcher
        self._buffer = buffer
        self._jobs = RowJobs()

    async def load_batch(self, lease: Lease) -> None:
        """Read the bodies of a batch's lease, a page at a time, as fast as the dispatcher takes them."""
        while ranges := self._inventory.unread(lease):
            await self._inventory.wait_for_bytes()
            async with borrowed(self._database) as connection:
                items = await claims.read_bodies(
                    connection, lease, ranges, max_rows=READ_ROWS, max_bytes=self._inventory.free_bytes
                )
                if lease.endpoint == ROWS:
                    job = await self._jobs.find(connection, lease.batch_id)
                    for item in items:
                        item.job = job
                    if job is not None and job.images:
                        items = await self._load_images(connection, lease, items)
            if not self._inventory.unread(lease):
                # The lease's route was halted or held during the read: everything unread was given back.
                return
            if not items:
                # The lane was closed since the claim: the unread ordinals are given back.
                self._buffer.give_back(lease, self._inventory.drop(lease))
                return
            self._inventory.read(lease, items)
            # Reclaimed items go first: they have waited already.
            self._dispatcher.offer(items, first=lease.reclaims > 0)

    async def _load_images(self, connection: Connection, lease: Lease, items: list[Item]) -> list[Item]:
        """Read the images of the first of these items, as many as there is room for; returns those items. Empty if the
        lease was lost meanwhile: then images may be gone."""
        place, ordinals = Place(lease.source_id, lease.source_lane), [item.ordinal for item in items]
        images = await read_images(connection, place, ordinals, self._inventory.free_bytes)
        if not await claims.is_leased(connection, lease):
            return []
        items = [item for item in items if images.stop is None or item.ordinal < images.stop]
        for item in items:
            item.image = images.by_ordinal.get(item.ordinal)
        return items

    async def load_sessions(self, leases: list[Lease]) -> None:
        """Read the bodies of sessions' leases: one each, many in one statement."""
        while leases:
            page = leases[:READ_ROWS]
            await self._inventory.wait_for_bytes()
            async with borrowed(self._database) as connection:
                items = await claims.read_heads(connection, page, max_bytes=self._inventory.free_bytes)
            reached = 1 + page.index(items[-1].lease) if items else len(page)
            self._offer_heads(page[:reached], {item.lease.nonce: item for item in items})
            leases = leases[reached:]

    def _offer_heads(self, leases: list[Lease], items: dict[int, Item]) -> None:
        offered: list[Item] = []
        for lease in leases:
            if not self._inventory.unread(lease):
                continue
            item = items.get(lease.nonce)
            if item is None:
                # The session was closed since the claim.
                self._buffer.give_back(lease, self._inventory.drop(lease))
                continue
            self._inventory.read(lease, [item])
            if item.cancelled:
                self._inventory.release(item)
                self._buffer.decide(item, CANCELLED)
            else:
                offered.append(item)
        self._dispatcher.offer(offered)

    async def fail_lost(self, lease: Lease) -> None:
        """Fail a lease's items as `worker_lost`: their workers were lost too often. Items of a paused batch too: given
        back, they would run again."""
        ranges: list[claims.Range] = list(lease.ranges)
        while ranges:
            async with borrowed(self._database) as connection:
                if lease.session:
                    items = await claims.read_heads(connection, [lease], max_bytes=1, closed_too=True)
                else:
                    items = await claims.read_bodies(
                        connection, lease, ranges, max_rows=READ_ROWS, max_bytes=1, closed_too=True
                    )
            if not items:
                self._buffer.give_back(lease, ranges)
                return
            for item in items:
                message = f"its worker was lost {lease.reclaims} times while it was being processed"
                outcome = Outcome(OutcomeState.FAILED, error_code="worker_lost", error_message=message)
                self._buffer.decide(item, CANCELLED if item.cancelled else outcome)
            ranges = claims.beyond(ranges, items[-1].ordinal)

    async def report_progress(self, worker_id: UUID) -> None:
        """Report progress on every lease held here. Waiting items of leases that were taken back are dropped."""
        async with borrowed(self._database) as connection:
            lost = await liveness.report_progress(connection, worker_id, list(self._inventory.leases.values()))
        # A lease that left the inventory meanwhile was settled, not lost.
        lost &= self._inventory.leases.keys()
        if not lost:
            return
        _log.warning("%d leases were taken from this worker: dropping their waiting items", len(lost))
        waiting = self._dispatcher.take_back()
        for item in waiting:
            if item.lease.nonce in lost:
                self._inventory.release(item)
        for lease, _ in self._inventory.all_unread():
            if lease.nonce in lost:
                self._inventory.drop(lease)
        self._dispatcher.offer([item for item in waiting if item.lease.nonce not in lost])

    async def give_back_closed(self) -> None:
        """Return waiting items whose lane was paused or cancelled after their bodies were read."""
        if not self._inventory.lanes:
            return
        async with borrowed(self._database) as connection:
            closed = await claims.find_closed_lanes(connection, self._inventory.lanes)
        if not closed:
            return
        self._inventory.lanes -= closed
        waiting = self._dispatcher.take_back()
        self.give_back(item for item in waiting if item.lease.lane_id in closed)
        self._dispatcher.offer([item for item in waiting if item.lease.lane_id not in closed])

    def give_back(self, items: Iterable[Item]) -> None:
        """Return items that were read and not called."""
        for item in items:
            self._inventory.release(item)
            self._buffer.give_back(item.lease, [(item.ordinal, item.ordinal + 1)])
