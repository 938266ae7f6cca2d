"""A database of the eager layout becomes files, batches and lanes; nothing is lost, nothing deleted is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from penstock.export.follow import read_journal_page
from tests.support.cli import run_cli
from tests.support.db import pooled
from tests.support.eager import Eager, digest_of, eager_database, expected_results
from tests.support.moving import bring, check_results, check_whole

LINES = 40


@dataclass(frozen=True, slots=True)
class Moved:
    """A source, and a database that it was brought to."""

    eager: Eager
    database: str
    report: dict[str, Any]
    cwd: Path
    digest: str
    """Of the source, before."""

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            return connection.execute(query.encode(), parameters or None).fetchall()


@pytest.fixture(scope="module")
def moved(server_18: str, shared_database_18: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moved]:
    cwd = tmp_path_factory.mktemp("moved")
    with eager_database(server_18, batches=20, lines=LINES) as eager:
        digest = eager.digest()
        done = bring(eager, shared_database_18, cwd, "--verify").expect(0)
        yield Moved(eager, shared_database_18, done.summary, cwd, digest)


def test_everything_adds_up_and_the_source_is_as_it_was(moved: Moved) -> None:
    check_whole(moved.database)
    assert moved.eager.digest() == moved.digest
    assert moved.report["differences"] == []
    assert moved.report["verified"]["batches"] == 18


def test_the_report_tells_what_was_and_what_is(moved: Moved) -> None:
    totals = moved.report["totals"]
    counted = moved.eager.rows(
        "SELECT state, count(*) FROM requests r JOIN batches b ON b.id = r.batch_id"
        " WHERE b.deleted_at IS NULL GROUP BY state"
    )
    assert totals["before"] == dict(counted)
    assert totals["after"]["completed"] == totals["before"]["completed"]
    assert totals["after"]["failed"] == totals["before"]["failed"]
    by_result = moved.rows("SELECT state::text, count(*) FROM penstock.outcomes GROUP BY 1")
    assert {name: totals["after"][name] for name in ("completed", "failed", "skipped")} == dict(by_result)
    left = {each["what"]: each["count"] for each in moved.report["left_behind"]}
    assert left["deleted batches"] == 2
    assert left["requests of deleted batches"] == 2 * LINES
    assert left["requests outside batches"] == 3
    assert left["deleted files"] == 1
    assert left["requests to be run whose input is gone"] > 0
    notes = {each["what"]: each["count"] for each in moved.report["notes"]}
    assert any("API keys" in what for what in notes)
    assert notes["lines without a custom id, now named after their number"] > 0
    assert (
        totals["answer_bytes"]
        == moved.eager.rows(
            "SELECT sum(octet_length(response_body)) FROM requests r JOIN batches b ON b.id = r.batch_id"
            " WHERE b.deleted_at IS NULL"
        )[0][0]
    )


def test_lines_are_stored_once_in_order_byte_for_byte(moved: Moved) -> None:
    files = moved.eager.rows(
        "SELECT id FROM files WHERE purpose = 'batch' AND deleted_at IS NULL"
        " AND EXISTS (SELECT FROM request_templates t WHERE t.file_id = files.id)"
    )
    assert len(files) == 13
    for (file_id,) in files:
        stored = moved.rows(
            "SELECT t.body, t.custom_id, l.route, l.endpoint, t.line FROM penstock.files f"
            " JOIN penstock.templates t USING (source_id) JOIN penstock.file_lanes l USING (source_id, source_lane)"
            " WHERE f.id = %s ORDER BY t.line",
            file_id,
        )
        old = moved.eager.rows(
            "SELECT convert_to(body, 'UTF8'), custom_id, model, path, line_number FROM request_templates"
            " WHERE file_id = %s ORDER BY line_number",
            file_id,
        )
        shift = max(0, 1 - old[0][4])
        assert stored == [(b, c or f"line-{n + shift}", m, p, n + shift) for b, c, m, p, n in old]
    ids = moved.rows("SELECT id FROM penstock.files WHERE kind = 'input'")
    assert sorted(ids) == sorted(files)


def test_results_are_to_the_byte_what_the_old_rows_say(moved: Moved) -> None:
    ended = ("completed", "shared", "cancelled", "failed", "without_file")
    assert check_results(moved.eager, moved.database, ended) == 10


def test_batches_keep_owner_times_metadata_window_state_and_ids(moved: Moved) -> None:
    columns = "id, file_id, endpoint, completion_window, metadata ->> 'kind', created_at"
    old = moved.eager.rows(
        f"SELECT {columns}, coalesce(created_by, 'local'), expires_at, completed_at, failed_at, output_file_id,"
        " error_file_id FROM batches WHERE deleted_at IS NULL AND metadata ->> 'kind' NOT IN ('without_file', 'failed')"
        " ORDER BY id"
    )
    new = moved.rows(
        f"SELECT {columns}, owner, nullif(deadline, 'infinity'), completed_at, failed_at, output_file_id, error_file_id"
        " FROM penstock.batches WHERE metadata ->> 'kind' NOT IN ('without_file', 'failed') ORDER BY id"
    )
    assert new == old
    states = dict(
        moved.rows("SELECT metadata ->> 'kind', string_agg(DISTINCT state, ' ') FROM penstock.batches GROUP BY 1")
    )
    assert states == {
        "completed": "completed",
        "shared": "completed",
        "halfway": "in_progress",
        "scattered": "in_progress",
        "untouched": "in_progress",
        "cancelled": "cancelled",
        "cancelling": "cancelling",
        "failed": "failed",
        "without_file": "cancelled completed",
    }


def test_attempts_are_counted_and_failures_are_history(moved: Moved) -> None:
    old = moved.eager.rows(
        "SELECT sum(retry_attempt + 1), count(*) FROM requests r JOIN batches b ON b.id = r.batch_id"
        " WHERE b.deleted_at IS NULL AND state IN ('completed', 'failed')"
    )
    assert moved.rows("SELECT sum(attempts), count(*) FROM penstock.outcomes WHERE state <> 'skipped'") == old
    assert moved.rows("SELECT count(*) FROM penstock.attempts") == moved.rows(
        "SELECT count(*) FROM penstock.outcomes WHERE state = 'failed'"
    )


def test_an_old_id_finds_its_batch(moved: Moved) -> None:
    (batch_id,) = moved.eager.batches("untouched")[:1]
    for text in (str(batch_id), f"batch_{batch_id.hex}", f"batch_{batch_id}"):
        shown = run_cli("show", text, "--json", "--database-url", moved.database, cwd=moved.cwd).expect(0)
        assert shown.summary["id"] == f"batch_{batch_id.hex}"


def test_followers_of_a_running_batch_read_what_was_answered_before(moved: Moved) -> None:
    for batch_id in (*moved.eager.batches("halfway"), *moved.eager.batches("scattered")):
        followed = asyncio.run(_followed(moved.database, batch_id))
        expected = expected_results(moved.eager, batch_id)[0].splitlines(keepends=True)
        assert sorted(followed) == sorted(expected)


async def _followed(database: str, batch_id: UUID) -> list[bytes]:
    lines: list[bytes] = []
    offset = 0
    async with pooled(database) as pool:
        while (page := await read_journal_page(pool, batch_id, "output", offset, 10_000)).lines:
            lines += page.lines
            offset = page.after
    return lines


def test_again_it_brings_nothing(moved: Moved) -> None:
    before = digest_of(moved.database, "penstock")
    again = bring(moved.eager, moved.database, moved.cwd).expect(0).summary
    assert again["totals"]["batches"] == {"already here": 18}
    assert again["totals"]["before"] == moved.report["totals"]["before"]
    assert again["totals"]["after"] == moved.report["totals"]["after"]
    assert digest_of(moved.database, "penstock") == before


def test_a_difference_is_told_with_its_id(moved: Moved, database_18: str, tmp_path: Path) -> None:
    (batch_id,) = moved.eager.batches("completed")[:1]
    bring(moved.eager, database_18, tmp_path, "--only", str(batch_id)).expect(0)
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute(
            "UPDATE penstock.outcomes SET response = response || ' ' WHERE (lane_id, ordinal) ="
            " (SELECT lane_id, ordinal FROM penstock.outcomes WHERE response IS NOT NULL ORDER BY line LIMIT 1)"
        )
        ((line,),) = connection.execute(
            "SELECT line FROM penstock.outcomes WHERE response IS NOT NULL ORDER BY line LIMIT 1"
        ).fetchall()
        connection.execute("DELETE FROM penstock.outcomes WHERE line = (SELECT max(line) FROM penstock.outcomes)")
    done = bring(moved.eager, database_18, tmp_path, "--only", str(batch_id), "--verify").expect(1)
    told = " ".join(done.summary["differences"])
    assert f"batch_req_{batch_id.hex}_{line}: differs from the answer of request" in told
    assert "is not here" in told


def test_a_dry_run_changes_nothing_and_foresees_what_comes(moved: Moved, database_18: str, tmp_path: Path) -> None:
    before = digest_of(database_18, "penstock")
    done = bring(moved.eager, database_18, tmp_path, "--dry-run").expect(0)
    assert (digest_of(database_18, "penstock"), moved.eager.digest()) == (before, moved.digest)
    assert done.summary["dry_run"] is True
    assert done.summary["totals"]["before"] == moved.report["totals"]["before"]
    foreseen = {each["what"]: each["count"] for each in done.summary["left_behind"]}
    brought = {each["what"]: each["count"] for each in moved.report["left_behind"]}
    assert foreseen.items() <= brought.items()
