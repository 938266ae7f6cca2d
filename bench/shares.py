"""How workers share themselves out between owners.

    python -m bench.shares [--owners 50] [--seconds 60] [--quick]

Fifty owners of weights 1 to 4, all with work for the same model: every third one with 2,000 batches of 50 lines, the
others with one batch of 20,000. Two workers of 32 calls at a time, each call 20 ms. After a minute every owner's
answers are counted. Owner for owner, its share of them is compared with its share of the weights; the bound is 20 %.
"""

from __future__ import annotations

import asyncio

import psycopg
import uvloop

from bench.ground import options, print_table, scratch_database, server, settle_down, sized
from penstock.batches.create import create_batch
from penstock.config import Config, RetryLimits
from penstock.db.notify import NoticeListener
from penstock.db.pool import open_pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Item, Outcome, OutcomeState, Verdict
from penstock.tasks import cancel_and_wait
from penstock.worker.worker import Worker
from tests.support.engine import make_file

POOL = "bench"
WEIGHTS = (1, 2, 3, 4)
SMALL = 50
CALL_S = 0.02

_ANSWERED = """
SELECT l.owner, count(*)
  FROM penstock.outcomes o
  JOIN penstock.lanes l ON l.id = o.lane_id
 GROUP BY l.owner
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--owners", type=int, default=50)
    parser.add_argument("--seconds", type=float)
    chosen = parser.parse_args()
    seconds = chosen.seconds or sized(chosen, 60, 3)
    large, batches = sized(chosen, 20_000, 2_000), sized(chosen, 2_000, 50)
    weights = {f"owner-{n:02}": WEIGHTS[n % len(WEIGHTS)] for n in range(chosen.owners)}
    with server() as conninfo, scratch_database(conninfo) as database:
        uvloop.run(_prepare(database, weights, large, batches))
        settle_down(database)
        answered = uvloop.run(_work(database, seconds))
    total, sum_of_weights = sum(answered.values()), sum(weights.values())
    shares = [answered.get(owner, 0) / total / (weight / sum_of_weights) for owner, weight in weights.items()]
    print_table(
        [f"{len(weights)} owners, {seconds:.0f} s", "answers", "smallest share / weight", "largest share / weight"],
        [["weights 1 to 4", f"{total:,}", f"{min(shares):.3f}", f"{max(shares):.3f}"]],
    )


async def _prepare(database: str, weights: dict[str, int], large: int, batches: int) -> None:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        for number, (owner, weight) in enumerate(weights.items()):
            await connection.execute("INSERT INTO penstock.owners (owner, weight) VALUES (%s, %s)", [owner, weight])
            lines, count = (large, 1) if number % 3 else (SMALL, batches)
            file_id = await make_file(connection, [lines])
            await connection.execute("UPDATE penstock.files SET owner = %s WHERE id = %s", [owner, file_id])
            for _ in range(count):
                await create_batch(connection, file_id=file_id, owner=owner, pool=POOL)


async def _call(_: Item) -> Verdict:
    await asyncio.sleep(CALL_S)
    return Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=20)


async def _work(database: str, seconds: float) -> dict[str, int]:
    config = Config()
    pool, notices = await open_pool(database, config.database), NoticeListener(database)
    listening = asyncio.create_task(notices.run())
    dispatchers = [CoroutineDispatcher(each(_call), 32, RetryLimits()) for _ in range(2)]
    workers = [Worker(config, pool, POOL, dispatcher, notices) for dispatcher in dispatchers]
    working = [asyncio.create_task(worker.run()) for worker in workers]
    await asyncio.sleep(seconds)
    async with pool.connection() as connection:
        answered: dict[str, int] = dict(await (await connection.execute(_ANSWERED)).fetchall())
    for worker in workers:
        worker.stop()
    await asyncio.gather(*working)
    await cancel_and_wait([listening])
    await pool.close()
    return answered


if __name__ == "__main__":
    main()
