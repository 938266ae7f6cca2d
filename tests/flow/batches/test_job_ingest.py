"""Who reads a job's rows: one process at a time, and the same again after an error."""

from __future__ import annotations

from uuid import UUID, uuid4

from penstock.batches.growth import create_growing_batch
from penstock.batches.jobs import end_ingest, insert_job, take_ingest
from penstock.db.pool import Connection
from tests.support.db import with_connection

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
