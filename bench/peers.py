"""A whole worker that does nothing, against pgqueuer doing nothing, on the same server in the same run.

    python -m bench.peers [--items 200000] [--bytes 600] [--rounds 3] [--quick]

Penstock: a stored file, a batch over it, one worker process with its default settings; the Python function gets 600
bytes of text and answers as many, which are stored. pgqueuer: as many jobs of 600 bytes, one worker process draining
them in batches of 500; its entrypoint is an empty coroutine and no result is stored. Storing and enqueuing are not
measured. asyncpg is taken for pgqueuer where it is installed, psycopg otherwise; the table says which.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any
from uuid import UUID

import psycopg
import uvloop

from bench.ground import body, median, options, print_table, scratch_database, server, settle_down, sized
from penstock.batches.create import create_batch
from penstock.batches.read import read_status
from penstock.config import Config
from penstock.db.pool import Connection, open_pool
from penstock.dispatch.python import PythonProcessor
from penstock.model import Item
from penstock.worker.worker import Worker
from tests.support.engine import make_file

PGQUEUER_BATCH = 500
ENQUEUE_AT_ONCE = 10_000
POOL = "bench"
LOOK_EVERY_S = 0.02
HAS_ASYNCPG = importlib.util.find_spec("asyncpg") is not None


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--items", type=int)
    parser.add_argument("--bytes", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    items = chosen.items or sized(chosen, 200_000, 20_000)
    rates: dict[Callable[[str, int, bytes], float], list[float]] = {measure_penstock: [], measure_pgqueuer: []}
    with server() as conninfo:
        for _ in range(1 if chosen.quick else chosen.rounds):
            for measure, found in rates.items():
                found.append(items / measure(conninfo, items, body(chosen.bytes)))
    own, peer = (median(found) for found in rates.values())
    driver = "asyncpg" if HAS_ASYNCPG else "psycopg"
    print_table(
        [f"{items:,} items of {chosen.bytes:,} B, one worker process", "items/s", "times"],
        [
            ["Penstock, answers stored", f"{own:,.0f}", f"{own / peer:.1f}"],
            [f"pgqueuer ({driver}), nothing stored", f"{peer:,.0f}", "1.0"],
        ],
    )


def measure_penstock(conninfo: str, items: int, body: bytes) -> float:
    with scratch_database(conninfo) as database:
        batch_id = asyncio.run(_with_connection(database, lambda connection: _store(connection, items, body)))
        settle_down(database)
        seconds = _in_child(_run_penstock, database, batch_id)
        with psycopg.connect(database) as connection:
            row = connection.execute("SELECT count(*) FROM penstock.outcomes WHERE response = %s", [body]).fetchone()
        if row != (items,):
            raise AssertionError(f"{row} answers of {items}")
        return seconds


def measure_pgqueuer(conninfo: str, items: int, body: bytes) -> float:
    with scratch_database(conninfo, migrated=False) as database:
        asyncio.run(_enqueue(database, items, body))
        settle_down(database)
        seconds = _in_child(_run_pgqueuer, database, None)
        with psycopg.connect(database) as connection:
            row = connection.execute(
                "SELECT (SELECT count(*) FROM pgqueuer), count(*) FROM pgqueuer_log WHERE status = 'successful'"
            ).fetchone()
        if row != (0, items):
            raise AssertionError(f"jobs left, jobs done: {row} of {items}")
        return seconds


def _in_child(run: Callable[..., Awaitable[float]], *arguments: object) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as child:
        return child.apply(_child, (run, *arguments))


def _child(run: Callable[..., Any], *arguments: object) -> float:
    seconds: float = uvloop.run(run(*arguments))
    return seconds


async def _with_connection(database: str, action: Callable[[Connection], Awaitable[UUID]]) -> UUID:
    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        return await action(connection)


async def _store(connection: Connection, items: int, body: bytes) -> UUID:
    file_id = await make_file(connection, [items], body=body)
    return await create_batch(connection, file_id=file_id, owner="local", pool=POOL)


def answer(item: Item) -> bytes:
    return item.raw


async def _run_penstock(database: str, batch_id: UUID) -> float:
    config = Config()
    pool = await open_pool(database, config.database)
    async with PythonProcessor(answer, config.dispatch, config.retry) as processor:
        worker = Worker(config, pool, POOL, processor.dispatcher())
        started = perf_counter()
        working = asyncio.create_task(worker.run())
        ended = False
        while not ended and not working.done():
            await asyncio.sleep(LOOK_EVERY_S)
            async with pool.connection() as connection:
                ended = (await read_status(connection, batch_id)).state.terminal
        seconds = perf_counter() - started
        worker.stop()
        await working
    await pool.close()
    return seconds


async def _enqueue(database: str, items: int, body: bytes) -> None:
    from pgqueuer.db import PsycopgDriver
    from pgqueuer.queries import Queries

    async with await psycopg.AsyncConnection.connect(database, autocommit=True) as connection:
        queries = Queries(PsycopgDriver(connection))
        await queries.install()
        for start in range(0, items, ENQUEUE_AT_ONCE):
            count = min(ENQUEUE_AT_ONCE, items - start)
            await queries.enqueue(["empty"] * count, [body] * count, [0] * count)


async def _run_pgqueuer(database: str, _: None) -> float:
    from pgqueuer import PgQueuer
    from pgqueuer.models import Job
    from pgqueuer.types import QueueExecutionMode

    async with _pgqueuer_driver(database) as driver:
        queuer = PgQueuer(driver)

        @queuer.entrypoint("empty")
        async def empty(_: Job) -> None:
            return None

        started = perf_counter()
        await queuer.run(batch_size=PGQUEUER_BATCH, mode=QueueExecutionMode.drain)
        return perf_counter() - started


@asynccontextmanager
async def _pgqueuer_driver(database: str) -> AsyncIterator[Any]:
    if HAS_ASYNCPG:
        from pgqueuer.db import AsyncpgDriver

        connection = await importlib.import_module("asyncpg").connect(_as_url(database))
        yield AsyncpgDriver(connection)
        await connection.close()
        return
    from pgqueuer.db import PsycopgDriver

    class ListeningApart(PsycopgDriver):
        """Waits for notifications on a second connection: psycopg runs nothing else on one that waits, so that
        every statement would queue behind the wait, up to a second."""

        async def add_listener(self, channel: str, callback: Callable[..., None]) -> None:
            await listener.add_listener(channel, callback)

    async with (
        await psycopg.AsyncConnection.connect(database, autocommit=True) as working,
        await psycopg.AsyncConnection.connect(database, autocommit=True) as waiting,
        PsycopgDriver(waiting) as listener,
    ):
        yield ListeningApart(working)


def _as_url(conninfo: str) -> str:
    """The same address as a URL, which is what asyncpg reads."""
    parts = psycopg.conninfo.conninfo_to_dict(conninfo)
    return f"postgresql://{parts['user']}@/{parts['dbname']}?host={parts['host']}&port={parts['port']}"


if __name__ == "__main__":
    main()
