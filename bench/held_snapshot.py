"""The cost of claims while a snapshot is held, as a dump does: dead rows cannot be cleaned away meanwhile.

    python -m bench.held_snapshot [--minutes 10] [--quick]

*Retries*: a worker that claims 100 items ten times a second and has all of them to try again, within half a minute.
*Sessions*: 1,000 sessions, of which eight are claimed, answered and asked again, sixteen times a second. Both at once
on two databases of one server, each with a snapshot held from the start. The bound for the median of a claim is 1.5
times in the last minute what it was in the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from time import perf_counter
from typing import Any
from uuid import uuid4

import psycopg
import uvloop

from bench.ground import median, options, print_table, scratch_database, server, settle_down
from penstock.batches.upkeep import fold_progress
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db import arrays
from penstock.db.pool import Connection
from penstock.model import Again, Lease
from penstock.sessions.accept import accept_many
from penstock.settle.write import Changes, settle
from penstock.worker.turns import Turns
from tests.support.engine import make_batch
from tests.support.sessions import DONE, POOL, ROUTE, wish

RETRIES_POOL, RETRIES_ROUTE = "bench", "model-0"
LINES = 100_000
SESSIONS = 1_000

Tick = Callable[[], Awaitable[float]]
"""One cycle; how long its claim took."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    chosen = parser.parse_args()
    minute_s = 2.0 if chosen.quick else 60.0
    minutes = 3 if chosen.quick else chosen.minutes
    with server() as conninfo, scratch_database(conninfo) as retries, scratch_database(conninfo) as sessions:
        found = uvloop.run(_measure(retries, sessions, minutes * minute_s))
    print_table(
        ["claims under a snapshot that is held", "claims", "first minute, ms", "last minute, ms", "ratio"],
        [_row(name, times, minute_s) for name, times in found.items()],
    )


def _row(name: str, times: list[tuple[float, float]], minute_s: float) -> list[str]:
    end = times[-1][0]
    first = median([took for at, took in times if at < minute_s])
    last = median([took for at, took in times if at >= end - minute_s])
    return [name, f"{len(times):,}", f"{1000 * first:.2f}", f"{1000 * last:.2f}", f"{last / first:.2f}"]


async def _measure(retries: str, sessions: str, seconds: float) -> dict[str, list[tuple[float, float]]]:
    async with _held(retries, _retry_world) as retry, _held(sessions, _session_world) as answer:
        both = await asyncio.gather(_every(0.1, seconds, retry), _every(1 / 16, seconds, answer))
    return dict(zip(("100 of 1,000 retries a second", "8 of 1,000 sessions, 128 answers a second"), both, strict=True))


async def _every(interval_s: float, seconds: float, tick: Tick) -> list[tuple[float, float]]:
    times: list[tuple[float, float]] = []
    began = perf_counter()
    while (at := perf_counter() - began) < seconds:
        times.append((at, await tick()))
        await asyncio.sleep(max(0.0, began + len(times) * interval_s - perf_counter()))
    return times


@contextlib.asynccontextmanager
async def _held(database: str, world: Callable[[Connection], Awaitable[Tick]]) -> AsyncIterator[Tick]:
    async with (
        await psycopg.AsyncConnection.connect(database, autocommit=True) as connection,
        await psycopg.AsyncConnection.connect(database) as dump,
    ):
        arrays.register(connection)
        tick = await world(connection)
        await asyncio.to_thread(settle_down, database)
        await dump.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await dump.execute("SELECT count(*) FROM penstock.lanes")
        yield tick


async def _retry_world(connection: Connection) -> Tick:
    batch_id = await make_batch(connection, [LINES], pool=RETRIES_POOL)
    worker_id, turns, chance = uuid4(), Turns(RETRIES_POOL, by_time=False), random.Random(1)
    await liveness.register(connection, worker_id, RETRIES_POOL)

    async def tick() -> float:
        began = perf_counter()
        routes = await turns.routes(connection)
        options: dict[str, Any] = {"worker_id": worker_id, "taper_floor": 100, "suspect_ok": True}
        leases: list[Lease] = await turns.claim(connection, dict.fromkeys(routes, 100), **options) if routes else []
        took = perf_counter() - began
        changes = Changes()
        for lease in leases:
            for ordinal in claims.first_ordinals(lease.ranges, 100):
                changes.agains.append((lease, ordinal, Again("busy", "later", chance.uniform(1, 30), False)))
        await settle(connection, worker_id, changes)
        if chance.random() < 0.1:
            await fold_progress(connection, [batch_id])
        return took

    return tick


async def _session_world(connection: Connection) -> Tick:
    worker_id, turns = uuid4(), Turns(POOL, by_time=True)
    for start in range(0, SESSIONS, 500):
        await accept_many(connection, [wish(f"s{number}") for number in range(start, start + 500)])
    await liveness.register(connection, worker_id, POOL)

    async def tick() -> float:
        began = perf_counter()
        await turns.routes(connection)
        options: dict[str, Any] = {"worker_id": worker_id, "taper_floor": 1, "suspect_ok": True}
        leases = await turns.claim(connection, {ROUTE: 8}, **options)
        took = perf_counter() - began
        changes = Changes()
        for item in await claims.read_heads(connection, leases, max_bytes=1 << 24):
            changes.decide(item, DONE)
        await settle(connection, worker_id, changes)
        lanes = [lease.lane_id for lease in leases]
        cursor = await connection.execute("SELECT key FROM penstock.sessions WHERE lane_id = ANY (%s)", [lanes])
        await accept_many(connection, [wish(key) for (key,) in await cursor.fetchall()])
        return took

    return tick


if __name__ == "__main__":
    main()
