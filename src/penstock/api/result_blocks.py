"""Results of a followed batch as blocks of events, read once for all readers that are near each other.

What blocks hold counts for the batch's owner, for as long as a block is kept or a reader is at it. The last blocks are
kept, for readers that come at once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final
from uuid import UUID

from penstock.db.pool import Lender
from penstock.export.follow import Page, read_journal_page
from penstock.server.memory import Hold, MemoryBudget, MemoryUsedUpError
from penstock.tasks import ignore_result

PAGE_BYTES: Final = 512 * 1024
KEPT_BYTES: Final = 2 * 1024 * 1024


class Block:
    """Results in a row, as they are sent."""

    __slots__ = ("_hold", "_users", "after", "events")

    def __init__(self, events: bytes, after: int, hold: Hold) -> None:
        self.events = events
        self.after = after
        """The number of the line after the last of them."""
        self._hold = hold
        self._users = 0

    def take(self) -> None:
        """Use it, until `let_go`. Raises MemoryUsedUpError."""
        self._hold.resize(len(self.events))
        self._users += 1

    def let_go(self) -> None:
        self._users -= 1
        if not self._users:
            self._hold.release()


class ResultBlocks:
    """Results of one batch as blocks, by the number of their first line."""

    def __init__(self, database: Lender, memory: MemoryBudget, batch_id: UUID, owner: str) -> None:
        self._database = database
        self._memory = memory
        self._batch_id = batch_id
        self._owner = owner
        self._kept: OrderedDict[int, Block] = OrderedDict()
        self._kept_bytes = 0
        self._reads: dict[int, asyncio.Task[Block | None]] = {}
        self._closed = False
        self.edge: int | None = None
        """The highest number that a reader has come to."""

    async def after(self, offset: int) -> Block | None:
        """The block that begins with the line of a number, None if nothing is there yet."""
        block = self._kept.get(offset)
        if block is not None:
            self._kept.move_to_end(offset)
            return block
        reading = self._reads.get(offset)
        if reading is None:
            reading = self._reads[offset] = asyncio.create_task(self._read(offset))
            reading.add_done_callback(ignore_result)
        # A reader that leaves does not cancel the read for the others.
        return await asyncio.shield(reading)

    async def _read(self, offset: int) -> Block | None:
        try:
            page = await read_journal_page(self._database, self._batch_id, "output", offset, PAGE_BYTES)
        finally:
            del self._reads[offset]
        if not page.lines:
            return None
        block = Block(_events_of(page), page.after, Hold(self._memory, self._owner))
        if not self._closed and len(block.events) <= KEPT_BYTES:
            self._keep(offset, block)
        return block

    def _keep(self, offset: int, block: Block) -> None:
        try:
            block.take()
        except MemoryUsedUpError:
            return
        self._kept[offset] = block
        self._kept_bytes += len(block.events)
        while self._kept_bytes > KEPT_BYTES:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, block = self._kept.popitem(last=False)
        self._kept_bytes -= len(block.events)
        block.let_go()

    def reached(self, offset: int) -> None:
        if self.edge is None or offset > self.edge:
            self.edge = offset

    async def advance(self) -> bool:
        """Read on from the edge, for all readers that wait there. Returns whether there was anything."""
        moved = False
        while self.edge is not None and (block := await self.after(self.edge)) is not None:
            self.reached(block.after)
            moved = True
        return moved

    def forget(self) -> None:
        """Keep nothing, as no reader follows results now."""
        while self._kept:
            self._drop_oldest()
        self.edge = None

    def close(self) -> None:
        self.forget()
        self._closed = True


def _events_of(page: Page) -> bytes:
    """Lines as events; each event's id is the number of the line after it."""
    return b"".join(
        b"id: %d\nevent: result\ndata: %b\n\n" % (after, line.rstrip(b"\n"))
        for line, after in zip(page.lines, page.offsets, strict=True)
    )
