"""An import that is killed goes on; one that is run later brings what came since; and the way back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest

from penstock.db.pool import Connection
from penstock.dispatch.providers import DEFAULT_NAME
from penstock.model import Outcome, OutcomeState
from penstock.pools import batch_pool
from penstock.settle.write import Changes, settle
from tests.support.cli import ask, start_cli
from tests.support.db import with_connection
from tests.support.eager import Eager, eager_database
from tests.support.engine import claim_due
from tests.support.moving import bring, check_results, check_whole, hand_back
from tests.support.wait import wait_until

LINES = 30

# A file and a batch over it as if they had been made here: those of an imported batch under another id.
_MADE_HERE = """
CREATE TEMP TABLE made AS
SELECT f.* FROM penstock.files f JOIN penstock.batches b ON b.file_id = f.id WHERE b.id = 'HALF';
CREATE TEMP TABLE lanes AS SELECT l.* FROM penstock.file_lanes l JOIN made USING (source_id);
CREATE TEMP TABLE lines AS SELECT t.* FROM penstock.templates t JOIN made USING (source_id);
UPDATE made SET id = md5('made here')::uuid, source_id = 900001;
UPDATE lanes SET source_id = 900001;
UPDATE lines SET source_id = 900001;
INSERT INTO penstock.files OVERRIDING SYSTEM VALUE SELECT * FROM made;
INSERT INTO penstock.file_lanes SELECT * FROM lanes;
INSERT INTO penstock.templates SELECT * FROM lines;
INSERT INTO penstock.batches
  (id, owner, file_id, pool, dialect, endpoint, completion_window, total, created_at, validated_at)
SELECT md5('made here')::uuid, owner, md5('made here')::uuid, 'serve', 'openai', endpoint, '24h', total, now(), now()
  FROM penstock.batches WHERE id = 'HALF';
