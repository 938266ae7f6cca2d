"""From leases to calls: the bodies of what was claimed, read as fast as the dispatcher takes them."""

from __future__ import annotations

from penstock.claim import claim as claims
from penstock.db.pool import Pool, borrowed
from penstock.dispatch.pool import Dispatcher
from penstock.hand import Hand
from penstock.model import Item, Lease, Outcome, OutcomeState
from penstock.settle.buffer import SettleBuffer

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
