"""Imported batches run to their end, and the upstream sees no call for anything that was answered."""

from __future__ import annotations

from pathlib import Path

import psycopg

from tests.support.cli import ask, calls_by_key
from tests.support.eager import eager_database
from tests.support.mock_process import start_mock_process
from tests.support.moving import bring, check_whole
from tests.support.server import served
from tests.support.wait import wait_until

UNFINISHED = "SELECT count(*) FROM penstock.batches WHERE completed IS NULL"

# Lines as Penstock numbers them: files that count from 0 begin at 1.
TO_BE_RUN = """
SELECT replace(b.id::text, '-', '') || '-' || t.line_number + greatest(0, 1 - f.first)
  FROM requests r
  JOIN batches b ON b.id = r.batch_id
  JOIN request_templates t ON t.id = r.template_id
  JOIN (SELECT file_id, min(line_number) AS first FROM request_templates GROUP BY 1) AS f ON f.file_id = t.file_id
 WHERE r.state IN ('pending', 'claimed', 'processing') AND b.cancelling_at IS NULL AND b.deleted_at IS NULL
"""


def test_unfinished_batches_run_to_their_end(server_18: str, database_18: str, tmp_path: Path) -> None:
    with eager_database(server_18, batches=10, lines=60) as eager, start_mock_process() as mock:
        bring(eager, database_18, tmp_path).expect(0)
        expected = {key for (key,) in eager.rows(TO_BE_RUN)}
        assert len(expected) > 60
        with (
            psycopg.connect(database_18, autocommit=True) as connection,
            served(tmp_path, "--base-url", mock.base_url, database=database_18),
        ):
            wait_until(lambda: ask(connection, UNFINISHED) == 0, 120)
        assert set(calls_by_key(mock)) == expected
        check_whole(database_18)
        done = bring(eager, database_18, tmp_path, "--verify").expect(0).summary
        assert done["totals"]["batches"] == {"already here": 9}
        states = {each["state"] for each in done["batches"]}
        assert states == {"completed", "cancelled", "failed"}
        assert done["totals"]["after"]["pending"] == 0
