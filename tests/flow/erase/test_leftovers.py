"""Leftovers of jobs whose erasure was finished by a server that knows nothing of jobs."""

from __future__ import annotations

import hashlib
from uuid import UUID

import pytest

from penstock.blobs.blobs import NewUse, Place, run_steps, store_images
from penstock.db.pool import Connection
from penstock.erase import leftovers
from penstock.erase.leftovers import LeftoverWalk
from tests.support.db import one, with_connection
from tests.support.row_jobs import make_job

OF_JOBS = (
    *("jobs", "job_columns", "job_errors", "operations", "row_keys", "blobs", "blob_bytes", "blob_uses"),
    *("files", "file_lanes", "samples"),
)
_FILL = (
    "INSERT INTO penstock.job_columns (batch_id, name) SELECT %(batch)s, n FROM generate_series(1, 3) AS n",
    "INSERT INTO penstock.job_errors (batch_id, fingerprint, count)"
    " SELECT %(batch)s, n, 1 FROM generate_series(1, 9) AS n",
    "INSERT INTO penstock.operations (id, batch_id, kind, wish, created_at)"
    " VALUES (gen_random_uuid(), %(batch)s, 'reprocess', '{}', now())",
    "INSERT INTO penstock.samples (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried, refused,"
    "  input_tokens, output_tokens, latency)"
    " SELECT %(batch)s, 60, to_timestamp(60 * n), 1, 0, 0, 0, 0, 0, 0, 0, '{}' FROM generate_series(1, 5) AS n",
    "INSERT INTO penstock.row_keys SELECT %(source)s, n, n FROM generate_series(1, 9) AS n",
)
_GONE = (
    "DELETE FROM penstock.lanes WHERE batch_id = %(batch)s",
    "DELETE FROM penstock.batches WHERE id = %(batch)s",
    "DELETE FROM penstock.templates WHERE source_id = %(source)s",
)
_FILE_GONE = (
    "DELETE FROM penstock.file_lanes WHERE source_id = %(source)s",
    "DELETE FROM penstock.files WHERE source_id = %(source)s",
)


async def make_full_job(connection: Connection, number: int) -> dict[str, UUID | int]:
    batch_id, _ = await make_job(connection, 3)
    (source,) = await one(
        connection, "SELECT source_id FROM penstock.lanes WHERE batch_id = %(batch)s", {"batch": batch_id}
    )
    job: dict[str, UUID | int] = {"batch": batch_id, "source": source}
    for statement in _FILL:
        await connection.execute(statement.encode(), job)
    images = [b"shared", b"own %d" % number]
    uses = [NewUse(ordinal, hashlib.sha256(data).digest(), data) for ordinal, data in enumerate(images)]
    async with connection.transaction():
        await run_steps(connection, store_images("ann", Place(source, 0), uses))
    return job


async def counts(connection: Connection) -> dict[str, int]:
    return {name: (await one(connection, f"SELECT count(*) FROM penstock.{name}"))[0] for name in OF_JOBS}


@pytest.mark.parametrize("page", [1, 2, 200])
def test_leftovers_go_and_nothing_else(database: str, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    monkeypatch.setattr(leftovers, "_PAGE", page)

    async def body(connection: Connection) -> None:
        walk = LeftoverWalk()
        await make_full_job(connection, 0)
        kept = await counts(connection)
        jobs = [await make_full_job(connection, number) for number in range(1, 5)]
        whole = await counts(connection)
        for _ in range(20):
            assert await walk.step(connection, 2) == 0
        assert await counts(connection) == whole
        for number, job in enumerate(jobs):
            for statement in (*_GONE, *(_FILE_GONE if number else ())):
                await connection.execute(statement.encode(), job)
        # Of the first one, the upload was not known to belong to the job.
        await connection.execute("UPDATE penstock.files SET deleted_at = now() WHERE source_id = %(source)s", jobs[0])
        await connection.execute(
            "INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at)"
            " VALUES (gen_random_uuid(), 'ann', 'batch', %(batch)s, now())",
            jobs[0],
        )
        for _ in range(20):
            await walk.step(connection, 2)
        assert (await counts(connection))["files"] == 2, "its erasure is under way"
        await connection.execute("UPDATE penstock.erasures SET finished_at = now()")
        for _ in range(20):
            await walk.step(connection, 2)
        assert await counts(connection) == kept

    with_connection(database, body)
