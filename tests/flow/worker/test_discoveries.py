"""Rows that a processor adds to its own job: stored with the settle of the item that found them, each key once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from penstock.batches.finish import finish_batch
from penstock.batches.growth import NewInput, create_growing_batch, grow_batch, seal_batch
from penstock.batches.jobs import insert_job
from penstock.batches.read import Batch, get_batch
from penstock.batches.steer import cancel_batch
from penstock.claim import claim as claims
from penstock.config import TableLimits
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.erase.purge import purge_step
from penstock.model import ROWS, BatchState, Lease, NewRow, Outcome, OutcomeState
from penstock.settle.write import Changes, Settled
from penstock.worker.discoveries import Discoveries
from tests.support.db import one, with_connection
from tests.support.engine import claim_due
from tests.support.wishes import WORKER

POOL, ROUTE = "processor:find", "find"


async def make_job(connection: Connection, rows: int) -> UUID:
    batch_id = await create_growing_batch(connection, owner="local", pool=POOL, filename="rows.csv")
    await insert_job(
        connection, batch_id, owner="local", job_type="job", spec={"processor": "find"}, client="", columns=["sku"]
    )
    body = b'{"row":{"sku":1},"raw":["1"]}'
    await grow_batch(connection, batch_id, [NewInput(ROUTE, ROWS, str(n), body) for n in range(rows)])
    return batch_id


async def take(connection: Connection, want: int = 100) -> list[Lease]:
    return await claim_due(connection, pool=POOL, wants={ROUTE: want}, worker_id=WORKER, taper_floor=1_000)


def new(key: str, **row: Any) -> NewRow:
    return NewRow(key, json.dumps(row).encode())


async def settle(
    connection: Connection,
    leases: list[Lease],
    found: Mapping[int, Sequence[NewRow]],
    limits: TableLimits = TableLimits(),  # noqa: B008 -- frozen
) -> Settled:
    """Complete everything on some leases; ordinals in `found` add rows."""
    changes = Changes()
    for lease in leases:
        for ordinal in claims.first_ordinals(lease.ranges, 1_000):
            outcome = Outcome(OutcomeState.COMPLETED, b"{}", discovered=tuple(found.get(ordinal, ())))
            changes.outcomes.append((lease, ordinal, ordinal + 1, str(ordinal), outcome))
    return await Discoveries(limits).settle(connection, WORKER, changes, notify=False)


async def read(connection: Connection, batch_id: UUID) -> Batch:
    batch = await get_batch(connection, batch_id, None)
    assert batch is not None
    return batch


async def templates(connection: Connection) -> list[tuple[int, int, str, Any]]:
    query = "SELECT ordinal, line, custom_id, body FROM penstock.templates ORDER BY ordinal"
    cursor = await connection.execute(query.encode())
    return [(ordinal, line, key, json.loads(body)) for ordinal, line, key, body in await cursor.fetchall()]


def test_rows_are_added_once_and_the_job_goes_on(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_job(connection, 2)
        assert await seal_batch(connection, batch_id)
        leases = await take(connection)
        first = [new("a", **{"SKU": " x ", "Colour of it": "red"}), new("b", sku=2), new("a", sku=9)]
        await settle(connection, leases, {0: first, 1: [new("b", sku=3), new("c", size={"cm": 4})]})
        assert not await finish_batch(connection, batch_id)
        batch = await read(connection, batch_id)
        assert (batch.counts.total, batch.counts.completed, batch.counts.pending) == (5, 2, 3)
        assert (await templates(connection))[2:] == [
            (2, 3, "a", {"row": {"sku": "x", "colour_of_it": "red"}, "raw": {"SKU": " x ", "Colour of it": "red"}}),
            (3, 4, "b", {"row": {"sku": 2}, "raw": {"sku": 2}}),
            (4, 5, "c", {"row": {"size": {"cm": 4}}, "raw": {"size": {"cm": 4}}}),
        ]
        assert await one(connection, "SELECT discovered, columns FROM penstock.jobs") == (
            3,
            ["sku", "colour_of_it", "size"],
        )
        # Found again, by rows that were found themselves: nothing more.
        again = await take(connection)
        assert claims.first_ordinals(again[0].ranges, 10) == [2, 3, 4]
        await settle(connection, again, {2: [new("a", sku=1)], 4: [new("c", sku=1)]})
        assert await finish_batch(connection, batch_id)
        assert (await read(connection, batch_id)).counts.completed == 5

        assert await erase.delete_batch(connection, batch_id, None)
        (file_id,) = await one(connection, "SELECT file_id FROM penstock.batches")
        await erase.delete_file(connection, file_id, None)
        while await purge_step(connection, 2):
            pass
        for table in ("row_keys", "templates", "jobs"):
            assert await one(connection, f"SELECT count(*) FROM penstock.{table}") == (0,)

    with_connection(database, body)


def test_an_item_that_was_taken_back_adds_nothing(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_job(connection, 2)
        lost, kept = [(await take(connection, 1))[0] for _ in range(2)]
        await connection.execute("DELETE FROM penstock.leases WHERE id = %s", [lost.id])
        settled = await settle(connection, [lost, kept], {0: [new("lost", sku=1)], 1: [new("kept", sku=1)]})
        assert (settled.outcomes, settled.fenced) == (1, 1)
        assert [row[2] for row in (await templates(connection))[2:]] == ["kept"]
        # The same once more, as after an answer that was lost: refused, and nothing added.
        again = await settle(connection, [kept], {1: [new("again", sku=1)]})
        assert (again.outcomes, again.fenced) == (0, 1)
        assert (await read(connection, batch_id)).counts.total == 3

    with_connection(database_18, body)


def test_an_item_that_adds_too_much_fails_and_adds_nothing(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_job(connection, 4)
        found = {
            0: [new("a", sku=1), new("b", sku=2)],
            1: [new("b", sku=1), new("c", sku=2)],
            2: [new("a", sku=1)],
            3: [NewRow("d", b'{"sku":1,"x":2}')],
        }
        limits = TableLimits(max_discovered_rows=3, max_columns=1)
        await settle(connection, await take(connection), found, limits)
        states = "SELECT array_agg(state::text ORDER BY ordinal), array_agg(error_message ORDER BY ordinal)"
        stated, messages = await one(connection, f"{states} FROM penstock.outcomes")
        assert stated == ["completed", "completed", "completed", "failed"]
        assert messages[3] == (
            "A row that it adds cannot be taken: the job has 3 rows that were added to it (max_discovered_rows)."
        )
        batch = await read(connection, batch_id)
        assert (batch.counts.total, batch.counts.completed, batch.counts.failed) == (7, 3, 1)

    with_connection(database_18, body)


def test_a_cancelled_job_takes_no_more(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_job(connection, 2)
        leases = await take(connection)
        assert await cancel_batch(connection, batch_id)
        await settle(connection, leases, {0: [new("a", sku=1)]})
        await seal_batch(connection, batch_id)
        batch = await read(connection, batch_id)
        assert (batch.state, batch.counts.total, batch.counts.completed) == (BatchState.COMPLETED, 2, 2)
        assert await one(connection, "SELECT count(*) FROM penstock.row_keys") == (0,)

    with_connection(database_18, body)
