"""Reprocessing as an operation: in chunks that commit with their place, exact figures, bounded attempts and width."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import pytest

from penstock.batches import reprocess, run_again
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, get_batch
from penstock.batches.reprocess import Doing, Operation, Step, Wish
from penstock.batches.steer import cancel_batch, pause_batch, resume_batch
from penstock.claim import claim as claims
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.model import BatchState, Lease, OutcomeState
from tests.support.db import one, with_connection
from tests.support.engine import claim_due, make_batch
from tests.support.wishes import WORKER, answer, defer

COMPLETED, FAILED, NOT_FOUND, SKIPPED = (
    OutcomeState.COMPLETED,
    OutcomeState.FAILED,
    OutcomeState.NOT_FOUND,
    OutcomeState.SKIPPED,
)
ALL = Wish(["failed", "not_found"], 50, afresh=True)


async def read(connection: Connection, batch_id: UUID) -> Batch:
    batch = await get_batch(connection, batch_id, None)
    assert batch is not None
    return batch


def settled(batch: Batch) -> tuple[int, int, int, int]:
    counts = batch.counts
    return (counts.completed, counts.failed, counts.not_found, counts.skipped)


async def take(connection: Connection, want: int = 1_000) -> list[Lease]:
    return await claim_due(connection, pool="test", wants={"model-0": want}, worker_id=WORKER, taper_floor=1_000)


def ordinals(leases: list[Lease]) -> list[int]:
    return sorted(o for lease in leases for o in claims.first_ordinals(lease.ranges, 10_000))


async def mixed(connection: Connection, total: int = 12, width: int | None = None) -> UUID:
    """An ended batch: four failures, two not found, one skipped, the rest completed."""
    batch_id = await make_batch(connection, [total], width=width)
    for want, state in ((4, FAILED), (2, NOT_FOUND), (1, SKIPPED), (total - 7, COMPLETED)):
        while want:
            leases = await take(connection, want)
            want -= len(ordinals(leases))
            await answer(connection, leases, state)
    assert await finish_batch(connection, batch_id)
    return batch_id


async def begin(connection: Connection, batch_id: UUID, wish: Wish = ALL, worker: UUID = WORKER) -> Doing:
    await reprocess.start(connection, batch_id, wish)
    doing = await reprocess.take(connection, worker, 30)
    assert doing is not None
    return doing


async def finish(connection: Connection, doing: Doing, worker: UUID = WORKER) -> Operation:
    while await reprocess.do_step(connection, doing, worker) is Step.MOVED:
        pass
    return await operation_of(connection, doing)


async def find_no_room(connection: Connection, doing: Doing) -> None:
    """Find that there is no room, upon which the operation is given back; and take it again."""
    assert await reprocess.do_step(connection, doing, WORKER) is Step.NO_ROOM
    assert await reprocess.do_step(connection, doing, WORKER) is Step.ENDED, "no longer this server's"
    assert await reprocess.take(connection, WORKER, 30) == doing


async def operation_of(connection: Connection, doing: Doing) -> Operation:
    found = await reprocess.find_operation(connection, doing.batch_id, doing.id)
    assert found is not None
    return found


async def busy(connection: Connection) -> int:
    """Room taken up in the one lane, and that it is what is held."""
    (taken, held) = await one(
        connection,
        "SELECT busy, (SELECT coalesce(sum(size), 0) FROM (SELECT size FROM penstock.leases UNION ALL"
        " SELECT size FROM penstock.deferrals) AS h) FROM penstock.lanes",
    )
    assert taken == held
    return int(taken)


def test_a_chunk_commits_with_its_place(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server dies between two chunks: the next goes on where it was, and no row is run again twice."""
    monkeypatch.setattr(reprocess, "_CHUNK_ROWS", 2)

    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection)
        dead, alive = uuid4(), uuid4()
        doing = await begin(connection, batch_id, worker=dead)
        assert await reprocess.do_step(connection, doing, dead) is Step.MOVED
        batch = await read(connection, batch_id)
        assert (batch.state, settled(batch), batch.counts.pending) == (BatchState.IN_PROGRESS, (5, 2, 2, 1), 2)
        # What was run again fails again before the operation goes on.
        await answer(connection, await take(connection), FAILED)
        assert settled(await read(connection, batch_id)) == (5, 4, 2, 1)

        assert await reprocess.take(connection, alive, 30) == doing
        assert await reprocess.do_step(connection, doing, dead) is Step.ENDED
        done = await finish(connection, doing, alive)
        assert (done.state, done.requeued, done.worn_out, done.place) == ("done", 6, 0, 5)
        assert done.ended_at is not None
        again = await take(connection)
        assert ordinals(again) == [2, 3, 4, 5]
        await answer(connection, again)
        assert await finish_batch(connection, batch_id)
        assert settled(await read(connection, batch_id)) == (9, 2, 0, 1)

    with_connection(database, body)


