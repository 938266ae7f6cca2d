"""Result files of ended batches, streamed a block at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from penstock.batches.finish import finish_batch
from penstock.batches.steer import cancel_batch
from penstock.claim import claim as claims
from penstock.db.pool import Connection, Pool
from penstock.export import order, read
from penstock.export.read import Dialect, ResultsChangedError, Which, output_blocks
from penstock.model import BatchState, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.db import one, pooled
from tests.support.engine import claim_due, make_batch

GOOD = Outcome(OutcomeState.COMPLETED, b'{"type": "message"}', 200, "req_1")
BAD = Outcome(OutcomeState.FAILED, b'{"error": {"message": "no"}}', 400, None, "bad", "no")


async def settle_some(connection: Connection, count: int, *outcomes: Outcome) -> None:
    """Settle the next `count` items of each route with the outcomes, in turn by line."""
    worker = uuid4()
    for route in await claims.list_routes_with_work(connection, "test"):
        leases = await claim_due(connection, pool="test", wants={route: count}, worker_id=worker, taper_floor=count)
        changes = Changes()
        for lease in leases:
            for item in await claims.read_bodies(connection, lease, lease.ranges, max_rows=count, max_bytes=1 << 20):
                changes.decide(item, outcomes[item.line % len(outcomes)])
        await settle(connection, worker, changes)


async def joined(blocks: AsyncIterator[bytes]) -> bytes:
    return b"".join([block async for block in blocks])


async def lines_of(
    database: Pool, batch_id: UUID, which: Which, state: BatchState, dialect: Dialect = "openai"
) -> list[Any]:
    text = await joined(output_blocks(database, batch_id, which, state, dialect))
    assert not text or text.endswith(b"\n")
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def on_pool(conninfo: str, body: Callable[[Pool, Connection], Awaitable[None]]) -> None:
    async def run() -> None:
        async with pooled(conninfo) as database, database.connection() as connection:
            await body(database, connection)

    asyncio.run(run())


def numbers(lines: list[Any]) -> list[int]:
    return [int(line["id"].rsplit("_", 1)[1]) for line in lines]


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every boundary there is, with few rows."""
    monkeypatch.setattr(read, "_BLOCK_ROWS", 7)
    monkeypatch.setattr(order, "_KEYS_AHEAD", 4)
    monkeypatch.setattr(order, "_LEAST_AHEAD", 3)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("totals", [[50], [20, 20, 20], [1, 40, 3, 9]], ids=str)
def test_both_files_come_in_input_order(database: str, totals: list[int]) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, totals)
        await settle_some(connection, 100, GOOD, BAD, BAD)
        assert await finish_batch(connection, batch_id)
        good = await lines_of(pool, batch_id, "output", BatchState.COMPLETED)
        bad = await lines_of(pool, batch_id, "errors", BatchState.COMPLETED)
        assert numbers(good) == sorted(numbers(good))
        assert numbers(bad) == sorted(numbers(bad))
        assert len(good) + len(bad) == sum(totals)
        assert {line % 3 for line in numbers(good)} == {0}
        assert all(line["response"]["body"] == {"type": "message"} for line in good)
        figures = await one(connection, "SELECT output_bytes, error_bytes FROM penstock.batches")
        whiches: tuple[Which, Which] = ("output", "errors")
        sizes = [
            len(await joined(output_blocks(pool, batch_id, which, BatchState.COMPLETED, "openai"))) for which in whiches
        ]
        assert list(figures) == sizes

    on_pool(database, body)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("state", [BatchState.CANCELLED, BatchState.EXPIRED])
def test_what_was_never_run_is_said_line_by_line(database: str, state: BatchState) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [30, 10])
        await settle_some(connection, 5, GOOD, BAD)
        if state is BatchState.CANCELLED:
            assert await cancel_batch(connection, batch_id)
            assert await finish_batch(connection, batch_id)
        else:
            past = datetime.now(UTC) - timedelta(seconds=1)
            await connection.execute("UPDATE penstock.lanes SET deadline = %s", [past])
            await connection.execute("UPDATE penstock.batches SET deadline = %s", [past])
            assert await finish_batch(connection, batch_id)
        good = await lines_of(pool, batch_id, "output", state)
        bad = await lines_of(pool, batch_id, "errors", state)
        assert numbers(bad) == sorted(numbers(bad))
        assert sorted(numbers(good) + numbers(bad)) == sorted(
            [n * 2 + 1 for n in range(30)] + [n * 2 + 2 for n in range(10)]
        )
        told = [line for line in bad if line["response"] is None]
        assert len(told) == 30
        assert {line["error"]["code"] for line in told} == {f"batch_{state}"}
        both = await lines_of(pool, batch_id, "output", state, "anthropic")
        kinds = [line["result"]["type"] for line in both]
        assert [kinds.count(kind) for kind in ("succeeded", "errored")] == [5, 5]
        assert kinds.count("expired" if state is BatchState.EXPIRED else "canceled") == 30
        assert [line["custom_id"] for line in both[:5]] == ["0-0", "1-0", "0-1", "1-1", "0-2"]

    on_pool(database, body)


def test_of_a_deleted_file_only_results_are_left(database: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [30])
        await settle_some(connection, 4, GOOD, BAD)
        await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        for statement in ("UPDATE penstock.files SET deleted_at = now()", "DELETE FROM penstock.templates"):
            await connection.execute(statement.encode())
            assert len(await lines_of(pool, batch_id, "output", BatchState.CANCELLED)) == 2
            assert len(await lines_of(pool, batch_id, "errors", BatchState.CANCELLED)) == 2

    on_pool(database, body)


@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE penstock.batches SET deleted_at = now()",
        "UPDATE penstock.batches SET completed_at = completed_at + interval '1 s'",
        "DELETE FROM penstock.outcomes WHERE ordinal = 40",
        "DELETE FROM penstock.outcomes WHERE ordinal = 10",
    ],
)
def test_a_stream_that_is_not_whole_breaks_off(database_18: str, change: str) -> None:
    async def body(pool: Pool, connection: Connection) -> None:
        batch_id = await make_batch(connection, [50])
        await settle_some(connection, 50, GOOD)
        assert await finish_batch(connection, batch_id)
        blocks = output_blocks(pool, batch_id, "output", BatchState.COMPLETED, "openai")
        await anext(blocks)
        await connection.execute(change.encode())
        with pytest.raises(ResultsChangedError):
            await joined(blocks)

    on_pool(database_18, body)


def test_no_connection_is_held_between_blocks(database_18: str) -> None:
    async def run() -> None:
        async with pooled(database_18) as database:
            async with database.connection() as connection:
                batch_id = await make_batch(connection, [5_000])
                await settle_some(connection, 5_000, GOOD)
                assert await finish_batch(connection, batch_id)
            streams = [output_blocks(database, batch_id, "output", BatchState.COMPLETED, "openai") for _ in range(50)]
            for stream in streams:
                await anext(stream)
            stats = database.get_stats()
            assert stats["pool_available"] == stats["pool_size"]
            for stream in streams:
                await stream.aclose()

    asyncio.run(run())
