"""Who reads a job's rows: one process at a time, and the same again after an error."""

from __future__ import annotations

from uuid import UUID, uuid4

from penstock.batches import reprocess
from penstock.batches.finish import finish_batch
from penstock.batches.growth import create_growing_batch
from penstock.batches.jobs import end_ingest, insert_job, take_ingest
from penstock.batches.reprocess import Step, Wish
from penstock.batches.steer import cancel_batch
from penstock.db.pool import Connection
from tests.support.db import one, with_connection

GRACE_S = 30.0


async def make_job(connection: Connection) -> UUID:
    batch_id = await create_growing_batch(connection, owner="alice", pool="p", filename="rows.csv")
    await insert_job(connection, batch_id, owner="alice", job_type="job", spec={"route": "r"}, client="")
    return batch_id


async def start_worker(connection: Connection) -> UUID:
    worker_id = uuid4()
    await connection.execute(
        "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
        " VALUES (%s, 'serve', 'h', 'm', 1, 0, now(), now())",
        [worker_id],
    )
    return worker_id


async def take(connection: Connection, worker_id: UUID) -> UUID | None:
    ingest = await take_ingest(connection, worker_id, GRACE_S)
    return None if ingest is None else ingest.batch_id


def test_a_job_is_read_by_one_process_at_a_time(database: str) -> None:
    async def body(connection: Connection) -> None:
        first, second = await start_worker(connection), await start_worker(connection)
        job = await make_job(connection)
        assert await take(connection, first) == job
        assert await take(connection, second) is None
        await connection.execute("UPDATE penstock.workers SET heartbeat_at = now() - interval '1 hour'")
        assert await take(connection, second) == job
        assert not await end_ingest(connection, job, first, 0, []), "the second reads it now"

    with_connection(database, body)


def test_what_an_error_broke_off_is_read_again_after_the_others(database: str) -> None:
    async def body(connection: Connection) -> None:
        worker = await start_worker(connection)
        broken, other = await make_job(connection), await make_job(connection)
        assert await take(connection, worker) == broken
        assert await take(connection, worker) == other
        assert await end_ingest(connection, other, worker, 0, [])
        assert await take(connection, worker) == broken
        assert await end_ingest(connection, broken, worker, 0, [])
        assert await take(connection, worker) is None

    with_connection(database, body)


async def reopen(connection: Connection, job: UUID, worker: UUID) -> None:
    await reprocess.start(connection, job, Wish(["failed"], 50, unrun=True))
    doing = await reprocess.take(connection, worker, GRACE_S)
    assert doing is not None
    assert await reprocess.do_step(connection, doing, worker) is Step.ENDED
    assert await one(connection, "SELECT state::text FROM penstock.batches") == ("in_progress",)


def test_a_job_that_is_reopened_is_read_on(database: str) -> None:
    """Cancelled while its rows were read. Whether the ingest noticed before or after the job was open again."""

    async def body(connection: Connection) -> None:
        worker = await start_worker(connection)
        job = await make_job(connection)
        assert await take(connection, worker) == job
        for noticed in (True, False):
            assert await cancel_batch(connection, job)
            assert await finish_batch(connection, job)
            if noticed:
                assert await end_ingest(connection, job, worker, 0, [], broken_off=True)
                assert await take(connection, worker) is None
            await reopen(connection, job, worker)
            if not noticed:
                assert not await end_ingest(connection, job, worker, 0, [], broken_off=True)
            assert await take(connection, worker) == job

    with_connection(database, body)
