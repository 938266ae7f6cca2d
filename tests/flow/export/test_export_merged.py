"""Inputs with what became of them, and the history of attempts, page by page."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from uuid import UUID, uuid4

import pytest

from penstock.batches.run_again import retry_batch
from penstock.batches.steer import cancel_batch
from penstock.db.pool import Connection
from penstock.export import merged
from penstock.export.merged import STATUSES, AttemptRow, MergedRow, read_attempts_page, read_results_page
from penstock.model import Again, Item, Lease, Outcome, OutcomeState
from penstock.settle.write import Changes, settle
from tests.support.db import connected, with_connection
from tests.support.engine import claim_due, make_batch

GOOD = Outcome(OutcomeState.COMPLETED, b'"good"', 200, "req_1")
BAD = Outcome(OutcomeState.FAILED, b'"bad"', 400, None, "bad", "no")
GONE = Outcome(OutcomeState.NOT_FOUND, None, None, None, "not_found", "gone")
LATER = Again("busy", "try later", 3_600, True, 503, 12)
WORKER = uuid4()


async def leased(connection: Connection, count: int, route: str) -> Lease:
    (lease,) = await claim_due(connection, pool="test", wants={route: count}, worker_id=WORKER, taper_floor=count)
    return lease


async def decide(connection: Connection, lease: Lease, verdicts: dict[int, Outcome | Again]) -> None:
    changes = Changes()
    lanes = 2
    for ordinal, verdict in verdicts.items():
        line = ordinal * lanes + lease.source_lane + 1
        changes.decide(Item(lease, ordinal, line, f"{lease.source_lane}-{ordinal}", b"{}"), verdict)
    await settle(connection, WORKER, changes)


async def walked(
    connection: Connection, batch_id: UUID, statuses: Collection[str] | None = None, limit: int = 3
) -> list[MergedRow]:
    rows: list[MergedRow] = []
    while True:
        page = await read_results_page(connection, batch_id, rows[-1].line if rows else 0, limit, statuses)
        assert len(page) <= limit
        if not page:
            return rows
        rows += page


async def made(connection: Connection) -> UUID:
    """Two lanes of ten and six lines: some of everything."""
    batch_id = await make_batch(connection, [10, 6], body=b'{"n": 1}')
    first, second = await leased(connection, 5, "model-0"), await leased(connection, 3, "model-1")
    await decide(connection, first, {0: GOOD, 1: BAD, 2: LATER})
    await decide(connection, second, {0: GOOD, 2: GONE})
    return batch_id


STATUS_OF = {
    **{1: "completed", 3: "failed", 5: "pending", 7: "processing", 9: "processing"},
    **dict.fromkeys((11, 13, 15, 17, 19), "pending"),
    **{2: "completed", 4: "processing", 6: "not_found", 8: "pending", 10: "pending", 12: "pending"},
}


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_every_line_is_there_with_what_became_of_it(database: str, limit: int) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await made(connection)
        rows = await walked(connection, batch_id, limit=limit)
        assert [row.line for row in rows] == sorted(STATUS_OF)
        assert {row.line: row.status for row in rows} == STATUS_OF
        first, second, third = rows[:3]
        assert (first.custom_id, first.url, first.route, first.body) == (
            *("0-0", "/v1/chat/completions", "model-0", b'{"n": 1}'),
        )
        assert (first.response, first.status_code, first.request_id, first.attempts) == (b'"good"', 200, "req_1", 1)
        assert second.route == "model-1"
        assert (third.error_code, third.error_message, third.finished_at is not None) == ("bad", "no", True)
        assert rows[4].response is None
        assert rows[4].finished_at is None
        live = {row.line: row.live.worker_id for row in rows if row.live is not None}
        assert {line for line, worker_id in live.items() if worker_id == WORKER} == {4, 7, 9}
        assert [line for line, worker_id in live.items() if worker_id is None] == [5]
        assert {row.live.attempts for row in rows if row.live is not None} == {1}

    with_connection(database, body)


def test_what_is_run_again_is_pending_and_shows_its_last_result(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [12, 3])
        lease = await leased(connection, 12, "model-0")
        await decide(connection, lease, {n: BAD if n < 9 else GOOD for n in range(12)})
        # Lines 1 to 13 have failed, every other of them; those from 15 on have not.
        assert (await retry_batch(connection, batch_id, None, lines=[1, 3, 5, 7, 9, 11])).requests == 6
        again = await leased(connection, 2, "model-0")
        assert again.ranges == ((0, 2),)

        status = {1: "processing", 3: "processing", **dict.fromkeys((5, 7, 9, 11), "pending")}
        status |= {**dict.fromkeys((13, 15, 17), "failed"), **dict.fromkeys((19, 21, 23), "completed")}
        status |= dict.fromkeys((2, 4, 6), "pending")
        for limit in (1, 2, 100):
            rows = await walked(connection, batch_id, limit=limit)
            assert {row.line: row.status for row in rows} == status
            assert {row.error_message for row in rows if row.line in (1, 5)} == {"no"}
            for wanted in ("failed", "pending", "processing", "completed", "not_found"):
                found = [row.line for row in await walked(connection, batch_id, [wanted], limit)]
                assert found == sorted(line for line, word in status.items() if word == wanted), wanted
        await decide(connection, again, {0: GOOD, 1: GONE})
        assert [row.line for row in await walked(connection, batch_id, ["not_found"])] == [3]
        # What will not be run keeps the result it has.
        await cancel_batch(connection, batch_id)
        assert [row.line for row in await walked(connection, batch_id, ["failed"])] == [5, 7, 9, 11, 13, 15, 17]
        assert [row.line for row in await walked(connection, batch_id, ["cancelled"])] == [2, 4, 6]

    with_connection(database_18, body)


@pytest.mark.parametrize(
    "statuses",
    [
        *([status] for status in STATUSES),
        *(["failed", "not_found"], ["pending", "processing"], ["completed", "pending"], ["completed", "failed"]),
        *(["failed", "processing"], []),
    ],
    ids=lambda statuses: "+".join(statuses) or "none",
)
def test_lines_of_some_statuses(database: str, monkeypatch: pytest.MonkeyPatch, statuses: list[str]) -> None:
    monkeypatch.setattr(merged, "_WINDOW_LINES", 4)

    async def body(connection: Connection) -> None:
        batch_id = await made(connection)
        expected = [line for line, status in sorted(STATUS_OF.items()) if status in statuses]
        for limit in (1, 2, 50):
            assert [row.line for row in await walked(connection, batch_id, statuses, limit)] == expected

    with_connection(database, body)


def test_what_a_cancelled_batch_will_not_run(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await made(connection)
        assert await cancel_batch(connection, batch_id)
        expected = {line: status.replace("pending", "cancelled") for line, status in STATUS_OF.items()}
        assert {row.line: row.status for row in await walked(connection, batch_id)} == expected
        assert await walked(connection, batch_id, ["pending"]) == []
        cancelled = [line for line, status in sorted(expected.items()) if status == "cancelled"]
        assert [row.line for row in await walked(connection, batch_id, ["cancelled"])] == cancelled

    with_connection(database, body)


def test_nothing_is_shown_of_a_deleted_file(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await made(connection)
        await connection.execute("UPDATE penstock.files SET deleted_at = now()")
        for statuses in (None, ["failed"], ["pending"], ["completed"]):
            assert await walked(connection, batch_id, statuses) == []
        assert await walked(connection, uuid4()) == []

    with_connection(database, body)


def test_a_page_holds_so_many_bytes(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [10], body=b'"' + b"x" * 1_000 + b'"')
        page = await read_results_page(connection, batch_id, 0, 10, max_bytes=2_500)
        assert [row.line for row in page] == [1, 2, 3]
        page = await read_results_page(connection, batch_id, 3, 10, ["pending"], max_bytes=1)
        assert [row.line for row in page] == [4]

    with_connection(database_18, body)


def test_lines_left_blank_in_the_file_are_no_end(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [10])
        await connection.execute("ALTER TABLE penstock.templates DISABLE TRIGGER USER")
        await connection.execute("UPDATE penstock.templates SET line = line + 500 WHERE ordinal >= 4")
        expected = [*range(1, 5), *range(505, 511)]
        assert [row.line for row in await walked(connection, batch_id, limit=3)] == expected
        assert [row.line for row in await walked(connection, batch_id, ["pending"], limit=3)] == expected

    with_connection(database_18, body)


# -- attempts


async def all_attempts(connection: Connection, batch_id: UUID, limit: int, line: int | None = None) -> list[AttemptRow]:
    rows: list[AttemptRow] = []
    while True:
        page = await read_attempts_page(connection, batch_id, rows[-1].position if rows else None, limit, line)
        if not page:
            return rows
        rows += page


@pytest.mark.parametrize("limit", [1, 2, 100])
def test_the_history_of_attempts(database: str, limit: int) -> None:

    async def body(connection: Connection) -> None:
        batch_id = await made(connection)
        await connection.execute("UPDATE penstock.deferrals SET due_at = now() - interval '1 s'")
        again = await leased(connection, 1, "model-0")
        await decide(connection, again, {2: BAD})
        rows = await all_attempts(connection, batch_id, limit)
        told = [(row.line, row.custom_id, row.attempt, row.error_code, row.not_before is not None) for row in rows]
        assert told == [
            (3, "0-1", 1, "bad", False),
            (5, "0-2", 1, "busy", True),
            (5, "0-2", 2, "bad", False),
            (6, "1-2", 1, "not_found", False),
        ]
        assert (rows[1].status_code, rows[1].duration_ms, rows[1].worker_id) == (503, 12, WORKER)
        for line in (1, 3, 5, 6, 99):
            expected = [row for row in rows if row.line == line]
            assert await all_attempts(connection, batch_id, limit, line) == expected
        await connection.execute("DELETE FROM penstock.templates")
        assert await all_attempts(connection, batch_id, limit) == rows

    with_connection(database, body)


def test_a_walk_while_lines_are_settled_neither_skips_nor_repeats(database_18: str) -> None:
    async def run() -> None:
        async with connected(database_18) as connection, connected(database_18) as writer:
            batch_id = await make_batch(connection, [40, 40])
            seen: list[int] = []
            while True:
                page = await read_results_page(connection, batch_id, seen[-1] if seen else 0, 7)
                if not page:
                    break
                seen += [row.line for row in page]
                for route in ("model-0", "model-1"):
                    if len(seen) < 60:
                        lease = await leased(writer, 4, route)
                        start, stop = lease.ranges[0]
                        await decide(writer, lease, dict.fromkeys(range(start, stop), GOOD))
            assert seen == list(range(1, 81))

    asyncio.run(run())
