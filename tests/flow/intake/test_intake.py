"""From a file to sealed templates, on a real server: whole or not at all."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import zstandard
from psycopg.conninfo import make_conninfo

from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.errors import PenstockError, UsageError
from penstock.intake.ingest import ingest_file
from penstock.intake.intake import FileIntake
from penstock.intake.refusal import IntakeInterrupted, IntakeRefused
from penstock.intake.rows import FileLane
from penstock.intake.sweep import purge_failed, sweep_abandoned
from penstock.intake.writer import StoredFile
from tests.support.wait import wait_until

SQL = sql.load("penstock.intake", "intake.sql")
WORKER = uuid4()
URL = "/v1/chat/completions"
TABLES = ("files", "file_lanes", "templates", "file_chunks")
SMALL_BATCHES = IntakeLimits(intake_max_rows=100)


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


def lines(count: int, models: tuple[str, ...] = ("m",)) -> bytes:
    return b"".join(
        json.dumps(
            {
                "custom_id": f"id-{number}",
                "method": "POST",
                "url": URL,
                "body": {"model": models[number % len(models)], "text": "é" * (number % 50)},
            },
            ensure_ascii=number % 2 == 0,
        ).encode()
        + b"\n"
        for number in range(count)
    )


def written(folder: Path, data: bytes, name: str = "in.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def ingest(database: str, path: Path | str, **options: Any) -> StoredFile:
    return ingest_file(database, path, owner="me", worker_id=WORKER, **options)


def count(connection: psycopg.Connection, table: str) -> int:
    (rows,) = connection.execute(f"SELECT count(*) FROM penstock.{table}".encode()).fetchone() or (-1,)
    return int(rows)


def assert_nothing_is_left(connection: psycopg.Connection) -> None:
    assert {table: count(connection, table) for table in TABLES} == dict.fromkeys(TABLES, 0)


def test_a_file_is_stored_byte_for_byte_in_line_order(
    database: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    data = lines(1234, ("m", "k", "l"))
    seen: list[int] = []
    stored = ingest(
        database, written(tmp_path, data), filename="mine.jsonl", limits=SMALL_BATCHES, on_progress=seen.append
    )

    assert stored.lanes == (FileLane(0, "m", URL, 412), FileLane(1, "k", URL, 411), FileLane(2, "l", URL, 411))
    file = stored.file
    assert (file.lines, file.bytes, file.digest) == (1234, len(data), hashlib.sha256(data).digest())
    assert seen[-1] == len(data)

    row = connection.execute(
        "SELECT id, source_id, owner, filename, state, worker_id, lines, bytes, digest FROM penstock.files"
    ).fetchone()
    assert row == (
        file.id,
        file.source_id,
        "me",
        "mine.jsonl",
        "ready",
        WORKER,
        1234,
        len(data),
        file.digest,
    )
    lanes = connection.execute(
        "SELECT source_lane, route, endpoint, total FROM penstock.file_lanes ORDER BY source_lane"
    ).fetchall()
    assert [FileLane(*lane) for lane in lanes] == list(stored.lanes)

    rows = connection.execute(
        "SELECT source_lane, ordinal, line, custom_id, summary, body FROM penstock.templates ORDER BY line"
    ).fetchall()
    for number, (line, row) in enumerate(zip(data.splitlines(), rows, strict=True)):
        body = line[line.index(b'"body": ') + 8 : -1]
        assert row == (number % 3, number // 3, number + 1, f"id-{number}", None, body)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compressed_files_are_recognised_whatever_their_name(
    database: str, connection: psycopg.Connection, tmp_path: Path, compress: Any
) -> None:
    raw = compress(lines(500))
    file = ingest(database, written(tmp_path, raw)).file
    assert (file.lines, file.bytes, file.digest) == (500, len(raw), hashlib.sha256(raw).digest())
    assert count(connection, "templates") == 500


def test_a_bad_line_late_in_the_file_leaves_nothing(
    database: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    path = written(tmp_path, lines(950) + b"oops\n" + lines(1))
    with pytest.raises(IntakeRefused) as caught:
        ingest(database, path, limits=SMALL_BATCHES)
    assert [bad.line for bad in caught.value.bad_lines] == [951, 952]
    assert caught.value.message.startswith(f"{path}: 2 lines are not valid")
    assert_nothing_is_left(connection)


def test_an_empty_file_and_a_missing_file_leave_nothing(
    database: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    with pytest.raises(IntakeRefused, match="holds no requests"):
        ingest(database, written(tmp_path, b""))
    with pytest.raises(UsageError, match="No such file"):
        ingest(database, tmp_path / "absent")
    assert_nothing_is_left(connection)


def test_stopping_half_way_leaves_nothing(database: str, connection: psycopg.Connection, tmp_path: Path) -> None:
    asked = iter([False, False])

    def should_stop() -> bool:
        if next(asked, True):
            wait_until(lambda: count(connection, "templates") > 0, 30)
            return True
        return False

    with pytest.raises(IntakeInterrupted, match="interrupted; nothing was stored"):
        ingest(database, written(tmp_path, lines(5000)), limits=SMALL_BATCHES, should_stop=should_stop)
    assert_nothing_is_left(connection)


def test_a_pipe_is_read_to_its_end(database: str, connection: psycopg.Connection) -> None:
    program = (
        "import sys, uuid; from penstock.intake.ingest import ingest_file;"
        "print(ingest_file(sys.argv[1], '-', owner='me', worker_id=uuid.uuid4()).file.lines)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, database], input=lines(300), capture_output=True, check=True
    )
    assert result.stdout == b"300\n"
    assert connection.execute("SELECT filename, state FROM penstock.files").fetchall() == [("standard input", "ready")]


def stream(database: str, limits: IntakeLimits = SMALL_BATCHES) -> FileIntake:
    return FileIntake(database, owner="me", worker_id=WORKER, filename="up.jsonl", limits=limits)


def test_a_stream_can_pause_without_holding_a_transaction(database: str, connection: psycopg.Connection) -> None:
    data = lines(1000)
    with stream(database, limits=IntakeLimits()) as intake:
        intake.feed(data[:5000])
        intake.flush()
        assert count(connection, "templates") > 0
        idle = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND xact_start IS NOT NULL AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        ).fetchone()
        assert idle == (0,)
        intake.feed(data[5000:])
        stored = intake.finish()
    assert stored.file.lines == count(connection, "templates") == 1000


def test_a_stream_that_is_left_unfinished_leaves_nothing(database: str, connection: psycopg.Connection) -> None:
    with stream(database) as intake:
        intake.feed(lines(1000))
        wait_until(lambda: count(connection, "templates") >= 900, 30)
    assert_nothing_is_left(connection)


def cut_connections(connection: psycopg.Connection) -> None:
    """Ends every other session on this database, and waits until they are gone."""
    connection.execute(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )


def test_a_connection_lost_in_the_middle_leaves_nothing(
    database: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    """The connection that copies waits for the file's lock, so that it is there to be cut."""
    asked = 0

    def cut_at_the_third_chunk() -> bool:
        nonlocal asked
        asked += 1
        if asked == 2:
            connection.execute("BEGIN")
            connection.execute("SELECT FROM penstock.files FOR UPDATE")
        elif asked == 3:
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            wait_until(lambda: connection.execute(waiting).fetchone() == (1,), 30)
            cut_connections(connection)
            connection.execute("ROLLBACK")
        return False

    path = written(tmp_path, lines(5000))
    with pytest.raises(PenstockError, match=r"in\.jsonl: the database did not take it") as caught:
        ingest(database, path, limits=SMALL_BATCHES, should_stop=cut_at_the_third_chunk)
    assert asked > 2
    assert caught.value.hint is not None
    assert_nothing_is_left(connection)


