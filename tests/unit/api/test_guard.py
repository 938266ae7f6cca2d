"""The guard of a request's streams, with a client whose reading is timed by a clock of the test."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from penstock.api import guard as guards
from penstock.api.guard import Guard, SlowReaderError
from penstock.config import ServeLimits

BLOCK = 10_000
LIMITS = ServeLimits(send_timeout_s=100, send_min_bytes_per_s=1_000)


class _Reader:
    """A client that takes so long for each block."""

    def __init__(self, block_s: float) -> None:
        self._block_s = block_s
        self.now = 0.0
        self.read = 0

    def clock(self) -> float:
        return self.now

    async def receive(self) -> Message:
        raise AssertionError

    async def send(self, _: Message) -> None:
        # Time that is up is told between two turns of the loop.
        for _turn in range(3):
            await asyncio.sleep(0)
        self.now += self._block_s
        self.read += 1


def send_blocks(reader: _Reader, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "monotonic", reader.clock)

    async def sent() -> None:
        guard = Guard(reader.receive, reader.send, LIMITS, [])
        for _ in range(blocks):
            await guard.send({"type": "http.response.body", "body": bytes(BLOCK), "more_body": True})

    asyncio.run(sent())


def test_a_client_that_reads_slowly_in_all_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is read in time; all of them at half the rate that is asked for."""
    reader = _Reader(20)
    with pytest.raises(SlowReaderError):
        send_blocks(reader, 1_000, monkeypatch)
    assert reader.read == 11, "10 s behind with each block: after send_timeout_s it is over"


def test_a_client_that_reads_fast_enough_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = _Reader(10)
    send_blocks(reader, 1_000, monkeypatch)
    assert reader.read == 1_000
