"""Pending rows are walked through while workers claim, settle, put off and give back on connections of their own."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from penstock.db.pool import Connection
from penstock.export.pending import PendingPage, PendingQuery, list_pending
from penstock.model import Again, Outcome, OutcomeState
from tests.support.db import connected, one
from tests.support.row_jobs import claim_rows, make_job, make_worker, settle_rows

ROWS = 3_000
CLAIMED_AT_MOST = 2_000
VERDICTS = (Outcome(OutcomeState.COMPLETED, b"{}"), Again("busy", "later", 600.0, counts=True), None)


def test_a_walk_while_workers_run(database: str) -> None:
    async def body() -> None:
        async with connected(database) as reader:
            batch_id, lane = await make_job(reader, ROWS)
            walked, begun = asyncio.Event(), asyncio.Event()

            async def work(seed: int) -> None:
                rng = random.Random(seed)
                async with connected(database) as connection:
                    worker = await make_worker(connection)
                    while not walked.is_set() and await claimed(connection) < CLAIMED_AT_MOST:
                        leases = await claim_rows(connection, worker, 20)
                        begun.set()
                        await settle_rows(connection, worker, leases, lambda _: rng.choice(VERDICTS))

            async def claimed(connection: Connection) -> int:
                (so_far,) = await one(connection, "SELECT next FROM penstock.lanes WHERE id = %s", [lane])
                return int(so_far)

            async def walk() -> list[int]:
                await begun.wait()
                query = PendingQuery(batch_id=batch_id)
                page = PendingPage([], None)
                seen: list[int] = []
                while not seen or page.next is not None:
                    page = await list_pending(reader, query, page.next, 50)
                    seen += [row.ordinal for row in page.rows]
                walked.set()
                return seen

            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                walking = group.create_task(walk())
                for seed in range(2):
                    group.create_task(work(seed))
            seen = Counter(walking.result())
            first = await claimed(reader)
            assert first < ROWS
            assert {seen[ordinal] for ordinal in range(first, ROWS)} == {1}

    asyncio.run(body())