def test_a_seal_whose_answer_was_lost_is_found_to_be_done(
    database: str, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stream(database) as intake:
        intake.feed(lines(10))
        execute = psycopg.Connection.execute

        def lose_the_answer(self: psycopg.Connection, query: Any, *args: Any, **kwargs: Any) -> Any:
            cursor = execute(self, query, *args, **kwargs)
            if query == SQL["seal_if_ingesting"]:
                raise psycopg.OperationalError("the connection was closed")
            return cursor

        monkeypatch.setattr(psycopg.Connection, "execute", lose_the_answer)
        stored = intake.finish()
    assert connection.execute("SELECT id, state FROM penstock.files").fetchall() == [(stored.file.id, "ready")]
    assert count(connection, "templates") == 10


def test_a_seal_that_never_arrived_leaves_nothing(
    database: str, connection: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = psycopg.Connection.execute

    def cut_before_the_seal(self: psycopg.Connection, query: Any, *args: Any, **kwargs: Any) -> Any:
        if query == SQL["seal_if_ingesting"]:
            cut_connections(connection)
        return execute(self, query, *args, **kwargs)

    monkeypatch.setattr(psycopg.Connection, "execute", cut_before_the_seal)
    with pytest.raises(PenstockError, match="nothing was stored"):
        ingest(database, written(tmp_path, lines(10)))
    assert_nothing_is_left(connection)


def test_a_seal_that_nobody_can_be_asked_about_is_said_so(
    database: str, connection: psycopg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = psycopg.Connection.execute

    def lose_everything(self: psycopg.Connection, query: Any, *args: Any, **kwargs: Any) -> Any:
        if query in (SQL["seal_if_ingesting"], SQL["bound_lock_wait"]):
            raise psycopg.OperationalError("the connection was closed")
        return execute(self, query, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(psycopg.Connection, "execute", lose_everything)
        with pytest.raises(PenstockError, match="cannot be asked whether it was stored: the connection was closed"):
            ingest(database, written(tmp_path, lines(10)))
    assert connection.execute("SELECT state FROM penstock.files").fetchall() == [("ingesting",)]


def test_an_unreachable_database_is_said_so(database: str, tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="the database did not take it") as caught:
        ingest(make_conninfo(database, dbname="absent"), written(tmp_path, lines(1)))
    assert caught.value.hint == "Check that the database is up and reachable, then run the command again."


def test_a_file_that_cannot_be_begun_leaves_no_connection_behind(server_18: str, tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match="the database did not take it") as caught:
        ingest(make_conninfo(server_18, application_name="begins"), written(tmp_path, lines(1)))
    assert caught.value.hint == "The database has no Penstock schema yet: run 'penstock db migrate'."
    # The error is still held here, and with it whoever connected: nothing is closed for being forgotten.
    with psycopg.connect(server_18, autocommit=True) as connection:
        left = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'begins'"
        wait_until(lambda: connection.execute(left).fetchone() == (0,), 30)


def register(connection: psycopg.Connection, worker_id: UUID, heartbeat_at: datetime) -> None:
    connection.execute(
        "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
        " VALUES (%s, 'p', 'h', 'm', 1, 0, %s, %s)",
        (worker_id, heartbeat_at, heartbeat_at),
    )


def abandoned_file(connection: psycopg.Connection, worker_id: UUID, rows: int = 0) -> UUID:
    file_id = uuid4()
    connection.execute(
        "WITH file AS (INSERT INTO penstock.files (id, owner, filename, worker_id, created_at)"
        " VALUES (%s, 'me', 'f', %s, now()) RETURNING source_id)"
        " INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, body)"
        " SELECT source_id, n %% 3, n / 3, n + 1, n::text, '{}' FROM file, generate_series(0, %s - 1) AS n",
        (file_id, worker_id, rows),
    )
    return file_id


def test_the_sweep_gives_up_files_of_workers_that_are_gone(connection: psycopg.Connection) -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    alive, silent, known_dead, unknown = (uuid4() for _ in range(4))
    register(connection, alive, now - timedelta(seconds=29))
    register(connection, silent, now - timedelta(seconds=31))
    register(connection, known_dead, now)
    files = {worker: abandoned_file(connection, worker) for worker in (alive, silent, known_dead, unknown)}

    swept = sweep_abandoned(connection, grace_s=30, dead_workers=[known_dead], now=now)
    assert set(swept) == {files[silent], files[known_dead], files[unknown]}
    assert sweep_abandoned(connection, grace_s=30, dead_workers=[known_dead], now=now) == []
    assert purge_failed(connection) == 0
    assert connection.execute("SELECT id, state FROM penstock.files").fetchall() == [(files[alive], "ingesting")]


def test_the_purge_deletes_what_failed_files_left_and_nothing_else(
    database: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    kept = ingest(database, written(tmp_path, lines(20)))
    abandoned_file(connection, uuid4(), rows=2500)
    abandoned_file(connection, uuid4(), rows=7)
    sweep_abandoned(connection, grace_s=30)
    assert purge_failed(connection, rows=100) == 2507
    assert connection.execute("SELECT id FROM penstock.files").fetchall() == [(kept.file.id,)]
    assert count(connection, "templates") == 20


def test_a_purge_that_meets_another_leaves_the_file_to_it(database: str, connection: psycopg.Connection) -> None:
    contested = abandoned_file(connection, uuid4(), rows=30)
    abandoned_file(connection, uuid4(), rows=7)
    sweep_abandoned(connection, grace_s=30)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM penstock.files WHERE id = %s FOR UPDATE", [contested])
        assert purge_failed(connection) == 7
        assert count(connection, "files") == 1
        other.rollback()
    assert purge_failed(connection) == 30
    assert_nothing_is_left(connection)


def test_purges_at_once_share_the_rows(database: str, connection: psycopg.Connection) -> None:
    for _ in range(3):
        abandoned_file(connection, uuid4(), rows=4000)
    sweep_abandoned(connection, grace_s=30)
    # Whoever is in the way of the other makes it fail instead of wait.
    hasty = make_conninfo(database, application_name="purge")

    def purge(_: int) -> int:
        deleted = 0
        with psycopg.connect(hasty, autocommit=True, prepare_threshold=None) as own:
            own.execute("SET lock_timeout = '1ms'")
            while own.execute("SELECT EXISTS (SELECT FROM penstock.files)").fetchone() == (True,):
                deleted += purge_failed(own, rows=100)
        return deleted

    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(purge, range(3))) == 12_000
    assert_nothing_is_left(connection)


def test_a_file_that_was_swept_takes_no_more_rows(database: str, connection: psycopg.Connection) -> None:
    data = lines(1000)
    with stream(database) as intake:
        intake.feed(data[:20_000])
        intake.flush()
        assert len(sweep_abandoned(connection, grace_s=30)) == 1
        purge_failed(connection)

        def go_on() -> None:
            intake.feed(data[20_000:])
            intake.flush()

        with pytest.raises(PenstockError, match="another process gave this file up"):
            go_on()
    assert_nothing_is_left(connection)


def test_the_sweep_does_not_wait_for_a_batch_under_way(database: str, connection: psycopg.Connection) -> None:
    with stream(database) as intake, psycopg.connect(database) as batch:
        intake.feed(lines(50))
        batch.execute(SQL["hold_if_ingesting"], {"file_id": intake.file_id})
        assert sweep_abandoned(connection, grace_s=30) == []
        batch.commit()
        assert intake.finish().file.lines == 50


@pytest.mark.parametrize(("state", "rows_left"), [("failed", 0), ("ready", 10)])
def test_only_a_file_being_stored_can_be_sealed_or_given_up(
    database: str, connection: psycopg.Connection, state: str, rows_left: int
) -> None:
    with stream(database) as intake:
        intake.feed(lines(10))
        intake.flush()
        sealed_at = datetime.now(UTC) if state == "ready" else None
        connection.execute("UPDATE penstock.files SET state = %s, sealed_at = %s", (state, sealed_at))
        with pytest.raises(PenstockError, match="another process gave this file up"):
            intake.finish()
    assert count(connection, "file_lanes") == 0
    assert count(connection, "templates") == rows_left
