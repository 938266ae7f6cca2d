"""What is run again on purpose: it keeps its last outcome until the next one takes its place."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from penstock.batches import run_again
from penstock.batches.finish import finish_batch
from penstock.batches.read import get_batch
from penstock.batches.run_again import NotRetryable, Retried, _list_failures, retry_batch
from penstock.batches.steer import cancel_batch
from penstock.claim import liveness
from penstock.config import LivenessLimits, RetryLimits
from penstock.db.pool import Connection
from penstock.model import BatchState, Counts, Item, Lease, OutcomeState
from tests.support.db import one, with_connection
from tests.support.engine import count_leased
from tests.support.wishes import WORKER, answer, defer, make_wish, take

COMPLETED, FAILED, NOT_FOUND = OutcomeState.COMPLETED, OutcomeState.FAILED, OutcomeState.NOT_FOUND
LIFETIME = RetryLimits(max_attempts=3, max_attempts_lifetime=4)


async def outcomes(connection: Connection) -> list[Any]:
    cursor = await connection.execute(
        "SELECT ordinal, generation, state::text, attempts, error_message FROM penstock.outcomes ORDER BY ordinal"
    )
    return await cursor.fetchall()


async def counts(connection: Connection, batch_id: UUID) -> Counts:
    batch = await get_batch(connection, batch_id, None)
    assert batch is not None
    return batch.counts


async def failed(connection: Connection, lines: int = 3, **more: Any) -> UUID:
    """An ended batch of which everything failed at the second attempt."""
    batch_id = await make_wish(connection, [lines], **more)
    await defer(connection, await take(connection), delay_s=0.0)
    await answer(connection, await take(connection), FAILED, message="first")
    assert await finish_batch(connection, batch_id)
    return batch_id


def test_the_last_outcome_stays_until_the_next_replaces_it(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await failed(connection)
        first = [(n, 0, "failed", 2, "first") for n in range(3)]
        assert await outcomes(connection) == first

        assert await retry_batch(connection, batch_id, None) == Retried(3, True)
        assert await outcomes(connection) == first
        [lease] = await take(connection)
        assert (lease.attempt, lease.generation, lease.spent) == (1, 1, 2)
        assert await outcomes(connection) == first
        await defer(connection, [lease], delay_s=0.0)
        assert await outcomes(connection) == first
        figures = await counts(connection, batch_id)
        assert (figures.failed, figures.pending, figures.completed) == (0, 3, 0)

        [lease] = await take(connection)
        assert (lease.attempt, lease.generation, lease.spent) == (2, 1, 2)
        await answer(connection, [lease])
        assert await outcomes(connection) == [(n, 1, "completed", 4, None) for n in range(3)]
        assert await finish_batch(connection, batch_id)
        assert (await counts(connection, batch_id)).completed == 3
        tries = (
            "SELECT ordinal, array_agg(attempt ORDER BY id) FROM penstock.attempts GROUP BY ordinal ORDER BY ordinal"
        )
        rows = await (await connection.execute(tries.encode())).fetchall()
        assert rows == [(n, [1, 2, 3]) for n in range(3)]

    with_connection(database, body)


def test_a_lost_worker_and_a_hand_that_gives_back_keep_the_generation(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await failed(connection)
        await retry_batch(connection, batch_id, None)
        assert len(await take(connection)) == 1
        # Nobody has registered the worker: what it holds is lost.
        limits = LivenessLimits()
        assert (await liveness.reclaim(connection, WORKER, limits, stuck_s=60.0, gone=[])).ordinals == 3
        [lease] = await take(connection)
        assert (lease.generation, lease.spent, lease.reclaims) == (1, 2, 1)
        await answer(connection, [lease], NOT_FOUND, message="second")
        assert await outcomes(connection) == [(n, 1, "not_found", 3, "second") for n in range(3)]

    with_connection(database_18, body)


def key_of(lease: Lease, ordinal: int = 0) -> str:
    return Item(lease, ordinal, ordinal + 1, "a", b"{}").idempotency_key


def test_only_a_deliberate_rerun_changes_the_idempotency_key(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_wish(connection, [1])
        [lease] = await take(connection)
        first = key_of(lease)
        assert first == f"{batch_id.hex}-1"
        await defer(connection, [lease], delay_s=0.0)
        [lease] = await take(connection)
        assert key_of(lease) == first
        keys = {first}
        for generation in (1, 2):
            await answer(connection, [lease], FAILED)
            await retry_batch(connection, batch_id, None)
            [lease] = await take(connection)
            assert lease.generation == generation
            keys.add(key_of(lease))
            await defer(connection, [lease], delay_s=0.0)
            [lease] = await take(connection)
            assert key_of(lease) in keys
        assert len(keys) == 3

    with_connection(database_18, body)


def test_asking_twice_runs_it_once(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await failed(connection)
        assert (await retry_batch(connection, batch_id, None)).requests == 3
        assert (await retry_batch(connection, batch_id, None)).requests == 0
        leases = await take(connection)
        assert (await retry_batch(connection, batch_id, None)).requests == 0
        assert count_leased(leases) == 3
        assert await take(connection) == []
        await answer(connection, leases, FAILED)
        assert (await retry_batch(connection, batch_id, None)).requests == 3
        assert (await counts(connection, batch_id)).pending == 3

    with_connection(database_18, body)


def test_an_input_has_a_bound_for_its_whole_life(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await failed(connection, 2)
        assert (await retry_batch(connection, batch_id, None, limits=LIFETIME)).requests == 2
        [lease] = await take(connection)
        assert LIFETIME.after(lease.spent).max_attempts == 2  # of three, as two of four are spent
        await defer(connection, [lease], delay_s=0.0)
        await answer(connection, await take(connection), FAILED, message="second")
        assert [row[3] for row in await outcomes(connection)] == [4, 4]

        assert await retry_batch(connection, batch_id, None, limits=LIFETIME) == Retried(0, False, 2)
        with pytest.raises(NotRetryable, match=r"^1 failed request has had 4 attempts or more"):
            await retry_batch(connection, batch_id, None, custom_ids=["0-1"], limits=LIFETIME)
        assert await take(connection) == []
        assert (await retry_batch(connection, batch_id, None)).requests == 2

    with_connection(database_18, body)


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_what_was_not_run_again_keeps_its_outcome(database_18: str, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(run_again, "_CHUNK_ROWS", 2)

    async def body(connection: Connection) -> None:
        batch_id = await failed(connection, 7)
        before = await get_batch(connection, batch_id, None)
        assert before is not None
        await retry_batch(connection, batch_id, None)
        [lease] = await take(connection, 2)
        if end == "cancelled":
            assert await cancel_batch(connection, batch_id)
        else:
            for table in (b"batches", b"lanes"):
                await connection.execute(b"UPDATE penstock.%s SET deadline = now()" % table)
        assert not await finish_batch(connection, batch_id)  # two are in flight
        await answer(connection, [lease])
        assert await finish_batch(connection, batch_id)

        batch = await get_batch(connection, batch_id, None)
        assert batch is not None
        # Every input has its outcome: the batch is as complete as it was.
        assert (batch.state, batch.counts.completed, batch.counts.failed) == (BatchState.COMPLETED, 2, 5)
        assert batch.error_bytes * 7 == before.error_bytes * 5
        assert await one(connection, "SELECT count(*) FROM penstock.deferrals") == (0,)
        assert (await retry_batch(connection, batch_id, None)).requests == 5
        assert count_leased(await take(connection)) == 5

    with_connection(database_18, body)


def test_an_answer_that_comes_while_a_rerun_is_asked_for_is_not_lost(
    database_18: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await failed(connection, 1)
        await retry_batch(connection, batch_id, None)
        leases = await take(connection)
        listed = _list_failures

        async def settled_meanwhile(*args: Any) -> list[int]:
            ordinals = await listed(*args)
            await answer(connection, leases, FAILED, message="second")
            return ordinals

        monkeypatch.setattr(run_again, "_list_failures", settled_meanwhile)
        assert (await retry_batch(connection, batch_id, None)).requests == 1
        [again] = await take(connection)
        assert (again.generation, again.spent, again.ranges) == (2, 3, ((0, 1),))

    with_connection(database_18, body)


def test_a_batch_past_its_deadline_is_retried_when_it_has_expired(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_wish(connection, [2])
        await answer(connection, await take(connection, 1), FAILED)
        held = await take(connection, 1)
        for table in (b"batches", b"lanes"):
            await connection.execute(b"UPDATE penstock.%s SET deadline = now()" % table)
        with pytest.raises(NotRetryable, match="about to expire"):
            await retry_batch(connection, batch_id, None)
        await answer(connection, held)
        assert await finish_batch(connection, batch_id)
        assert (await retry_batch(connection, batch_id, None)).requests == 1

    with_connection(database_18, body)