"""


@pytest.fixture
def eager(server_18: str) -> Iterator[Eager]:
    with eager_database(server_18, batches=10, lines=LINES) as made:
        yield made


def work(database: str, limit: int, pool: str = batch_pool(DEFAULT_NAME)) -> int:
    """Answer so many requests of what is due, as a worker would. Every third fails."""

    async def answer(connection: Connection) -> int:
        worker = uuid4()
        leases = await claim_due(connection, pool=pool, wants={"small": limit, "large": limit}, worker_id=worker)
        done = 0
        for lease in leases:
            changes = Changes()
            for start, stop in lease.ranges:
                for ordinal in range(start, stop):
                    state = OutcomeState.FAILED if ordinal % 3 == 0 else OutcomeState.COMPLETED
                    row = await (
                        await connection.execute(
                            "SELECT line, custom_id FROM penstock.templates"
                            " WHERE source_id = %s AND source_lane = %s AND ordinal = %s",
                            (lease.source_id, lease.source_lane, ordinal),
                        )
                    ).fetchone()
                    assert row is not None
                    body = b'{"by":"penstock"}' if state is OutcomeState.COMPLETED else None
                    outcome = Outcome(state, body, 200 if body else None, error_message=None if body else "no")
                    changes.outcomes.append((lease, ordinal, row[0], row[1], outcome))
                    done += 1
            await settle(connection, worker, changes)
        return done

    return with_connection(database, answer)


def until(database: str, query: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        wait_until(lambda: ask(connection, query) > 0, 60)


def test_killed_twice_it_goes_on_where_it_was(eager: Eager, database_18: str, tmp_path: Path) -> None:
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION penstock.wait() RETURNS trigger LANGUAGE plpgsql"
            " AS $$ BEGIN PERFORM pg_sleep(0.3); RETURN NULL; END $$"
        )
        for table in ("templates", "outcomes"):
            connection.execute(
                f"CREATE TRIGGER slow AFTER INSERT ON penstock.{table} EXECUTE FUNCTION penstock.wait()".encode()
            )
    command = ("import", "--from", eager.conninfo, "--database-url", database_18, "--json")
    for kind in ("file", "batch"):
        with start_cli(*command, cwd=tmp_path) as process:
            until(database_18, f"SELECT (count(*) >= 2)::int FROM penstock.imports WHERE kind = '{kind}'")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    with psycopg.connect(database_18, autocommit=True) as connection:
        before = ask(connection, "SELECT count(*) FROM penstock.imports")
        for table in ("templates", "outcomes"):
            connection.execute(f"DROP TRIGGER slow ON penstock.{table}".encode())
    done = bring(eager, database_18, tmp_path, "--verify").expect(0).summary
    assert 4 <= before < 16
    assert done["totals"]["batches"].keys() == {"already here", "imported"}
    assert sum(done["totals"]["batches"].values()) == 9
    check_whole(database_18)
    check_results(eager, database_18, ("completed", "shared", "cancelled", "failed", "without_file"))


def test_what_came_since_is_brought(eager: Eager, database_18: str, tmp_path: Path) -> None:
    bring(eager, database_18, tmp_path).expect(0)
    (half,) = eager.batches("halfway")
    eager.run(
        f"UPDATE requests SET state = 'completed', response_status = 200, response_body = '{{\"late\":1}}',"
        f" completed_at = now() - interval '1 hour' WHERE batch_id = '{half}' AND state IN ('claimed', 'processing')",
        "INSERT INTO batches (id, file_id, endpoint, completion_window, metadata, created_by, total_requests)"
        f" SELECT md5('late')::uuid, file_id, endpoint, '1h', '{{\"kind\":\"late\"}}', created_by, 1 FROM batches"
        f" WHERE id = '{half}'",
    )
    again = bring(eager, database_18, tmp_path, "--verify").expect(0).summary
    assert again["totals"]["batches"] == {"already here": 8, "imported again": 1, "imported": 1}
    check_whole(database_18)
    assert again["totals"]["after"]["completed"] == again["totals"]["before"]["completed"]


def test_what_penstock_has_worked_on_stays(eager: Eager, database_18: str, tmp_path: Path) -> None:
    bring(eager, database_18, tmp_path).expect(0)
    done = work(database_18, 500)
    assert done > LINES
    (half,) = eager.batches("halfway")
    eager.run(f"UPDATE requests SET state = 'canceled' WHERE batch_id = '{half}' AND state = 'claimed'")
    again = bring(eager, database_18, tmp_path, "--verify").expect(1).summary
    assert [each["result"] for each in again["batches"] if each["id"] == f"batch_{half.hex}"] == ["conflict"]
    assert any(half.hex in told for told in again["differences"])
    check_whole(database_18)


def answered_here(database: str, batch_id: UUID) -> dict[str, int]:
    with psycopg.connect(database, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT CASE WHEN o.state = 'completed' THEN 'completed' ELSE 'failed' END, count(*)"
            " FROM penstock.outcomes o JOIN penstock.lanes l ON l.id = o.lane_id"
            " WHERE l.batch_id = %s AND o.state <> 'skipped' GROUP BY 1",
            (batch_id,),
        ).fetchall()
    return dict(rows)


def test_back_after_some_of_the_rest_was_done(eager: Eager, database_18: str, tmp_path: Path) -> None:
    bring(eager, database_18, tmp_path).expect(0)
    ended = {kind: eager.states(eager.batches(kind)[0]) for kind in ("completed", "shared", "cancelled", "failed")}
    unanswered = eager.unanswered()
    done = work(database_18, 15)
    assert 0 < done < unanswered
    rehearsed = eager.digest()
    hand_back(eager, database_18, tmp_path, "--dry-run").expect(0)
    assert eager.digest() == rehearsed
    report = hand_back(eager, database_18, tmp_path).expect(0).summary
    assert report["totals"]["batches"] == {"handed back": 4}
    for kind in ("halfway", "scattered", "untouched"):
        (batch_id,) = eager.batches(kind)
        states = eager.states(batch_id)
        assert {name: states.get(name, 0) for name in ("completed", "failed")} == {
            "completed": 0,
            "failed": 0,
            **answered_here(database_18, batch_id),
        }
        assert states.keys() <= {"completed", "failed", "pending", "canceled"}
        assert eager.pending().get(batch_id, 0) == states.get("pending", 0)
    assert sum(eager.pending().values()) == eager.unanswered() == unanswered - done
    assert {kind: eager.states(eager.batches(kind)[0]) for kind in ended} == ended
    # Nothing that was answered here is pending there, and its answer is the one that was given.
    assert eager.rows(
        "SELECT count(*) FROM requests WHERE response_body = '{\"by\":\"penstock\"}' AND state <> 'completed'"
    ) == [(0,)]
    assert work(database_18, 500) == 0, "handed back, and still claimed"
    again = hand_back(eager, database_18, tmp_path).expect(0).summary
    assert again["totals"]["before"] == again["totals"]["after"]
    # And in again: the old system's word is taken for everything.
    returned = bring(eager, database_18, tmp_path, "--verify", "--workers-stopped").expect(0).summary
    assert returned["totals"]["batches"]["imported again"] == 4
    check_whole(database_18)
    # A request whose input is gone can be run by neither.
    ((without_input,),) = eager.rows(
        "SELECT count(*) FROM requests WHERE state = 'pending' AND template_id IS NULL AND batch_id IS NOT NULL"
    )
    assert sum(iter(lambda: work(database_18, 500), 0)) == unanswered - done - without_input > 0


def test_back_with_what_was_made_here_and_what_the_old_system_has_purged(
    eager: Eager, database_18: str, tmp_path: Path
) -> None:
    bring(eager, database_18, tmp_path).expect(0)
    (half,), (untouched,) = eager.batches("halfway"), eager.batches("untouched")
    pending = eager.pending()
    eager.run(f"DELETE FROM requests WHERE batch_id = '{untouched}'")
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute(_MADE_HERE.encode().replace(b"HALF", str(half).encode()))
    hand_back(eager, database_18, tmp_path).refuses(2, "was made here", "--base-url")
    hand_back(eager, database_18, tmp_path, "--base-url", "https://old.example/v1").expect(0)
    ((made,),) = eager.rows("SELECT md5('made here')::uuid")
    assert eager.states(untouched) == {"pending": pending[untouched]}
    assert eager.states(made) == {"pending": LINES}
    lines = "SELECT body, model, path FROM request_templates WHERE file_id = %s ORDER BY line_number"
    ((file_id,),) = eager.rows("SELECT file_id FROM batches WHERE id = %s", half)
    assert eager.rows(lines, made) == eager.rows(lines, file_id)


def test_back_is_refused_while_workers_are_at_work(eager: Eager, database_18: str, tmp_path: Path) -> None:
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
            " VALUES (gen_random_uuid(), 'serve:default', 'here', 'here', 1, 0, now(), now())"
        )
    hand_back(eager, database_18, tmp_path).refuses(1, "processes of Penstock are at work", "Stop the servers")
