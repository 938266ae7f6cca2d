"""The guard of a request's streams, with a client whose reading is timed by a clock of the test."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from penstock.api import guard as guards
from penstock.api.errors import ApiError
from penstock.api.guard import Guard, SlowReaderError
from penstock.config import ServeLimits
from penstock.server.memory import Hold, MemoryBudget

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
        guard = Guard(reader.receive, reader.send, LIMITS, [], Hold(MemoryBudget(0)))
        for _ in range(blocks):
            await guard.send({"type": "http.response.body", "body": bytes(BLOCK), "more_body": True})

    asyncio.run(sent())


def test_a_client_that_reads_slowly_in_all_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is read in time; all of them at half the rate that is asked for."""
    reader = _Reader(20)
    with pytest.raises(SlowReaderError):
        send_blocks(reader, 1_000, monkeypatch)
    assert reader.read == 10, "10 s behind with each block: after send_timeout_s it is over"


def test_a_client_that_reads_fast_enough_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = _Reader(10)
    send_blocks(reader, 1_000, monkeypatch)
    assert reader.read == 1_000


def test_the_first_megabytes_buy_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that came fast and then a byte at a time is cut off as soon as one that was slow from the start."""
    limits = ServeLimits(body_idle_timeout_s=100, body_min_bytes_per_s=1_000)
    clock = _Reader(0)
    monkeypatch.setattr(guards, "monotonic", clock.clock)
    pieces = [bytes(8_000_000), *[b"x"] * 1_000]

    async def receive() -> Message:
        for _turn in range(3):
            await asyncio.sleep(0)
        body = pieces.pop(0)
        clock.now += 0 if len(body) > 1 else 10
        return {"type": "http.request", "body": body, "more_body": True}

    async def read() -> None:
        guard = Guard(receive, clock.send, limits, [], Hold(MemoryBudget(0)))
        while True:
            await guard.receive()

    with pytest.raises(ApiError) as refused:
        asyncio.run(read())
    assert refused.value.status == 408
    assert clock.now == 110


def test_a_large_answer_is_counted_and_handed_over_in_pieces() -> None:
    sent: list[Message] = []
    held: list[int] = []

    async def send(message: Message) -> None:
        sent.append(message)
        held.append(budget.held_by("a"))

    async def receive() -> Message:
        raise AssertionError

    budget, body = MemoryBudget(10_000_000), bytes(range(256)) * 4_000

    async def answer() -> None:
        guard = Guard(receive, send, LIMITS, [], Hold(budget, "a"))
        await guard.send({"type": "http.response.start", "status": 200})
        await guard.send({"type": "http.response.body", "body": body, "more_body": False})
        assert guard.complete
        assert guard.sent_bytes == len(body)

    asyncio.run(answer())
    assert b"".join(message.get("body", b"") for message in sent) == body
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert set(held[1:]) == {len(body)}
    assert budget.held_by("a") == 0
