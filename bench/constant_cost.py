"""What must not depend on how many lines there are: creating, cancelling and reading a batch, and claiming from it.

    python -m bench.constant_cost [--repeats 300] [--quick]

Medians. Each pair takes turns, so that whatever else the machine does falls on both alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from uuid import UUID, uuid4

import psycopg
import uvloop

from bench.ground import median, options, print_table, scratch_database, server, settle_down, sized
from penstock.batches.create import create_batch
from penstock.batches.read import read_status
from penstock.batches.steer import cancel_batch
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db import arrays
from penstock.db.pool import Connection
from penstock.model import Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.engine import make_file

BODY = b'{"input": "' + b"x" * 587 + b'"}'
ROUTE = "model-0"
CLAIM = 100

Action = Callable[[], Awaitable[object]]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--repeats", type=int)
    chosen = parser.parse_args()
    repeats = chosen.repeats or sized(chosen, 300, 20)
    large = sized(chosen, 1_000_000, 50_000)
    with server() as conninfo, scratch_database(conninfo) as database:
        rows = uvloop.run(_measure(database, large, repeats))
    print_table(
        ["operation", "few", "ms", "many", "ms", "ratio"],
        [[row.name, row.few, f"{row.few_ms:.2f}", row.many, f"{row.many_ms:.2f}", f"{row.ratio:.2f}"] for row in rows],
    )


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    few: str
    few_ms: float
    many: str
    many_ms: float

    @property
    def ratio(self) -> float:
        return self.many_ms / self.few_ms


async def _measure(database: str, large: int, repeats: int) -> list[Row]:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        arrays.register(connection)
        small_file = await make_file(connection, [1_000], body=BODY)
        medium_file = await make_file(connection, [large // 100], body=BODY)
        large_file = await make_file(connection, [large], body=BODY)
        settle_down(database)
        bench = _Bench(connection, uuid4(), repeats)
        await liveness.register(connection, bench.worker_id, "bench")
        return [
            *await bench.batches(small_file, 1_000, large_file, large),
            await bench.claims_along(large_file, large),
            await bench.claims_before(medium_file, large // 100, large_file, large),
        ]


@dataclass(frozen=True, slots=True)
class _Bench:
    connection: Connection
    worker_id: UUID
    repeats: int

    async def batches(self, small: UUID, few: int, large: UUID, many: int) -> list[Row]:
        """Creating, reading while half done and in flight, and cancelling."""
        found: dict[str, tuple[list[float], list[float]]] = {}
        for _ in range(self.repeats):
            for place, file_id in enumerate((small, large)):
                for name, seconds in (await self._one_batch(file_id)).items():
                    found.setdefault(name, ([], []))[place].append(seconds)
        return [
            Row(name, f"{few:,} lines", 1e3 * median(low), f"{many:,} lines", 1e3 * median(high))
            for name, (low, high) in found.items()
        ]

    async def _one_batch(self, file_id: UUID) -> dict[str, float]:
        pool, batch_id, connection = uuid4().hex, uuid4(), self.connection
        created_s = await _timed(lambda: self._create(file_id, pool, batch_id))
        await self._settle(await self._claim(pool))
        await self._claim(pool)
        read_s = await _timed(lambda: read_status(connection, batch_id))
        cancelled_s = await _timed(lambda: cancel_batch(connection, batch_id))
        return {"create a batch": created_s, "read its status": read_s, "cancel it": cancelled_s}

    async def claims_along(self, file_id: UUID, lines: int) -> Row:
        """Claims near the beginning of a file, and near its end."""
        starts = (lines // 1_000, lines * 9 // 10)
        pools = ("early", "late")
        for pool, start in zip(pools, starts, strict=True):
            batch_id = await self._create(file_id, pool, uuid4())
            await self.connection.execute("UPDATE penstock.lanes SET next = %s WHERE batch_id = %s", [start, batch_id])
        found: tuple[list[float], list[float]] = ([], [])
        # Each claim moves the cursor on: as many as the last tenth of a short file has room for.
        for _ in range(min(self.repeats, lines // 10 // CLAIM)):
            for pool, seconds in zip(pools, found, strict=True):
                seconds.append(await _timed(partial(self._claim_and_read, pool)))
        early, late = (1e3 * median(seconds) for seconds in found)
        return Row(f"claim and read {CLAIM}", f"at line {starts[0]:,}", early, f"at line {starts[1]:,}", late)

    async def claims_before(self, small: UUID, few: int, large: UUID, many: int) -> Row:
        """First claims, with so much pending behind them."""
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.repeats):
            for file_id, seconds in zip((small, large), found, strict=True):
                pool = uuid4().hex
                await self._create(file_id, pool, uuid4())
                seconds.append(await _timed(partial(self._claim_and_read, pool)))
        low, high = (1e3 * median(seconds) for seconds in found)
        return Row(f"claim and read {CLAIM}", f"{few:,} pending", low, f"{many:,} pending", high)

    async def _create(self, file_id: UUID, pool: str, batch_id: UUID) -> UUID:
        return await create_batch(self.connection, file_id=file_id, owner="local", pool=pool, batch_id=batch_id)

    async def _claim(self, pool: str) -> list[Lease]:
        claimed = await claims.claim_in_line(
            self.connection, pool=pool, wants={ROUTE: CLAIM}, worker_id=self.worker_id, taper_floor=CLAIM
        )
        return claimed.leases

    async def _claim_and_read(self, pool: str) -> None:
        (lease,) = await self._claim(pool)
        items = await claims.read_bodies(
            self.connection, lease, lease.ranges, max_rows=CLAIM, max_bytes=10 * CLAIM * len(BODY)
        )
        if len(items) != CLAIM:
            raise AssertionError(f"{len(items)} items of {CLAIM}")

    async def _settle(self, leases: list[Lease]) -> None:
        changes = Changes()
        for lease in leases:
            for ordinal in claims.first_ordinals(lease.ranges, CLAIM):
                outcome = Outcome(OutcomeState.COMPLETED, BODY, 200)
                changes.outcomes.append((lease, ordinal, ordinal + 1, str(ordinal), outcome))
        await settle(self.connection, self.worker_id, changes)


async def _timed(action: Action) -> float:
    started = perf_counter()
    await action()
    return perf_counter() - started


if __name__ == "__main__":
    main()
