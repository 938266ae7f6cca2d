"""Batches of an intake grow while the database is healthy and shrink when it is not: simulated, without a clock."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.adapt.intake_batch import IntakeBatchSize, MeasuredBatch
from penstock.config import KIB, MIB, IntakeLimits

LIMITS = IntakeLimits()


@dataclass
class Database:
    """Takes batches as long as its three costs say."""

    transaction_s: float = 0.001
    row_s: float = 3e-6
    byte_s: float = 6e-9
    wait_s: Callable[[float], float] = lambda _: 0.0
    noise: random.Random | None = None
    spread: float = 0.3
    sizes: list[int] = field(default_factory=list)
    """Rows of the batches so far."""

    def store(self, size: IntakeBatchSize, row_bytes: int = 200, batches: int = 1) -> None:
        """Store full batches of equal rows."""
        for _ in range(batches):
            rows = min(size.rows, -(-size.bytes // row_bytes))
            seconds = self.transaction_s + rows * (self.row_s + row_bytes * self.byte_s)
            if self.noise is not None:
                seconds *= self.noise.lognormvariate(0, self.spread)
            size.observe(MeasuredBatch(rows, rows * row_bytes, seconds, self.wait_s(seconds)))
            self.sizes.append(rows)


def grown(row_bytes: int = 200) -> IntakeBatchSize:
    size = IntakeBatchSize(LIMITS)
    Database().store(size, row_bytes, 20)
    return size


def test_batches_start_at_64_rows_and_double_while_healthy() -> None:
    size, database = IntakeBatchSize(LIMITS), Database()
    database.store(size, batches=12)
    assert database.sizes == [64 * 2**step for step in range(10)] + [50_000, 50_000]
    assert size.reason == "doubled: healthy"


@pytest.mark.parametrize(("row_bytes", "most"), [(200, 50_000), (2_000, 16_778), (200_000, 168), (40 * MIB, 1)])
def test_rows_of_any_size_end_at_one_of_the_bounds(row_bytes: int, most: int) -> None:
    database = Database()
    database.store(IntakeBatchSize(LIMITS), row_bytes, 20)
    assert database.sizes[-1] == most
    assert all(rows * row_bytes < LIMITS.intake_max_batch_bytes + row_bytes for rows in database.sizes)


def test_bounds_are_those_configured() -> None:
    size = IntakeBatchSize(IntakeLimits(intake_min_rows=200, intake_max_rows=300, intake_max_batch_bytes=10 * KIB))
    assert (size.rows, size.bytes) == (200, 10 * KIB)
    Database().store(size, batches=5)
    assert (size.rows, size.bytes) == (300, 10 * KIB)
    size.observe_error()
    assert (size.rows, size.bytes) == (200, 10 * KIB)
    assert IntakeBatchSize(IntakeLimits(intake_max_rows=1)).rows == 1


@pytest.mark.parametrize("row_bytes", [200, 2_000, 200_000])
def test_batches_shrink_when_the_database_gets_slow_and_grow_when_it_recovers(row_bytes: int) -> None:
    size = grown(row_bytes)
    slow, quick = Database(row_s=30e-6, byte_s=60e-9), Database()
    slow.store(size, row_bytes, 4)
    assert slow.sizes == sorted(slow.sizes, reverse=True)
    assert slow.sizes[3] * 7 < slow.sizes[0]
    assert size.reason == "halved: time per row rises"
    quick.store(size, row_bytes, 20)
    assert quick.sizes[-1] == slow.sizes[0]


def test_a_database_that_stays_slow_becomes_the_usual() -> None:
    size, slow = grown(), Database(row_s=30e-6, byte_s=60e-9)
    slow.store(size, batches=40)
    assert min(slow.sizes) >= 200
    assert slow.sizes[-1] == 50_000


def test_a_batch_that_was_slow_in_part_does_not_pass_for_a_whole_one() -> None:
    """The one after it takes as long, though it is half its size."""
    size, slow = grown(), Database(row_s=30e-6, byte_s=60e-9)
    Database(row_s=12e-6, byte_s=24e-9).store(size)
    slow.store(size, batches=3)
    assert slow.sizes[2] * 3 < slow.sizes[0]


def test_transactions_that_become_dear_are_not_made_more() -> None:
    """Each takes a quarter of a second more, however large it is: small ones would store 256 rows a second."""
    size, far = grown(), Database(transaction_s=0.25)
    far.store(size, batches=10)
    assert min(far.sizes) >= 6_250
    assert far.sizes[-1] == 50_000


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_keep_batches_small(seed: int) -> None:
    size, noisy = IntakeBatchSize(LIMITS), Database(noise=random.Random(seed))
    noisy.store(size, batches=200)
    large = [rows for rows in noisy.sizes[20:] if rows >= 6_250]
    assert len(large) > 0.95 * 180


def test_sustained_waits_for_a_connection_shrink_long_batches() -> None:
    size = grown()
    crowded = Database(wait_s=lambda seconds: 3 * seconds)
    crowded.store(size, batches=2)
    assert size.rows == 50_000
    crowded.store(size)
    assert (size.rows, size.reason) == (25_000, "halved: waits for connections")
    crowded.store(size, batches=50)
    assert 5_000 < size.rows < 25_000, "short batches are not made shorter"
    Database().store(size, batches=5)
    assert size.rows == 50_000


def test_a_wait_now_and_then_changes_nothing() -> None:
    size = grown()
    for number in range(30):
        Database(wait_s=(lambda _: 9.0) if number % 2 else (lambda _: 0.0)).store(size)
        assert size.rows == 50_000


def test_an_error_takes_batches_to_the_least_with_longer_and_longer_rests() -> None:
    size = IntakeBatchSize(LIMITS, random.Random(1))
    Database().store(size, batches=20)
    rests = []
    for _ in range(10):
        size.observe_error()
        assert (size.rows, size.bytes, size.reason) == (16, MIB, "error")
        rests.append(size.rest_s)
    assert 0.25 <= rests[0] <= 0.5
    assert 2.5 <= rests[9] <= 5
    assert all(0.5 * 2**number / 2 <= rest <= 0.5 * 2**number for number, rest in enumerate(rests[:4]))
    Database().store(size)
    assert (size.rest_s, size.rows) == (0, 32)
    size.observe_error()
    assert size.rest_s <= 0.5


def test_a_small_rest_of_the_input_says_nothing() -> None:
    size = grown()
    for _ in range(20):
        size.observe(MeasuredBatch(10, 2_000, 0.01))
    assert size.rows == 50_000


# Milliseconds of batches of 2,000 rows and 510,000 bytes, on two cores shared with a dozen other processes.
BUSY_MS = (
    165, 152, 267, 163, 135, 123, 88, 134, 189, 202, 133, 122, 142, 228, 123, 88, 148, 107, 152, 171, 113, 166, 143,
    134, 260, 108, 172, 157, 102, 47, 156, 108, 144, 193, 78, 92, 125, 163, 159, 160, 155, 84, 137, 129, 91, 114,
    213, 116, 108, 112, 127, 162, 174, 168, 183, 99, 71, 145, 124, 57,
)  # fmt: skip
# The same through a proxy that lets 3 MB/s through from the 20th batch to the 40th.
THROTTLED_MS = (
    155, 141, 74, 114, 114, 168, 95, 222, 156, 80, 121, 124, 153, 195, 155, 129, 207, 372, 154, 185, 276, 363, 344,
    472, 463, 360, 341, 309, 355, 376, 324, 421, 586, 320, 364, 415, 320, 303, 379, 554, 344, 157, 187, 232, 198,
    225, 192, 134, 161, 189, 158, 104, 167, 105, 98, 126, 388, 393, 297, 271,
)  # fmt: skip


def replay(size: IntakeBatchSize, trace_ms: tuple[int, ...]) -> list[int]:
    """Rows of the batches, had each row taken as long as in the trace."""
    recorded, sizes = MeasuredBatch(2_000, 510_000, 1.0), []
    for ms in trace_ms:
        rows = min(size.rows, -(-size.bytes // 255))
        batch = MeasuredBatch(rows, rows * 255, 1.0)
        size.observe(dataclasses.replace(batch, seconds=ms / 1000 * recorded.cost_s / batch.cost_s))
        sizes.append(rows)
    return sizes


def test_a_busy_machine_does_not_keep_batches_small() -> None:
    sizes = replay(IntakeBatchSize(LIMITS), 3 * BUSY_MS)
    assert min(sizes[12:]) >= 12_500
    assert sizes[12:].count(50_000) > 0.7 * len(sizes[12:])


def test_a_database_that_was_slowed_for_a_while_is_given_less_for_that_while() -> None:
    size = IntakeBatchSize(LIMITS)
    replay(size, BUSY_MS)
    sizes = replay(size, THROTTLED_MS)
    assert min(sizes[:20]) >= 25_000
    assert min(sizes[20:41]) <= 12_500
    assert sizes[50] == 50_000
