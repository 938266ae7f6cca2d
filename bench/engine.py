"""Claim, read and settle straight on SQL: what the engine can do when nothing is called and nothing decoded.

    python -m bench.engine [--items 200000] [--bytes 600] [--quick]

Each connection has a process of its own, claims 1,000 items of 600 bytes at a time, reads them, and settles them with
answers as large, as fast as it can. The second table has what planning costs, and what the engine does when the
server is made to plan always for the values at hand or never.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import dataclass
from time import perf_counter
from uuid import UUID, uuid4

import psycopg
import uvloop

from bench.ground import body, median, options, print_table, scratch_database, server, settle_down, sized
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.db import arrays
from penstock.db.pool import Connection
from penstock.model import Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.engine import make_batch
from tests.support.plans import ExplainingConnection, Mode

POOL, ROUTE = "bench", "model-0"
CLAIM = 1_000
MOST_BYTES = 2**31 - 1
PLAN_MODES = ("auto", "force_custom_plan", "force_generic_plan")

Kind = tuple[int, str]
"""Connections, and their plan_cache_mode."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--items", type=int)
    parser.add_argument("--bytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    items = chosen.items or sized(chosen, 200_000, 20_000)
    rounds = 1 if chosen.quick else chosen.rounds
    with server() as conninfo:
        figures = _take_turns(conninfo, items, body(chosen.bytes), rounds, [(1, "auto"), (2, "auto")])
        print_table(
            [f"claim, read, settle, {CLAIM:,} of {chosen.bytes:,} B at a time", "items/s", "transactions per item"],
            [
                [_connections(count), f"{found.rate:,.0f}", f"{found.transactions:.4f}"]
                for (count, _), found in figures.items()
            ],
        )
        figures = _take_turns(conninfo, items, body(chosen.bytes), rounds, [(1, mode) for mode in PLAN_MODES])
        print_table(
            ["plan_cache_mode, one connection", "items/s"],
            [[mode, f"{found.rate:,.0f}"] for (_, mode), found in figures.items()],
        )
        claim_ms, settle_ms = asyncio.run(_planning_ms(conninfo, body(chosen.bytes)))
        print_table(
            ["planning, ms", "median"],
            [["claim_open", f"{claim_ms:.2f}"], [f"settle_if_leased, {CLAIM:,} rows", f"{settle_ms:.2f}"]],
        )


@dataclass(frozen=True, slots=True)
class Figures:
    rate: float
    transactions: float
    """Per item."""


def _connections(count: int) -> str:
    return "1 connection" if count == 1 else f"{count} connections"


def _take_turns(conninfo: str, items: int, body: bytes, rounds: int, kinds: list[Kind]) -> dict[Kind, Figures]:
    found: dict[Kind, list[Figures]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for (connections, mode), figures in found.items():
            figures.append(_measure(conninfo, items, body, connections, mode))
    return {
        kind: Figures(median([each.rate for each in figures]), median([each.transactions for each in figures]))
        for kind, figures in found.items()
    }


def _measure(conninfo: str, items: int, body: bytes, connections: int, mode: str) -> Figures:
    with scratch_database(conninfo) as database:
        asyncio.run(_store(database, items, body))
        settle_down(database)
        before = _transactions(database)
        with multiprocessing.get_context("spawn").Pool(connections) as children:
            spans = children.starmap(_work, [(database, mode)] * connections, chunksize=1)
        seconds = max(ended for _, ended in spans) - min(started for started, _ in spans)
        return Figures(items / seconds, (_transactions(database) - before) / items)


def _transactions(database: str) -> int:
    with psycopg.connect(database, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
        assert row is not None
        return int(row[0])


async def _store(database: str, items: int, body: bytes) -> None:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        await make_batch(connection, [items], pool=POOL, body=body)


def _work(database: str, mode: str) -> tuple[float, float]:
    return uvloop.run(_work_off(database, mode))


async def _work_off(database: str, mode: str) -> tuple[float, float]:
    """Start and end on the machine's clock, which the processes share."""
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        arrays.register(connection)
        await connection.execute(f"SET plan_cache_mode = {mode}".encode())
        worker_id = uuid4()
        await liveness.register(connection, worker_id, POOL)
        started = perf_counter()
        while await _cycle(connection, worker_id):
            pass
        return started, perf_counter()


async def _cycle(connection: Connection, worker_id: UUID) -> bool:
    leases = await _claim(connection, worker_id)
    changes = Changes()
    for lease in leases:
        for item in await claims.read_bodies(connection, lease, lease.ranges, max_rows=CLAIM, max_bytes=MOST_BYTES):
            changes.decide(item, _answer(item))
    if leases:
        await settle(connection, worker_id, changes)
    return bool(leases)


async def _claim(connection: Connection, worker_id: UUID) -> list[Lease]:
    claimed = await claims.claim_in_line(
        connection, pool=POOL, wants={ROUTE: CLAIM}, worker_id=worker_id, taper_floor=CLAIM
    )
    return claimed.leases


def _answer(item: Item) -> Outcome:
    return Outcome(OutcomeState.COMPLETED, item.raw, 200)


async def _planning_ms(conninfo: str, body: bytes) -> tuple[float, float]:
    with scratch_database(conninfo) as database:
        await _store(database, 40 * CLAIM, body)
        settle_down(database)
        async with await ExplainingConnection.connect(database, autocommit=True) as connection:
            arrays.register(connection)
            connection.mode, worker_id = Mode.CUSTOM, uuid4()
            await liveness.register(connection, worker_id, POOL)
            connection.plans = []
            for _ in range(20):
                await _cycle(connection, worker_id)
            # Claim, read, ask whether it is still leased, settle.
            claim_plans, settle_plans = connection.plans[0::4], connection.plans[3::4]
            return median([plan.planning_ms for plan in claim_plans]), median(
                [plan.planning_ms for plan in settle_plans]
            )


if __name__ == "__main__":
    main()
