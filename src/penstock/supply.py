"""From leases to calls: the bodies of what was claimed, read as fast as the dispatcher takes them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from uuid import UUID

from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db.pool import Pool, borrowed
from penstock.dispatch.pool import Dispatcher
from penstock.hand import Hand
from penstock.model import Item, Lease, Outcome, OutcomeState
from penstock.settle.buffer import SettleBuffer

_log = logging.getLogger("penstock.worker")

READ_ROWS = 500

CANCELLED = Outcome(OutcomeState.SKIPPED, error_code="cancelled", error_message="It was cancelled before it was sent.")


class Supply:
    """Reads for one worker what it has in hand."""

    def __init__(self, database: Pool, hand: Hand, dispatcher: Dispatcher, buffer: SettleBuffer) -> None:
        self._database = database
        self._hand = hand
        self._dispatcher = dispatcher
        self._buffer = buffer

    async def lines(self, lease: Lease) -> None:
        """Read the lease's bodies, a page at a time, as fast as the dispatcher takes them."""
        while ranges := self._hand.unread(lease):
            await self._hand.wait_for_bytes()
            async with borrowed(self._database) as connection:
                items = await claims.read_bodies(
                    connection, lease, ranges, max_rows=READ_ROWS, max_bytes=self._hand.free_bytes
                )
            if not self._hand.unread(lease):
                # Its route was halted or held during the read, and everything unread has gone back.
                return
            if not items:
                # The lane was closed since the claim: what was not read goes back.
                self._buffer.give_back(lease, self._hand.drop(lease))
                return
            self._hand.read(lease, items)
            # What was lost with another worker has waited already.
            self._dispatcher.offer(items, first=lease.reclaims > 0)

    async def heads(self, leases: list[Lease]) -> None:
        """The same for sessions: each has one body to read, and many are read at once."""
        while leases:
            page = leases[:READ_ROWS]
            await self._hand.wait_for_bytes()
            async with borrowed(self._database) as connection:
                items = await claims.read_heads(connection, page, max_bytes=self._hand.free_bytes)
            reached = 1 + page.index(items[-1].lease) if items else len(page)
            self._offer_heads(page[:reached], {item.lease.nonce: item for item in items})
            leases = leases[reached:]

    def _offer_heads(self, leases: list[Lease], items: dict[int, Item]) -> None:
        offered: list[Item] = []
        for lease in leases:
            if not self._hand.unread(lease):
                continue
            item = items.get(lease.nonce)
            if item is None:
                # The session was closed since the claim.
                self._buffer.give_back(lease, self._hand.drop(lease))
                continue
            self._hand.read(lease, [item])
            if item.cancelled:
                self._hand.release(item)
                self._buffer.decide(item, CANCELLED)
            else:
                offered.append(item)
        self._dispatcher.offer(offered)

    async def fail(self, lease: Lease) -> None:
        """Decide what was lost with its workers too often. Also of a paused batch: given back, it would run again."""
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

    async def vouch(self, worker_id: UUID) -> None:
        """Say of what is in hand that it makes progress. What turns out to be lost is dropped, as far as it waits."""
        async with borrowed(self._database) as connection:
            lost = await liveness.report_progress(connection, worker_id, list(self._hand.leases.values()))
        # What has left the hand meanwhile was settled, not lost.
        lost &= self._hand.leases.keys()
        if not lost:
            return
        _log.warning("%d leases were taken from this worker: dropping what waits of them", len(lost))
        waiting = self._dispatcher.take_back()
        for item in waiting:
            if item.lease.nonce in lost:
                self._hand.release(item)
        for lease, _ in self._hand.all_unread():
            if lease.nonce in lost:
                self._hand.drop(lease)
        self._dispatcher.offer([item for item in waiting if item.lease.nonce not in lost])

    async def give_back_closed(self) -> None:
        """Return waiting items whose lane was paused or cancelled after their bodies were read."""
        if not self._hand.lanes:
            return
        async with borrowed(self._database) as connection:
            closed = await claims.closed_lanes(connection, self._hand.lanes)
        if not closed:
            return
        self._hand.lanes -= closed
        waiting = self._dispatcher.take_back()
        self.give_back(item for item in waiting if item.lease.lane_id in closed)
        self._dispatcher.offer([item for item in waiting if item.lease.lane_id not in closed])

    def give_back(self, items: Iterable[Item]) -> None:
        """Return items that were read and not called."""
        for item in items:
            self._hand.release(item)
            self._buffer.give_back(item.lease, [(item.ordinal, item.ordinal + 1)])
