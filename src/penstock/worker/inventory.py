"""Inventory of a worker: leases with bodies still to read, items that wait or are being called, and their bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from uuid import UUID

from penstock.claim.claim import Range, beyond
from penstock.model import Item, Lease


class Inventory:
    """Leases and items that one worker holds. A lease is listed as long as any of its ordinals is unread or an item."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # By the leases' nonces: after a restore two leases may have the same id.
        self._unread: dict[int, tuple[Lease, list[Range]]] = {}
        self._items: dict[int, tuple[Lease, int]] = {}
        self._suspects: set[int] = set()
        self._batches: Counter[UUID] = Counter()
        self._room = asyncio.Event()
        self.bytes = 0
        """Of the bodies and images of all items held."""
        self.lanes: set[int] = set()
        """Lanes of which items may be held; cleared when none is."""

    def take(self, lease: Lease) -> None:
        """Add a lease that was claimed; none of its bodies is read yet."""
        self._unread[lease.nonce] = (lease, list(lease.ranges))
        self._batches[lease.batch_id] += 1
        self.lanes.add(lease.lane_id)
        if lease.suspect:
            self._suspects.add(lease.nonce)

    def take_item(self, item: Item) -> None:
        """Add an item that was claimed as it was stored: its body is in memory already."""
        self._items[item.lease.nonce] = (item.lease, 1)
        self.bytes += item.size
        self._batches[item.lease.batch_id] += 1
        self.lanes.add(item.lease.lane_id)

    def unread(self, lease: Lease) -> list[Range]:
        """Ranges of the lease still to be read; empty when all are, or when they were given back."""
        entry = self._unread.get(lease.nonce)
        return entry[1] if entry else []

    def read(self, lease: Lease, items: Collection[Item]) -> None:
        """Note that these items, the next of the lease's ranges, are in memory now."""
        last = max(item.ordinal for item in items)
        left = beyond(self.unread(lease), last)
        if left:
            self._unread[lease.nonce] = (lease, left)
        else:
            del self._unread[lease.nonce]
        _, count = self._items.get(lease.nonce, (lease, 0))
        self._items[lease.nonce] = (lease, count + len(items))
        self.bytes += sum(item.size for item in items)

    def release(self, item: Item) -> bool:
        """Remove an item that was decided or given back; true if it was the last of its lease."""
        self.bytes -= item.size
        item.image = None  # the item itself stays in memory until its result is written
        self._room.set()
        nonce = item.lease.nonce
        lease, count = self._items[nonce]
        if count > 1:
            self._items[nonce] = (lease, count - 1)
            return False
        del self._items[nonce]
        if nonce in self._unread:
            return False
        self._forget(lease)
        return True

    def all_unread(self) -> list[tuple[Lease, list[Range]]]:
        return list(self._unread.values())

    def drop_unread(self, route: str | None = None) -> list[tuple[Lease, list[Range]]]:
        """Remove everything unread, or one route's; returns what was removed."""
        dropped = [entry for entry in self.all_unread() if route is None or entry[0].route == route]
        for lease, _ in dropped:
            self.drop(lease)
        return dropped

    def drop(self, lease: Lease) -> list[Range]:
        """Remove the unread ranges of one lease; returns them."""
        _, ranges = self._unread.pop(lease.nonce, (lease, []))
        if lease.nonce not in self._items:
            self._forget(lease)
        return ranges

    def _forget(self, lease: Lease) -> None:
        self._suspects.discard(lease.nonce)
        self._batches[lease.batch_id] -= 1
        if not self._batches[lease.batch_id]:
            del self._batches[lease.batch_id]
        if lease.session:
            # A session has one lease at a time, and there may be any number of sessions.
            self.lanes.discard(lease.lane_id)
        elif not self._batches:
            self.lanes.clear()

    def lanes_with(self, count: int) -> list[int]:
        """Lanes of which at least `count` ordinals are held."""
        counts: Counter[int] = Counter()
        for lease, items in self._items.values():
            counts[lease.lane_id] += items
        for lease, ranges in self._unread.values():
            counts[lease.lane_id] += sum(stop - start for start, stop in ranges)
        return [lane_id for lane_id, items in counts.items() if items >= count]

    def holds_batch(self, batch_id: UUID) -> bool:
        """Whether a lease of this batch, or session, is held."""
        return batch_id in self._batches

    @property
    def leases(self) -> dict[int, Lease]:
        """All leases held, by their nonces."""
        held = {nonce: lease for nonce, (lease, _) in self._unread.items()}
        held.update((nonce, lease) for nonce, (lease, _) in self._items.items())
        return held

    @property
    def holds_suspect(self) -> bool:
        return bool(self._suspects)

    @property
    def free_bytes(self) -> int:
        return max(1, self._max_bytes - self.bytes)

    async def wait_for_bytes(self) -> None:
        """Wait until the bodies and images in memory are within their bound."""
        while self.bytes >= self._max_bytes:
            self._room.clear()
            await self._room.wait()