def test_attempts_go_on_or_begin_again(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection)
        few = Wish(["failed"], 3)
        for attempts in (2, 3):
            done = await finish(connection, await begin(connection, batch_id, few))
            assert (done.requeued, done.worn_out) == (4, 0)
            leases = await take(connection)
            assert {(lease.attempt, lease.spent, lease.generation) for lease in leases} == {(attempts, 0, attempts - 1)}
            await answer(connection, leases, FAILED)
        assert await finish_batch(connection, batch_id)
        done = await finish(connection, await begin(connection, batch_id, few))
        assert (done.state, done.requeued, done.worn_out) == ("done", 0, 4)
        assert (await read(connection, batch_id)).state is BatchState.COMPLETED
        # All attempts again, up to the bound of its life.
        for spent, requeued in ((3, 4), (4, 0)):
            done = await finish(connection, await begin(connection, batch_id, Wish(["failed"], 4, afresh=True)))
            assert (done.requeued, done.worn_out) == (requeued, 4 - requeued)
            leases = await take(connection)
            assert {(lease.attempt, lease.spent) for lease in leases} == ({(1, spent)} if requeued else set())
            await answer(connection, leases, FAILED)

    with_connection(database_18, body)


def test_a_chunk_is_bounded_in_bytes(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are read at once up to a bound, and one at least: forwards, and when they are given up."""
    monkeypatch.setattr(run_again, "_CHUNK_BYTES", 2 * len(b'"answer"'))
    read_at_once: list[int] = []
    read_outcomes = run_again._read

    async def noting(connection: Connection, lane: int, ordinals: Sequence[int]) -> list[run_again.Past]:
        read_at_once.append(len(ordinals))
        return await read_outcomes(connection, lane, ordinals)

    monkeypatch.setattr(run_again, "_read", noting)

    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection)
        before = await read(connection, batch_id)
        everything = Wish(["completed", "failed", "not_found"], 50, afresh=True)
        done = await finish(connection, await begin(connection, batch_id, everything))
        assert (done.state, done.requeued, done.place) == ("done", 11, 11)
        # Failures have no bodies.
        assert read_at_once == [6 + 2, 2, 1]
        read_at_once.clear()
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        assert read_at_once == [6 + 2, 2, 1]
        after = await read(connection, batch_id)
        assert (settled(after), after.output_bytes) == (settled(before), before.output_bytes)

        await connection.execute("UPDATE penstock.outcomes SET response = repeat('x', 99)::bytea")
        read_at_once.clear()
        assert (await run_again.retry_batch(connection, batch_id, None)).requests == 7
        assert read_at_once == [1] * 7

    with_connection(database, body)


def test_good_results_run_again_too_and_stay_until_replaced(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection)
        before = await read(connection, batch_id)
        doing = await begin(connection, batch_id, Wish(["completed", "failed"], 50, afresh=True))
        assert (await finish(connection, doing)).requeued == 9
        batch = await read(connection, batch_id)
        assert (settled(batch), batch.output_bytes) == ((0, 0, 2, 1), 0)
        kept = "SELECT count(*) FROM penstock.outcomes WHERE state = 'completed' AND response = '\"answer\"'"
        assert await one(connection, kept) == (5,)
        # Cancelled before they were run: everything is as it was.
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        after = await read(connection, batch_id)
        assert (after.state, settled(after)) == (BatchState.COMPLETED, settled(before))
        assert (after.output_bytes, after.error_bytes) == (before.output_bytes, before.error_bytes)

    with_connection(database_18, body)


def test_a_limited_job_runs_again_only_as_many_as_fit(database: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection, width=2)
        assert await busy(connection) == 0
        doing = await begin(connection, batch_id)
        assert await reprocess.do_step(connection, doing, WORKER) is Step.MOVED
        assert await busy(connection) == 2
        await find_no_room(connection, doing)
        leases = await take(connection)
        assert ordinals(leases) == [0, 1]
        await find_no_room(connection, doing)
        await answer(connection, leases, FAILED)
        assert await busy(connection) == 0
        assert await reprocess.do_step(connection, doing, WORKER) is Step.MOVED
        # Paused, resumed, then cancelled: what was to run again gives its room back.
        assert await pause_batch(connection, batch_id)
        assert not await take(connection)
        assert await resume_batch(connection, batch_id)
        assert await busy(connection) == 2
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        assert await busy(connection) == 0
        done = await operation_of(connection, doing)
        assert (done.state, done.requeued) == ("cancelled", 4)
        assert settled(await read(connection, batch_id)) == (5, 4, 2, 1)

    with_connection(database, body)


def test_a_job_ends_with_its_operation(database: str) -> None:
    """All rows that were put back are settled, others are to come: it is not done before the operation is."""

    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection, width=2)
        doing = await begin(connection, batch_id)
        for _ in range(3):
            assert await reprocess.do_step(connection, doing, WORKER) is Step.MOVED
            await answer(connection, await take(connection))
            assert not await finish_batch(connection, batch_id)
            assert (await read(connection, batch_id)).state is BatchState.IN_PROGRESS
        assert await reprocess.do_step(connection, doing, WORKER) is Step.ENDED
        batch = await read(connection, batch_id)
        assert (batch.state, settled(batch)) == (BatchState.COMPLETED, (11, 0, 0, 1))

    with_connection(database, body)


def test_rows_that_were_never_run(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [5], width=3)
        await answer(connection, await take(connection, 2), FAILED)
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        refused = await finish(connection, await begin(connection, batch_id))
        assert (refused.state, refused.requeued) == ("failed", 0)
        assert refused.error == "3 rows were never run: the job was cancelled before."
        doing = await begin(connection, batch_id, Wish(["failed"], 50, afresh=True, unrun=True))
        assert (await finish(connection, doing)).requeued == 5
        leases = await take(connection)
        assert ordinals(leases) == [0, 1, 2]
        await answer(connection, leases)
        await answer(connection, await take(connection))
        assert await finish_batch(connection, batch_id)
        assert settled(await read(connection, batch_id)) == (5, 0, 0, 0)

    with_connection(database_18, body)


def test_rows_that_waited_for_a_retry_when_the_job_was_cancelled(database: str) -> None:
    """They keep their room. It is theirs to run in once the job is open again, and the operation goes on after them."""

    async def body(connection: Connection) -> None:
        batch_id = await make_batch(connection, [5], width=3)
        await answer(connection, await take(connection, 1), FAILED)
        waiting = await take(connection)
        assert ordinals(waiting) == [1, 2, 3]
        await defer(connection, waiting, delay_s=0)
        assert await cancel_batch(connection, batch_id)
        assert await finish_batch(connection, batch_id)
        assert await busy(connection) == 3
        doing = await begin(connection, batch_id, Wish(["failed"], 50, afresh=True, unrun=True))
        assert await reprocess.do_step(connection, doing, WORKER) is Step.MOVED  # those that were never run are counted
        await find_no_room(connection, doing)
        assert (await read(connection, batch_id)).state is BatchState.IN_PROGRESS
        leases = await take(connection)
        assert ordinals(leases) == [1, 2, 3]
        await answer(connection, leases)
        assert (await finish(connection, doing)).requeued == 5
        await answer(connection, await take(connection))
        assert await finish_batch(connection, batch_id)
        assert settled(await read(connection, batch_id)) == (5, 0, 0, 0)

    with_connection(database, body)


def test_a_deleted_job_ends_its_operation(database_18: str) -> None:
    async def body(connection: Connection) -> None:
        batch_id = await mixed(connection)
        doing = await begin(connection, batch_id)
        assert await erase.delete_batch(connection, batch_id, None)
        assert await reprocess.do_step(connection, doing, WORKER) is Step.ENDED
        assert (await operation_of(connection, doing)).state == "cancelled"

    with_connection(database_18, body)
