"""Running failures again: once more, and only they."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from penstock.batches import run_again
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, get_batch
from penstock.batches.run_again import NotFailed, NotRetryable, Retried, retry_batch
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.batches.validate import validate_batch
from penstock.claim import claim as claims
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.export.result_lines import OutcomeRow, openai_line
from penstock.model import BatchState, Counts, Lease, OutcomeState
from tests.support.db import one, with_connection
from tests.support.engine import count_leased, make_batch, make_file
from tests.support.wishes import answer, ask_for, defer, make_wish, take

FAILED, NOT_FOUND, SKIPPED = OutcomeState.FAILED, OutcomeState.NOT_FOUND, OutcomeState.SKIPPED


async def read(connection: Connection, batch_id: UUID) -> Batch:
    batch = await get_batch(connection, batch_id, None)
    assert batch is not None
    return batch


def settled(counts: Counts) -> tuple[int, int, int, int]:
    return (counts.completed, counts.failed, counts.not_found, counts.skipped)


def ordinals(leases: list[Lease]) -> list[tuple[int, int]]:
    return sorted((lease.source_lane, o) for lease in leases for o in claims.first_ordinals(lease.ranges, 10_000))


async def error_bytes(connection: Connection, batch_id: UUID) -> int:
    """As long as the error file would be, from what is stored."""
    cursor = await connection.execute(
        "SELECT o.line, o.state::text, o.custom_id, o.status_code, o.request_id, o.error_code, o.error_message,"
        "       o.response"
        "  FROM penstock.outcomes o JOIN penstock.lanes l ON l.id = o.lane_id"
        " WHERE l.batch_id = %s AND o.state <> 'completed'",
        [batch_id],
    )
    return sum(len(openai_line(batch_id, OutcomeRow(*row))) for row in await cursor.fetchall())


async def mixed(connection: Connection, totals: list[int]) -> UUID:
    """An ended batch with two failures, one not found, one skipped and the rest completed, per lane."""
    batch_id = await make_wish(connection, totals)
    for want, state in ((2, FAILED), (1, NOT_FOUND), (1, SKIPPED), (1_000, OutcomeState.COMPLETED)):
        await answer(connection, await take(connection, want), state)
    assert await finish_batch(connection, batch_id)
    return batch_id


def test_all_failures_of_a_completed_batch_run_once_more(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection, [6, 7])
        before = await read(connection, batch_id)
        assert settled(before.counts) == (5, 4, 2, 2)
        assert before.error_bytes == await error_bytes(connection, batch_id) > 0
        query = "SELECT count(*) FROM penstock.files WHERE batch_id = %s"
        assert await one(connection, query, [batch_id]) == (2,)

        assert await retry_batch(connection, batch_id, "local") == Retried(8, True)

        again = await read(connection, batch_id)
        assert (again.state, settled(again.counts), again.counts.pending) == (BatchState.IN_PROGRESS, (5, 0, 0, 0), 8)
        assert (again.error_bytes, again.output_bytes) == (0, before.output_bytes)
        assert again.usage == before.usage
        assert again.completed_at is None
        assert await one(connection, query, [batch_id]) == (0,)
        assert not await finish_batch(connection, batch_id)
        assert await one(connection, "SELECT sum(completed_count) FROM penstock.journal") == (5,)

        leases = await take(connection)
        assert ordinals(leases) == [(lane, ordinal) for lane in (0, 1) for ordinal in range(4)]
        assert {lease.attempt for lease in leases} == {1}
        await answer(connection, leases[:1], FAILED)
        await answer(connection, leases[1:])
        assert await finish_batch(connection, batch_id)
        after = await read(connection, batch_id)
        assert (after.state, after.counts.settled, after.counts.failed) == (BatchState.COMPLETED, 13, 4)
        assert after.error_bytes == await error_bytes(connection, batch_id)
        kinds = "SELECT kind, lines, id FROM penstock.files WHERE batch_id = %s ORDER BY kind"
        rows = await (await connection.execute(kinds.encode(), [batch_id])).fetchall()
        assert rows == [("errors", 4, before.error_file_id), ("output", 9, before.output_file_id)]

    with_connection(database, body)


def test_a_rerun_that_is_cancelled_leaves_the_batch_as_it_was(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection, [6])
        await connection.execute("UPDATE penstock.batches SET completed_at = completed_at - interval '1 hour'")
        before = await read(connection, batch_id)
        await retry_batch(connection, batch_id, "local")
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        after = await read(connection, batch_id)
        assert (after.state, after.completed_at, after.cancelling_at) == (before.state, before.completed_at, None)
        assert settled(after.counts) == settled(before.counts)

    with_connection(database_18, body)


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"custom_ids": ["0-1", "0-3"]}, [(0, 1), (0, 3)]),
        ({"lines": [1, 2, 1]}, [(0, 0), (0, 1)]),
        ({"custom_ids": []}, []),
    ],
)
def test_only_the_named_failures_run_again(database: str, wish: dict[str, Any], expected: list[Any]) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection, [7])
        retried = await retry_batch(connection, batch_id, "local", **wish)
        assert retried == Retried(len(expected), bool(expected))
        assert ordinals(await take(connection)) == expected
        state = (await read(connection, batch_id)).state
        assert state is (BatchState.IN_PROGRESS if expected else BatchState.COMPLETED)

    with_connection(database, body)


@pytest.mark.parametrize(
    ("wish", "unknown"),
    [
        ({"custom_ids": ["0-1", "no such", "0-5", "no such"]}, ["no such", "0-5"]),
        ({"lines": [1, 99, 2, 6]}, [99, 6]),
    ],
)
def test_what_has_not_failed_is_named_and_nothing_runs(
    database: str, wish: dict[str, Any], unknown: list[str | int]
) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection, [7])
        before = await read(connection, batch_id)
        with pytest.raises(NotFailed) as caught:
            await retry_batch(connection, batch_id, "local", **wish)
        assert caught.value.named == unknown
        assert await read(connection, batch_id) == before

    with_connection(database, body)


def test_a_batch_without_failures_stays_as_it_is(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_wish(connection, [3])
        await answer(connection, await take(connection))
        assert await finish_batch(connection, batch_id)
        before = await read(connection, batch_id)
        assert await retry_batch(connection, batch_id, None) == Retried(0, False)
        assert await read(connection, batch_id) == before

    with_connection(database_18, body)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_what_was_never_run_runs_too_and_has_its_time_again(database: str, end: str) -> None:
    async def body(connection: Connection) -> None:
        now = datetime(2030, 1, 1, tzinfo=UTC)
        batch_id = await make_wish(connection, [10], now=now, window_s=3_600.0)
        await answer(connection, await take(connection, 2, now=now), now=now)
        await answer(connection, await take(connection, 1, now=now), FAILED, now=now)
        await defer(connection, await take(connection, 3, now=now), now=now)
        if end == "cancelled":
            assert await cancel_batch(connection, batch_id, "local", now=now)
        late = now + timedelta(hours=2)
        assert await finish_batch(connection, batch_id, now=late)
        batch = await read(connection, batch_id)
        assert batch.state == end
        assert settled(batch.counts) == (2, 1, 0, 0)
        assert await one(connection, "SELECT held, sum(size) FROM penstock.deferrals GROUP BY held") == (True, 3)
        lines = "SELECT lines FROM penstock.files WHERE batch_id = %s AND kind = 'errors'"
        assert await one(connection, lines, [batch_id]) == (8,)
        with pytest.raises(NotRetryable, match="not run to its end"):
            await retry_batch(connection, batch_id, None, lines=[1])

        assert await retry_batch(connection, batch_id, None, now=late) == Retried(8, True)

        batch = await read(connection, batch_id)
        assert (batch.state, batch.cancelling_at, batch.expired_at) == (BatchState.IN_PROGRESS, None, None)
        assert batch.deadline == late + timedelta(hours=1)
        leases = await take(connection, now=late)
        assert count_leased(leases) == 8
        await answer(connection, leases, now=late)
        assert await finish_batch(connection, batch_id, now=late)
        batch = await read(connection, batch_id)
        assert (batch.state, settled(batch.counts)) == (BatchState.COMPLETED, (10, 0, 0, 0))

    with_connection(database, body)


@pytest.mark.parametrize("paused", [False, True])
def test_failures_of_a_running_batch(database: str, paused: bool) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_wish(connection, [10])
        await answer(connection, await take(connection, 3), FAILED)
        held = await take(connection, 2)
        if paused:
            await pause_batch(connection, batch_id)
        assert await retry_batch(connection, batch_id, "local") == Retried(3, False)
        counts = (await read(connection, batch_id)).counts
        assert (counts.failed, counts.in_flight, counts.pending) == (0, 2, 8)
        leases = await take(connection)
        if paused:
            assert leases == []
            assert await resume_batch(connection, batch_id)
            leases = await take(connection)
        assert count_leased(leases) == 8
        await answer(connection, leases + held)
        assert await finish_batch(connection, batch_id)

    with_connection(database, body)


def test_a_rerun_before_the_end_is_noticed(database_18: str) -> None:
    """All lines have outcomes, nobody has ended the batch yet: it must not end on the figures of then."""

    async def body(connection: Connection) -> None:
        batch_id = await make_wish(connection, [4])
        await answer(connection, await take(connection), FAILED)
        assert await retry_batch(connection, batch_id, None) == Retried(4, False)
        assert not await finish_batch(connection, batch_id)
        await answer(connection, await take(connection))
        assert await finish_batch(connection, batch_id)

    with_connection(database_18, body)


def test_many_failures_in_chunks(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_again, "_CHUNK_ROWS", 7)

    async def body(connection: Connection) -> None:
        batch_id = await make_wish(connection, [21, 1, 30])
        leases = await take(connection)
        await answer(connection, leases, FAILED)
        assert await finish_batch(connection, batch_id)
        assert await retry_batch(connection, batch_id, None) == Retried(52, True)
        batch = await read(connection, batch_id)
        assert (batch.counts.failed, batch.counts.pending, batch.error_bytes) == (0, 52, 0)
        assert count_leased(await take(connection)) == 52

    with_connection(database, body)


def test_what_cannot_be_retried_says_why(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        waiting = await make_wish(connection, [2], validated=False)
        with pytest.raises(NotRetryable, match="status 'validating'"):
            await retry_batch(connection, waiting, None)
        await validate_batch(connection, waiting, lambda _: None)
        with pytest.raises(NotRetryable, match="status 'failed'"):
            await retry_batch(connection, waiting, None)
        going = await make_wish(connection, [2])
        held = await take(connection, 1)
        await cancel_batch(connection, going)
        with pytest.raises(NotRetryable, match="status 'cancelling'"):
            await retry_batch(connection, going, None)
        await answer(connection, held)
        with pytest.raises(NotRetryable, match="no batch"):
            await retry_batch(connection, going, "other")
        in_line = await make_batch(connection, [2], width=1)
        with pytest.raises(NotRetryable, match="one after the other"):
            await retry_batch(connection, in_line, None)
        file_id = await make_file(connection, [2])
        bare = await ask_for(connection, file_id)
        await erase.delete_file(connection, file_id, None)
        with pytest.raises(NotRetryable, match="input file"):
            await retry_batch(connection, bare, None)

    with_connection(database_18, body)
