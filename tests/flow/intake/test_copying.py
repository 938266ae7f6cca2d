"""Rows are copied by a thread of their own: the reader goes on as far as the queue goes, and learns how it went."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from uuid import uuid4

import psycopg
import pytest

from penstock.config import IntakeLimits
from penstock.intake import copying
from penstock.intake.rows import FileLanes, Lane, pack_rows
from penstock.intake.writer import FileWriter
from tests.support.postgres_proxy import PostgresProxy
from tests.support.wait import wait_until

BODY = b'{"model": "m"}' + b" " * 8_000
BLOCK_ROWS = 10
DEADLINE_S = 30


def pack(lane: Lane) -> bytes:
    """The next rows of a lane."""
    rows: list[bytes] = []
    pack_rows(
        rows,
        range(lane.total + 1, lane.total + BLOCK_ROWS + 1),
        [b"id"] * BLOCK_ROWS,
        [BODY] * BLOCK_ROWS,
        [lane] * BLOCK_ROWS,
    )
    return b"".join(rows)


def open_lane(source_id: int) -> Lane:
    lane = FileLanes(source_id, IntakeLimits()).open("/v1", "m")
    assert isinstance(lane, Lane)
    return lane


QUEUE_BLOCKS = ceil(4 * 1024 * 1024 / len(pack(open_lane(1))))
"""So many fill the queue."""


class Rows:
    """Packs rows for one writer, without end."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer
        self._lane = open_lane(writer.source_id)
        self.blocks = 0
        """Handed in and taken."""

    def write(self, blocks: int) -> None:
        for _ in range(blocks):
            self._writer.write(pack(self._lane), BLOCK_ROWS)
            self.blocks += 1


@pytest.fixture
def connection(database_18: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database_18, autocommit=True) as connection:
        yield connection


def begin(database: str, limits: IntakeLimits | None = None) -> FileWriter:
    limits = limits or IntakeLimits()
    return FileWriter(database, owner="me", worker_id=uuid4(), filename="f", limits=limits, keep_bytes=False)


def stored(connection: psycopg.Connection, writer: FileWriter) -> int:
    query = "SELECT count(*) FROM penstock.templates WHERE source_id = %s"
    (rows,) = connection.execute(query, [writer.source_id]).fetchall()[0]
    return int(rows)


def waits_for_a_lock(connection: psycopg.Connection) -> bool:
    return connection.execute("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted").fetchone() == (True,)


def test_the_reader_goes_on_while_the_server_is_busy_as_far_as_the_queue_goes(
    database_18: str, connection: psycopg.Connection
) -> None:
    writer = begin(database_18)
    rows = Rows(writer)
    with ThreadPoolExecutor(1) as threads:
        with connection.transaction():
            connection.execute("SELECT FROM penstock.files FOR UPDATE")
            writing = threads.submit(rows.write, 2 * QUEUE_BLOCKS)
            wait_until(lambda: rows.blocks >= QUEUE_BLOCKS, DEADLINE_S)
            wait_until(lambda: waits_for_a_lock(connection), DEADLINE_S)
            assert rows.blocks == QUEUE_BLOCKS
            assert not writing.done()
        writing.result(DEADLINE_S)
    writer.flush()
    assert stored(connection, writer) == 2 * QUEUE_BLOCKS * BLOCK_ROWS
    writer.abandon()
    assert connection.execute("SELECT count(*) FROM penstock.files").fetchone() == (0,)


def test_threads_take_quick_turns_for_as_long_as_rows_are_copied(
    database_18: str, connection: psycopg.Connection
) -> None:
    wait_until(lambda: sys.getswitchinterval() >= 0.005, DEADLINE_S)
    writer = begin(database_18)
    rows = Rows(writer)
    with connection.transaction():
        _ = writer.source_id
        connection.execute("SELECT FROM penstock.files FOR UPDATE")
        rows.write(QUEUE_BLOCKS)
        wait_until(lambda: waits_for_a_lock(connection), DEADLINE_S)
        assert sys.getswitchinterval() < 0.001
    writer.flush()
    wait_until(lambda: sys.getswitchinterval() >= 0.005, DEADLINE_S)
    writer.abandon()


