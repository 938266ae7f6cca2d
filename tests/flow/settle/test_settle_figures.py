"""What a settle notes beside the outcomes: sizes, tokens, the journal. All of it from the rows it wrote."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID, uuid4

from penstock.db.pool import Connection
from penstock.export.result_lines import OutcomeRow, openai_line
from penstock.model import Again, Item, Lease, Outcome, OutcomeState, Usage
from penstock.settle.write import Changes, Settled, settle
from tests.support.db import one, with_connection
from tests.support.engine import claim_due, make_batch

GOOD = Outcome(OutcomeState.COMPLETED, '{"a": "\u2028"}'.encode(), 200, "req_1", usage=Usage(10, 4, 20, 5))
PLAIN = Outcome(OutcomeState.COMPLETED, b"1", 200)
BAD = Outcome(OutcomeState.FAILED, b'{"error": "no"}', 400, None, "bad", "no")
LOST = Outcome(OutcomeState.FAILED, None, None, None, "connection_reset", "it \u0085 broke")
LATER = Again("busy", "later", 1.0, True)

_SUMS = (
    "SELECT sum(output_bytes)::int8, sum(error_bytes)::int8, sum(input_tokens)::int8, sum(cached_tokens)::int8,"
    " sum(output_tokens)::int8, sum(reasoning_tokens)::int8 FROM penstock.progress WHERE batch_id = %s"
)


async def leased(connection: Connection, worker: UUID, count: int, route: str = "model-0") -> Lease:
    (lease,) = await claim_due(connection, pool="test", wants={route: count}, worker_id=worker, taper_floor=count)
    return lease


def items(lease: Lease) -> list[Item]:
    return [
        Item(lease, ordinal, ordinal + 1, f"{lease.source_lane}-{ordinal}", b"{}")
        for start, stop in lease.ranges
        for ordinal in range(start, stop)
    ]


async def stored_bytes(connection: Connection, batch_id: UUID, *, completed: bool) -> int:
    """The length of a result file, by making it."""
    cursor = await connection.execute(
        "SELECT o.line, o.state::text, o.custom_id, o.status_code, o.request_id, o.error_code, o.error_message,"
        " o.response FROM penstock.outcomes o JOIN penstock.lanes l ON l.id = o.lane_id"
        " WHERE l.batch_id = %s AND (o.state = 'completed') = %s",
        [batch_id, completed],
    )
    return sum(len(openai_line(batch_id, OutcomeRow._make(row))) for row in await cursor.fetchall())


def test_sizes_and_tokens_are_those_of_the_rows_written(database: str) -> None:
    async def body(connection: Connection) -> None:
        worker, batch_id = uuid4(), await make_batch(connection, [12])
        lease = await leased(connection, worker, 12)
        changes = Changes()
        verdicts: list[Outcome | Again] = [GOOD, GOOD, PLAIN, BAD, LOST, LATER]
        for item, verdict in zip(items(lease), verdicts, strict=False):
            changes.decide(item, verdict)
        assert await settle(connection, worker, changes) == Settled(5, 1, 0, 0)
        output, errors, *tokens = await one(connection, _SUMS, [batch_id])
        assert tokens == [20, 8, 40, 10]
        assert output == await stored_bytes(connection, batch_id, completed=True) > 0
        assert errors == await stored_bytes(connection, batch_id, completed=False) > 0

    with_connection(database, body)


def test_what_is_refused_counts_nowhere(database: str) -> None:
    async def body(connection: Connection) -> None:
        worker, batch_id = uuid4(), await make_batch(connection, [4])
        first, second, third, _ = items(await leased(connection, worker, 4))
        changes = Changes()
        changes.decide(first, GOOD)
        await settle(connection, worker, changes)
        changes = Changes()
        for item in (first, second, third):  # the first is settled already
            changes.decide(item, GOOD if item is not third else BAD)
        assert await settle(connection, worker, changes) == Settled(2, 0, 0, 1)
        stranger = Changes()
        stranger.decide(second, GOOD)
        assert await settle(connection, uuid4(), stranger) == Settled(0, 0, 0, 1)
        output, errors, *tokens = await one(connection, _SUMS, [batch_id])
        assert tokens == [20, 8, 40, 10]
        assert output == await stored_bytes(connection, batch_id, completed=True)
        assert errors == await stored_bytes(connection, batch_id, completed=False)
        cursor = await connection.execute(
            "SELECT completed::text, others::text FROM penstock.journal ORDER BY xact, id"
        )
        assert await cursor.fetchall() == [("{[0,1)}", "{}"), ("{[1,2)}", "{[2,3)}")]

    with_connection(database, body)


def test_a_journal_entry_per_lane_with_the_time_of_its_outcomes(database: str) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)

    async def body(connection: Connection) -> None:
        worker, batch_id = uuid4(), await make_batch(connection, [6, 6])
        changes = Changes()
        for route in ("model-0", "model-1"):
            one_half, other_half = (
                await leased(connection, worker, 3, route),
                await leased(connection, worker, 3, route),
            )
            for item in (*items(one_half), *items(other_half)):
                changes.decide(item, [PLAIN, PLAIN, BAD][item.ordinal % 3])
        await settle(connection, worker, changes, now=now)
        cursor = await connection.execute(
            "SELECT l.source_lane, j.batch_id, j.completed::text, j.others::text, j.completed_count, j.others_count,"
            "  j.written_at, (SELECT count(*) FROM penstock.outcomes o"
            "    WHERE o.lane_id = j.lane_id AND o.finished_at = j.written_at)"
            "  FROM penstock.journal j JOIN penstock.lanes l ON l.id = j.lane_id ORDER BY 1"
        )
        entry = (batch_id, "{[0,2),[3,5)}", "{[2,3),[5,6)}", 4, 2, now, 6)
        assert await cursor.fetchall() == [(0, *entry), (1, *entry)]

    with_connection(database, body)


def test_retries_and_what_is_given_back_leave_no_entry(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        worker = uuid4()
        await make_batch(connection, [4])
        lease = await leased(connection, worker, 4)
        changes = Changes()
        changes.decide(items(lease)[0], LATER)
        changes.give_back(lease, [(1, 4)])
        assert await settle(connection, worker, changes) == Settled(0, 1, 3, 0)
        assert await one(connection, "SELECT count(*) FROM penstock.journal") == (0,)

    with_connection(database_18, body)


def test_a_limited_lane_is_followed_like_any_other(database: str) -> None:
    async def body(connection: Connection) -> None:
        worker = uuid4()
        await make_batch(connection, [4], width=1)
        lease = await leased(connection, worker, 1)
        changes = Changes()
        changes.decide(items(lease)[0], GOOD)
        assert await settle(connection, worker, changes) == Settled(1, 0, 0, 0)
        assert await one(connection, "SELECT count(*) FROM penstock.journal") == (1,)
        assert await one(connection, "SELECT sum(input_tokens)::int FROM penstock.progress") == (10,)

    with_connection(database, body)
