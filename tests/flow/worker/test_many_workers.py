"""Many worker processes on one batch: nothing is dispatched twice without a reason on record, and the books agree."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.support.cli import (
    ask,
    calls_by_key,
    check_agreement,
    check_answers,
    finish,
    ids_of,
    start_cli,
    write_requests,
)
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.wait import wait_until

LINES = 1_500
# A tenth of the calls fails, each input until it succeeds; small claims, so that the workers meet often.
BEHAVIOUR = ("--latency", "2ms..10ms", "--error-rate", "8%", "--drop-rate", "2%")
SETTINGS = (
    *("--set", "retry_base_s=0.01"),
    *("--set", "max_attempts=30"),
    *("--set", "claim_min=1"),
    *("--set", "claim_max=50"),
    *("--concurrency", "8"),
)


def check_calls(connection: psycopg.Connection, mock: MockProcess) -> None:
    """Each input was called once, and once more for every attempt on record as failed."""
    retries: Counter[str] = Counter(
        dict(
            connection.execute(
                """
                SELECT replace(n.batch_id::text, '-', '') || '-' || o.line, count(*)::int4
                  FROM penstock.attempts a
                  JOIN penstock.outcomes o USING (lane_id, ordinal)
                  JOIN penstock.lanes n ON n.id = a.lane_id
                 GROUP BY 1
                """
            ).fetchall()
        )
    )
    calls = calls_by_key(mock)
    assert len(calls) == LINES
    assert sum(retries.values()) > 0, "the upstream was meant to fail now and then"
    unexplained = {key: record for key, record in calls.items() if record["calls"] != 1 + retries[key]}
    assert not unexplained
    assert all(record["statuses"]["200"] == 1 for record in calls.values())


def check_books(connection: psycopg.Connection) -> None:
    check_agreement(connection)
    assert ask(connection, "SELECT count(*) FROM penstock.batches") == 1
    files = connection.execute("SELECT kind FROM penstock.files ORDER BY kind").fetchall()
    assert files == [("input",), ("output",)], "the input is stored once, and the answers are one file"
    assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0
    assert ask(connection, "SELECT count(*) FROM penstock.deferrals") == 0
    assert ask(connection, "SELECT count(*) FROM penstock.workers") == 0
    retried = ask(connection, "SELECT retried FROM penstock.batches")
    assert retried == ask(connection, "SELECT count(*) FROM penstock.attempts")


@pytest.mark.parametrize(
    ("server", "workers"), [("15", 2), ("18", 8), pytest.param("18", 4, marks=pytest.mark.again)], indirect=["server"]
)
def test_workers_of_one_command(tmp_path: Path, database: str, workers: int) -> None:
    source = write_requests(tmp_path / "requests.jsonl", LINES, models=("a", "b", "c"))
    with start_mock_process(*BEHAVIOUR) as mock, psycopg.connect(database, autocommit=True) as connection:
        command = ("run", source, "--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", database)
        with start_cli(*command, *SETTINGS, "--workers", str(workers), "--json", cwd=tmp_path) as process:
            wait_until(lambda: ask(connection, "SELECT count(*) FROM penstock.outcomes") > 0, 60)
            check_agreement(connection)  # in the middle as well
            ended = finish(process).expect(0)
        answers = check_answers(tmp_path / "answers.jsonl", ids_of(LINES))
        assert len(answers.good) == ended.summary["completed"] == LINES
        check_calls(connection, mock)
        check_books(connection)
        assert ended.summary["retried"] == ask(connection, "SELECT count(*) FROM penstock.attempts")


def test_one_command_started_several_times_at_once(tmp_path: Path, database_18: str) -> None:
    database = database_18
    source = write_requests(tmp_path / "requests.jsonl", LINES, models=("a", "b"))
    with start_mock_process(*BEHAVIOUR) as mock, ExitStack() as stack:
        command = ("run", source, "--base-url", mock.base_url, "-o", "answers.jsonl", "--database-url", database)
        processes = [
            stack.enter_context(start_cli(*command, *SETTINGS, "--workers", workers, "--json", cwd=tmp_path))
            for workers in ("1", "1", "2")
        ]
        ends = [finish(process).expect(0).summary for process in processes]
        check_answers(tmp_path / "answers.jsonl", ids_of(LINES))
        assert len({end["batch"] for end in ends}) == 1
        assert {end["completed"] for end in ends} == {LINES}
        with psycopg.connect(database) as connection:
            check_calls(connection, mock)
            check_books(connection)
