"""Runs that the release before stored are batches and jobs of this one."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import penstock.db
from penstock.batches.create import create_batch
from penstock.batches.finish import finish_batch
from penstock.batches.jobs import insert_job
from penstock.batches.read import find_batch_of_result, read_status
from penstock.db.pool import Connection
from penstock.model import OutcomeState
from tests.support.db import with_connection
from tests.support.engine import make_file
from tests.support.wishes import POOL, answer, take

STEP = (Path(penstock.db.__file__).parent / "migrations" / "0026_runs_pre.sql").read_text("utf-8")


def test_runs_get_result_files_and_those_over_tables_are_jobs(database: str) -> None:
    async def body(connection: Connection) -> None:
        ended = await make_run(connection, 2)
        await answer(connection, await take(connection, 1))
        await answer(connection, await take(connection, 1), OutcomeState.FAILED)
        assert await finish_batch(connection, ended)
        running, table = [await make_run(connection, n) for n in (3, 1)]
        await insert_job(connection, table, owner="local", job_type="t", spec={}, client="local", ingested=True)

        await connection.execute(STEP.split("-- When a batch had completed")[0].encode())

        for batch_id in (ended, running):
            batch = await read_status(connection, batch_id)
            assert batch.output_file_id is not None
            assert batch.error_file_id is not None
            for file_id, which in ((batch.output_file_id, "output"), (batch.error_file_id, "errors")):
                found = await find_batch_of_result(connection, file_id, "local")
                assert found is not None
                assert (found[0].id, found[1]) == (batch_id, which)
        assert (await read_status(connection, table)).dialect == "job"

    with_connection(database, body)


async def make_run(connection: Connection, lines: int) -> UUID:
    """A run as the release before made it."""
    file_id = await make_file(connection, [lines])
    batch_id = await create_batch(connection, file_id=file_id, owner="local", pool=POOL)
    await connection.execute("UPDATE penstock.batches SET pool = 'run:' || id WHERE id = %s", [batch_id])
    return batch_id
