from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.db import migrate as migrations
from penstock.db.migrate import Migration, migrate, read_standing
from penstock.errors import PenstockError
from tests.support.payload import PAYLOAD


@pytest.fixture
def empty(server: str) -> Iterator[str]:
    """A database that has never seen Penstock."""
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE never_seen")
        yield make_conninfo(server, dbname="never_seen")
        connection.execute("DROP DATABASE never_seen WITH (FORCE)")


def test_an_empty_database_becomes_ready_and_stays_so(empty: str) -> None:
    assert not read_standing(empty).ready
    assert [m.name for m in migrate(empty)] == [m.name for m in migrations.list_migrations()]
    assert read_standing(empty).ready
    assert migrate(empty) == []


def test_status_changes_nothing(empty: str) -> None:
    read_standing(empty)
    with psycopg.connect(empty) as connection:
        assert connection.execute("SELECT to_regnamespace('penstock')").fetchone() == (None,)


def test_a_user_who_owns_the_schema_needs_no_more(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("CREATE ROLE plain_user LOGIN")
        try:
            with pytest.raises(PenstockError, match="may not create the schema") as caught:
                migrate(make_conninfo(empty, user="plain_user"))
            assert caught.value.hint is not None
            connection.execute("CREATE SCHEMA penstock AUTHORIZATION plain_user")
            assert migrate(make_conninfo(empty, user="plain_user"))
        finally:
            connection.execute("DROP OWNED BY plain_user CASCADE")
            connection.execute("DROP ROLE plain_user")


def test_many_at_once_apply_each_migration_once(empty: str) -> None:
    with ThreadPoolExecutor(6) as threads:
        applied = list(threads.map(migrate, [empty] * 6))
    assert sorted(len(each) for each in applied) == [0] * 5 + [len(migrations.list_migrations())]


def test_a_changed_migration_is_refused(empty: str) -> None:
    migrate(empty)
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("UPDATE penstock.migrations SET checksum = 'other'")
    with pytest.raises(PenstockError, match="differs from the one this database ran"):
        migrate(empty)


def note_applied(conninfo: str, name: str) -> None:
    """As if a newer Penstock had run this migration."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("INSERT INTO penstock.migrations VALUES (9999, %s, 'x')", [name])


def test_old_code_goes_on_after_a_pre_step_it_does_not_know(empty: str) -> None:
    migrate(empty)
    note_applied(empty, "9999_future_pre")
    assert read_standing(empty).unknown == ["9999_future_pre"]
    assert read_standing(empty).ready
    assert migrate(empty) == []


def test_old_code_is_refused_after_a_post_step_it_does_not_know(empty: str) -> None:
    migrate(empty)
    note_applied(empty, "9999_future_post")
    assert not read_standing(empty).ready
    with pytest.raises(PenstockError, match="newer Penstock"):
        migrate(empty)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the migrations after ours: `steps(9000_words_pre="SELECT 1")`."""
    ours = migrations.list_migrations()

    def replace(**texts: str) -> None:
        more = [Migration(int(name[1:5]), name[1:], name.rsplit("_", 1)[1], text) for name, text in texts.items()]
        monkeypatch.setattr(migrations, "list_migrations", lambda: [*ours, *more])

    return replace


def names(applied: list[Migration]) -> list[str]:
    return [migration.name for migration in applied]


def test_post_steps_run_only_when_asked_for(empty: str, steps: Callable[..., None]) -> None:
    migrate(empty)
    steps(_9000_more_pre="SELECT 1", _9001_less_post="SELECT 1")
    assert names(migrate(empty)) == ["9000_more_pre"]
    assert read_standing(empty).ready
    assert names(migrate(empty)) == []
    assert names(migrate(empty, post=True)) == ["9001_less_post"]


def test_a_new_database_has_no_old_code_to_wait_for(empty: str, steps: Callable[..., None]) -> None:
    steps(_9000_more_pre="SELECT 1", _9001_less_post="SELECT 1")
    assert names(migrate(empty))[-2:] == ["9000_more_pre", "9001_less_post"]


def test_the_next_release_asks_for_the_post_steps_of_the_last(empty: str, steps: Callable[..., None]) -> None:
    migrate(empty)
    steps(_9000_less_post="SELECT 1", _9001_more_pre="SELECT 1")
    with pytest.raises(PenstockError, match="9000_less_post") as caught:
        migrate(empty)
    assert "db migrate --post" in str(caught.value.hint)
    assert names(migrate(empty, post=True)) == ["9000_less_post", "9001_more_pre"]


INDEX = "-- transaction: off\nCREATE INDEX CONCURRENTLY IF NOT EXISTS files_named ON penstock.files (filename);\n"


def index_is_valid(conninfo: str) -> bool:
    with psycopg.connect(conninfo) as connection:
        row = connection.execute(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = 'penstock.files_named'::regclass"
        ).fetchone()
    return row == (True,)


def test_many_at_once_build_an_index_concurrently(empty: str, steps: Callable[..., None]) -> None:
    migrate(empty)
    steps(_9000_index_pre=INDEX)
    with ThreadPoolExecutor(4) as threads:
        applied = list(threads.map(migrate, [make_conninfo(empty, options="-c statement_timeout=60s")] * 4))
    assert sorted(map(len, applied)) == [0, 0, 0, 1]
    assert index_is_valid(empty)


def test_an_index_whose_building_was_cut_short_is_built_again(empty: str, steps: Callable[..., None]) -> None:
    migrate(empty)
    steps(_9000_index_pre=INDEX)
    with psycopg.connect(empty) as reader:
        reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM penstock.files")
        # It waits for the reader's snapshot, and is cut short.
        with pytest.raises(psycopg.errors.QueryCanceled):
            migrate(make_conninfo(empty, options="-c statement_timeout=2s"))
    assert not index_is_valid(empty)
    assert names(migrate(empty)) == ["9000_index_pre"]
    assert index_is_valid(empty)


def test_a_statement_outside_a_transaction_may_contain_semicolons(empty: str, steps: Callable[..., None]) -> None:
    migrate(empty)
    steps(_9000_function_pre="-- transaction: off\nDO $$ BEGIN\n  PERFORM 1;\n  PERFORM 2;\nEND $$;\n")
    assert names(migrate(empty)) == ["9000_function_pre"]


def test_a_step_that_waits_for_a_long_reader_lets_others_pass(empty: str, steps: Callable[..., None]) -> None:
    migrate(empty)
    steps(_9000_column_pre="ALTER TABLE penstock.lanes ADD COLUMN colour text")
    waits: list[str] = []
    waiting = threading.Event()

    def on_wait(migration: Migration, holders: str) -> None:
        waits.append(f"{migration.name}: {holders}")
        waiting.set()

    with ThreadPoolExecutor(1) as threads:
        with psycopg.connect(empty, application_name="analyst") as reader:
            reader.execute("SELECT count(*) FROM penstock.lanes")
            migrating = threads.submit(migrate, empty, on_wait=on_wait)
            assert waiting.wait(30)
            # Whoever works on the table meanwhile is kept for as long as one try of the migration, and no longer.
            with psycopg.connect(empty, autocommit=True, options="-c statement_timeout=10s") as worker:
                for _ in range(3):
                    worker.execute("UPDATE penstock.lanes SET open = true WHERE id = 0")
            assert not migrating.done()
        assert names(migrating.result(60)) == ["9000_column_pre"]
    assert any("9000_column_pre" in wait and "analyst" in wait for wait in waits)


def test_a_step_that_waits_too_long_says_for_whom(empty: str, steps: Callable[..., None]) -> None:
    migrate(empty)
    steps(_9000_column_pre="ALTER TABLE penstock.lanes ADD COLUMN colour text")
    with psycopg.connect(empty, application_name="analyst") as reader:
        reader.execute("SELECT count(*) FROM penstock.lanes")
        with pytest.raises(PenstockError, match=r"9000_column_pre .* in use by"):
            migrate(empty, wait_s=0)
    assert names(migrate(empty)) == ["9000_column_pre"]


def test_a_failing_migration_leaves_no_trace_and_can_be_repeated(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = migrations.list_migrations()
    broken = Migration(9000, "9000_broken_pre", "pre", "CREATE TABLE penstock.half (); SELECT 1 / 0;")
    monkeypatch.setattr(migrations, "list_migrations", lambda: [*ours, broken])
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(empty)
    with psycopg.connect(empty) as connection:
        assert connection.execute("SELECT to_regclass('penstock.half')").fetchone() == (None,)
    mended = Migration(9000, "9000_broken_pre", "pre", "CREATE TABLE penstock.half ();")
    monkeypatch.setattr(migrations, "list_migrations", lambda: [*ours, mended])
    assert [m.number for m in migrate(empty)] == [9000]


def test_a_migrator_killed_in_the_middle_is_made_good_by_the_next(empty: str) -> None:
    """The child takes the lock, begins the migration and dies without a word, like a process killed there."""
    child = subprocess.run(
        [sys.executable, "-c", _DIE_IN_MIGRATION, empty], capture_output=True, text=True, check=False, timeout=60
    )
    assert child.returncode == 9, child.stderr
    assert [m.name for m in migrate(empty)] == [m.name for m in migrations.list_migrations()]


_DIE_IN_MIGRATION = """
import os, sys, psycopg
from penstock.db import migrate as migrations
execute = psycopg.Connection.execute
def dying(self, query, *rest, **more):
    answer = execute(self, query, *rest, **more)
    if b"CREATE TABLE penstock.files" in bytes(query if isinstance(query, bytes) else b""):
        os._exit(9)
    return answer
psycopg.Connection.execute = dying
migrations.migrate(sys.argv[1])
"""


def test_illegal_states_cannot_be_stored(database: str) -> None:
    """The schema refuses what the engine would never write."""
    illegal = {
        "files": "INSERT INTO penstock.files (id, owner, filename, state, worker_id, created_at)"
        " VALUES (gen_random_uuid(), 'o', 'f', 'half', gen_random_uuid(), now())",
        "outcomes": "INSERT INTO penstock.outcomes (lane_id, ordinal, line, state, attempts, lease_id, finished_at,"
        " custom_id) VALUES (1, 0, 1, 'pending', 1, 1, now(), 'c')",
        "batches": "INSERT INTO penstock.batches (id, owner, pool, total, created_at, completed_at, cancelled_at)"
        " VALUES (gen_random_uuid(), 'o', 'p', 1, now(), now(), now())",
        "unfrozen": "INSERT INTO penstock.batches (id, owner, pool, total, created_at, completed_at)"
        " VALUES (gen_random_uuid(), 'o', 'p', 1, now(), now())",
        "leases": "INSERT INTO penstock.leases (lane_id, batch_id, pool, route, limited, worker_id, ordinals, attempt,"
        " claimed_at, progressed_at) VALUES (1, gen_random_uuid(), 'p', 'r', false, gen_random_uuid(), '{}', 1, now(),"
        " now())",
        "deferrals": "INSERT INTO penstock.deferrals (lane_id, batch_id, pool, route, limited, ordinals, attempt,"
        " reason, due_at) VALUES (1, gen_random_uuid(), 'p', 'r', false, '{[0,1)}', 1, 'whim', now())",
    }
    with psycopg.connect(database, autocommit=True) as connection:
        for name, statement in illegal.items():
            with pytest.raises((psycopg.errors.CheckViolation, psycopg.errors.InvalidTextRepresentation)):
                connection.execute(statement.encode())
            assert name


def test_what_is_written_once_cannot_be_updated_by_its_owner(empty: str) -> None:
    """A superuser can, such as the embedded server's: there it is only that no statement does so."""
    owner = make_conninfo(empty, user="plain_owner")
    with psycopg.connect(empty, autocommit=True) as connection:
        connection.execute("CREATE ROLE plain_owner LOGIN")
        try:
            connection.execute("CREATE SCHEMA penstock AUTHORIZATION plain_owner")
            migrate(owner)
            with psycopg.connect(owner, autocommit=True) as owned:
                for column, table in WRITTEN_ONCE:
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        owned.execute(f"UPDATE penstock.{table} SET {column} = 1".encode())
                owned.execute("INSERT INTO penstock.templates VALUES (1, 0, 0, 1, 'a', NULL, '')")
                assert owned.execute("DELETE FROM penstock.templates WHERE source_id = 1").rowcount == 1
        finally:
            connection.execute("DROP OWNED BY plain_owner CASCADE")
            connection.execute("DROP ROLE plain_owner")


WRITTEN_ONCE = (
    ("source_id", "templates"),
    ("source_id", "file_chunks"),
    ("lane_id", "attempts"),
    ("lane_id", "reclaims"),
)


def test_payload_tables_can_be_distributed(database: str) -> None:
    """What Citus asks of a table: no triggers, no rules, no foreign keys, and its key in everything that is unique."""
    with psycopg.connect(database) as connection:
        for table, key in PAYLOAD.items():
            where = {"table": f"penstock.{table}", "key": key}
            found = connection.execute(_WHAT_KEEPS_A_TABLE, where).fetchall()
            assert found == [], f"{table} has {found}"


_WHAT_KEEPS_A_TABLE = """
SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid = %(table)s::regclass
UNION ALL
SELECT 'rule ' || rulename FROM pg_rewrite WHERE ev_class = %(table)s::regclass
UNION ALL
SELECT 'foreign key ' || conname FROM pg_constraint WHERE contype = 'f' AND %(table)s::regclass IN (conrelid, confrelid)
UNION ALL
SELECT 'index without the key ' || indexrelid::regclass::text FROM pg_index
 WHERE indrelid = %(table)s::regclass AND (indisunique OR indisexclusion)
   AND (SELECT attnum FROM pg_attribute WHERE attrelid = indrelid AND attname = %(key)s) <> ALL (indkey::int2[])
"""