def test_nothing_is_held_while_nothing_comes(database_18: str, connection: psycopg.Connection) -> None:
    writer = begin(database_18)
    rows = Rows(writer)
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

    def write_and_wait(before: int) -> None:
        rows.write(QUEUE_BLOCKS)
        wait_until(lambda: stored(connection, writer) > before, DEADLINE_S)
        wait_until(lambda: connection.execute(others).fetchone() == (0,), DEADLINE_S)

    write_and_wait(0)
    write_and_wait(QUEUE_BLOCKS * BLOCK_ROWS)
    writer.abandon()


def test_what_the_copying_met_is_raised_by_every_call_that_follows(
    database_18: str, connection: psycopg.Connection
) -> None:
    writer = begin(database_18)
    rows = Rows(writer)
    connection.execute("ALTER TABLE penstock.templates ADD CONSTRAINT refused CHECK (line < 50)")
    rows.write(QUEUE_BLOCKS)
    with pytest.raises(psycopg.errors.CheckViolation):
        writer.flush()
    with pytest.raises(psycopg.errors.CheckViolation):
        rows.write(1)
    with pytest.raises(psycopg.errors.CheckViolation):
        writer.flush()
    writer.abandon()
    assert connection.execute("SELECT count(*) FROM penstock.files").fetchone() == (0,)


def test_files_take_turns_when_threads_are_few(
    database_18: str, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_threads", copying._Threads(1))
    limits = IntakeLimits(intake_max_rows=QUEUE_BLOCKS * BLOCK_ROWS)
    endless, short = begin(database_18, limits), begin(database_18, limits)
    enough = threading.Event()

    def write_without_end() -> None:
        rows = Rows(endless)
        while not enough.is_set():
            rows.write(1)

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write_without_end)
        try:
            wait_until(lambda: endless.rows > QUEUE_BLOCKS * BLOCK_ROWS, DEADLINE_S)
            Rows(short).write(2 * QUEUE_BLOCKS)
            short.flush()
            assert stored(connection, short) == 2 * QUEUE_BLOCKS * BLOCK_ROWS
            assert not writing.done()
        finally:
            enough.set()
        writing.result(DEADLINE_S)
    endless.abandon()
    short.abandon()


def test_batches_shrink_while_the_database_is_slow(
    database_18: str, connection: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.intake")
    most = 128
    with PostgresProxy(database_18) as proxy, ThreadPoolExecutor(1) as threads:
        writer = begin(proxy.proxied(database_18), IntakeLimits(intake_max_rows=most))
        rows = Rows(writer)
        enough = threading.Event()

        def write_without_end() -> None:
            while not enough.is_set():
                rows.write(1)

        def some_batch(after: int, fits: Callable[[int], bool]) -> bool:
            return any(map(fits, batch_sizes(connection, writer, after)))

        writing = threads.submit(write_without_end)
        try:
            wait_until(lambda: some_batch(-1, lambda rows: rows == most), DEADLINE_S)
            before = stored(connection, writer)
            caplog.clear()  # a busy machine is a slow database, too
            proxy.throttle(1_000_000)
            wait_until(lambda: some_batch(before + most, lambda rows: rows <= most / 4), DEADLINE_S)
            assert "time per row rises" in caplog.text
            proxy.heal()
            slow = stored(connection, writer)
            wait_until(lambda: some_batch(slow + most, lambda rows: rows == most), DEADLINE_S)
        finally:
            enough.set()
            proxy.heal()
        writing.result(DEADLINE_S)
        writer.abandon()


def batch_sizes(connection: psycopg.Connection, writer: FileWriter, after: int) -> list[int]:
    """Rows of each transaction that begins behind this ordinal, in their order."""
    query = (
        "SELECT count(*)::int4 FROM penstock.templates WHERE source_id = %s"
        " GROUP BY xmin HAVING min(ordinal) > %s ORDER BY min(ordinal)"
    )
    return [rows for (rows,) in connection.execute(query, [writer.source_id, after])]
