"""The cost of idle workers.

    python -m bench.idle [--workers 100] [--batches 5000] [--seconds 30] [--quick]

Workers in one process, each with a pool of its own, as a server with many providers has them, on an empty database.
Then one worker among many open batches that all wait for a retry an hour away. Measured when each asks as seldom
as it ever will: transactions of the database, and processor time of this process.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

import psycopg
import uvloop

from bench.ground import options, print_table, scratch_database, server, settle_down, sized
from penstock.config import Config, RetryLimits
from penstock.db.notify import NoticeListener
from penstock.db.pool import open_pool
from penstock.dispatch.coroutines import CoroutineDispatcher, each
from penstock.model import Item, Outcome, OutcomeState, Verdict
from penstock.tasks import cancel_and_wait
from penstock.worker.worker import Worker

# Polls double their wait from a few milliseconds on.
SETTLE_S = 15.0

_TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
_OPEN = """
WITH batch AS (
  INSERT INTO penstock.batches (id, owner, pool, total, created_at, validated_at)
  SELECT gen_random_uuid(), 'owner-' || n %% 50, 'pool-0', 10, now(), now() FROM generate_series(1, %(count)s) AS n
  RETURNING id, owner
),
lane AS (
  INSERT INTO penstock.lanes (batch_id, owner, pool, route, endpoint, source_id, source_lane, next, total, tag)
  SELECT id, owner, 'pool-0', 'model', '/v1/chat/completions', 1, 0, 10, 10, 0 FROM batch
  RETURNING id, batch_id, owner
)
INSERT INTO penstock.deferrals (lane_id, batch_id, owner, pool, route, limited, ordinals, attempt, reason, due_at)
SELECT id, batch_id, owner, 'pool-0', 'model', false, '{[0,10)}', 2, 'retry', now() + interval '1 hour' FROM lane
"""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--batches", type=int)
    parser.add_argument("--seconds", type=float)
    chosen = parser.parse_args()
    count = chosen.batches or sized(chosen, 5_000, 100)
    seconds = chosen.seconds or sized(chosen, 30, 2)
    rows = []
    with server() as conninfo:
        for workers, batches in ((chosen.workers, 0), (1, count)):
            with scratch_database(conninfo) as database:
                with psycopg.connect(database, autocommit=True) as connection:
                    connection.execute(_OPEN, {"count": batches})
                settle_down(database)
                rate, busy = uvloop.run(_measure(database, workers, seconds))
            rows.append([f"{workers}", f"{batches:,}", f"{rate:,.1f}", f"{100 * busy:.2f} %"])
    print_table(["workers", "open batches, retries in an hour", "transactions/s", "of one core"], rows)


async def _done(_: Item) -> Verdict:
    return Outcome(OutcomeState.COMPLETED, b'"done"', 200, duration_ms=1)


@asynccontextmanager
async def _working(conninfo: str, count: int) -> AsyncIterator[None]:
    config = Config()
    pool = await open_pool(conninfo, config.database)
    notices = NoticeListener(conninfo)
    listening = asyncio.create_task(notices.run())
    workers = [
        Worker(config, pool, f"pool-{number}", CoroutineDispatcher(each(_done), 8, RetryLimits()), notices)
        for number in range(count)
    ]
    working = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
        await asyncio.gather(*working)
        await cancel_and_wait([listening])
        await pool.close()


async def _measure(conninfo: str, workers: int, seconds: float) -> tuple[float, float]:
    async with (
        _working(conninfo, workers),
        await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as connection,
    ):
        await asyncio.sleep(SETTLE_S)
        before, used, started = await _transactions(connection), _used_s(), perf_counter()
        await asyncio.sleep(seconds)
        took = perf_counter() - started
        return (await _transactions(connection) - before) / took, (_used_s() - used) / took


async def _transactions(connection: psycopg.AsyncConnection) -> int:
    row = await (await connection.execute(_TRANSACTIONS)).fetchone()
    assert row is not None
    return int(row[0])


def _used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
