"""Blocks of a followed batch's results: what they hold counts for the batch's owner, and little of it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import UUID

import pytest

from penstock.api import result_blocks
from penstock.api.result_blocks import KEPT_BYTES, ResultBlocks
from penstock.db.pool import Connection
from penstock.export.follow import Page
from penstock.server.memory import MemoryBudget, MemoryUsedUpError

MIB = 1024 * 1024
BATCH = UUID(int=1)


class Nobody:
    """Lends no connection: the pages are made up."""

    async def getconn(self) -> Connection:
        raise AssertionError

    async def putconn(self, conn: Connection) -> None:
        raise AssertionError(conn)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers from which pages were read. Each page is one line, of half a mebibyte; line 100 has eight of them."""
    found: list[int] = []

    async def read(_database: object, _batch: UUID, _which: str, offset: int, _max_bytes: int) -> Page:
        found.append(offset)
        await asyncio.sleep(0)
        size = 8 * MIB if offset == 100 else MIB // 2
        return Page([b"x" * size], [offset + 1], offset + 1)

    monkeypatch.setattr(result_blocks, "read_journal_page", read)
    return found


def run(test: Callable[[ResultBlocks, MemoryBudget], Coroutine[Any, Any, None]]) -> None:
    async def go() -> None:
        memory = MemoryBudget(32 * MIB)
        await test(ResultBlocks(Nobody(), memory, BATCH, "a"), memory)

    asyncio.run(go())


def test_a_few_blocks_are_kept_and_counted(reads: list[int]) -> None:
    async def test(blocks: ResultBlocks, memory: MemoryBudget) -> None:
        for offset in range(10):
            assert await blocks.after(offset)
        assert 0 < memory.held_by("a") <= KEPT_BYTES
        assert await blocks.after(9)
        assert reads == list(range(10))
        assert await blocks.after(0)
        assert reads[-1] == 0
        blocks.forget()
        assert memory.held_by("a") == 0

    run(test)


def test_a_block_that_is_larger_than_all_that_are_kept_is_not_kept(reads: list[int]) -> None:
    async def test(blocks: ResultBlocks, memory: MemoryBudget) -> None:
        assert await blocks.after(1)
        kept = memory.held_by("a")
        block = await blocks.after(100)
        assert block is not None
        assert memory.held_by("a") == kept
        block.take()
        block.take()
        assert memory.held_by("a") == kept + len(block.events)
        block.let_go()
        assert memory.held_by("a") == kept + len(block.events)
        block.let_go()
        assert memory.held_by("a") == kept
        assert await blocks.after(1)
        assert reads == [1, 100]

    run(test)


def test_readers_far_apart_hold_no_more_than_their_owner_may(reads: list[int]) -> None:
    async def test(blocks: ResultBlocks, memory: MemoryBudget) -> None:
        async def count_taken() -> int:
            for taken in range(100):
                block = await blocks.after(1_000 * taken)
                assert block is not None
                try:
                    block.take()
                except MemoryUsedUpError:
                    return taken
            return 100

        assert 20 <= await count_taken() <= 32
        assert memory.held_by("a") <= 16 * MIB
        assert await blocks.after(5), "it is read all the same"
        assert reads

    run(test)


def test_what_is_read_after_the_last_reader_left_is_not_kept(reads: list[int]) -> None:
    async def test(blocks: ResultBlocks, memory: MemoryBudget) -> None:
        reading = asyncio.create_task(blocks.after(0))
        while not reads:
            await asyncio.sleep(0)
        blocks.close()
        assert await reading
        assert memory.held_by("a") == 0

    run(test)
