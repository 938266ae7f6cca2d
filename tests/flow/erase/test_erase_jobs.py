"""Deleting jobs: with the upload and everything that was made of it, in one commit."""

from __future__ import annotations

from penstock.batches.read import get_batch
from penstock.db.pool import Connection
from penstock.erase import erase
from penstock.erase import purge as erase_purge
from penstock.model import Outcome, OutcomeState
from tests.support.db import one, with_connection
from tests.support.row_jobs import claim_rows, make_job, make_worker, settle_rows

FAILED = Outcome(OutcomeState.FAILED, error_code="sold_out", error_message="sold out")
TABLES = (
    *("files", "file_lanes", "file_chunks", "templates", "row_keys", "batches", "lanes", "leases", "deferrals"),
    *("outcomes", "attempts", "reclaims", "progress", "journal", "samples", "erasure_pieces"),
    *("jobs", "job_columns", "job_errors", "operations"),
)


async def purge(connection: Connection) -> None:
    while await erase_purge.purge_step(connection, 1_000):
        pass


async def left_of_jobs(connection: Connection) -> dict[str, int]:
    counts = {name: (await one(connection, f"SELECT count(*) FROM penstock.{name}"))[0] for name in TABLES}
    return {name: count for name, count in counts.items() if count}


async def make_worked_job(connection: Connection) -> None:
    """A job with an upload, results, errors and rows in flight."""
    await make_job(connection, 10)
    await connection.execute("UPDATE penstock.files SET chunks = 1")
    await connection.execute("INSERT INTO penstock.file_chunks SELECT source_id, 0, 1, 'x' FROM penstock.files")
    worker = await make_worker(connection)
    await settle_rows(connection, worker, await claim_rows(connection, worker, 4), lambda _: FAILED)
    await claim_rows(connection, worker, 2)
    await connection.execute(
        "INSERT INTO penstock.samples (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried,"
        "  refused, input_tokens, output_tokens, latency)"
        " SELECT id, 1, to_timestamp(n), 1, 0, 0, 0, 0, 0, 0, 0, '{}' FROM penstock.batches, generate_series(1, 9) AS n"
    )


def test_the_deletion_of_a_job_takes_its_upload_along(database: str) -> None:
    """One call, so one commit: a server that dies after it has nothing left to do."""

    async def body(connection: Connection) -> None:
        await make_worked_job(connection)
        batch_id, file_id = await one(connection, "SELECT id, file_id FROM penstock.batches")
        assert not await erase.delete_batch(connection, batch_id, "somebody else")
        assert await erase.delete_batch(connection, batch_id, "ann")
        assert await get_batch(connection, batch_id, None) is None
        assert not await erase.delete_file(connection, file_id, "ann"), "it is gone already"
        await purge(connection)
        assert await left_of_jobs(connection) == {}
        (report,) = await erase_purge.list_erasures(connection, "ann")
        assert (report.kind, report.object_id, report.finished_at is not None) == ("batch", batch_id, True)
        assert (report.templates, report.chunks, report.outcomes) == (10, 1, 4)

    with_connection(database, body)


def test_a_job_whose_upload_was_deleted_before_goes_too(database: str) -> None:
    async def body(connection: Connection) -> None:
        await make_worked_job(connection)
        batch_id, file_id = await one(connection, "SELECT id, file_id FROM penstock.batches")
        assert await erase.delete_file(connection, file_id, "ann")
        batch = await get_batch(connection, batch_id, "ann")
        assert batch is not None
        assert (batch.state, batch.counts.failed) == ("cancelled", 4), "its results stay"
        assert await erase.delete_batch(connection, batch_id, "ann")
        await purge(connection)
        assert await left_of_jobs(connection) == {}

    with_connection(database, body)
