"""R6, R7: the connection is cut, or the process killed, while a file is stored: it is absent or whole, and one key
makes one file."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from penstock.config import IntakeLimits
from penstock.intake import files as stored
from penstock.intake import intake
from penstock.intake import parts as uploads
from penstock.intake.files import FileRow
from penstock.intake.parts import PartRow, PartWriter
from penstock.intake.sweep import sweep_leftovers
from penstock.intake.writer import StoredFile
from tests.support.db import pooled, with_connection
from tests.support.postgres_proxy import PostgresProxy
from tests.support.postgres_wire import CopyPoint
from tests.support.proxy_link import Trigger
from tests.support.wait import wait_until

WORKER = uuid4()
TABLES = ("files", "file_lanes", "templates", "file_chunks", "upload_parts")
NOTHING = dict.fromkeys(TABLES, 0)
LIMITS = IntakeLimits()
DATA = b"".join(
    json.dumps(
        {
            "custom_id": f"id-{number}",
            "url": "/v1/embeddings",
            "body": {"model": "m", "input": random.Random(number).randbytes(500).hex()},
        }
    ).encode()
    + b"\n"
    for number in range(8_000)
)
"""Written in several transactions."""
TEMPLATES, CHUNKS, SEAL = "COPY penstock.templates", "COPY penstock.file_chunks", "WITH sealed AS"


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True, prepare_threshold=None) as connection:
        # The process is alive: nothing may depend on its death.
        connection.execute(
            "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
            " VALUES (%s, 'p', 'h', 'm', 1, 0, now(), now() + interval '1 day')",
            [WORKER],
        )
        yield connection


@pytest.fixture
def proxy(server: str) -> Iterator[PostgresProxy]:
    with PostgresProxy(server) as proxy:
        yield proxy


def upload(conninfo: str, key: str | None = "key") -> StoredFile:
    with intake.FileIntake(
        conninfo,
        owner="me",
        worker_id=WORKER,
        filename="f",
        limits=LIMITS,
        keep_bytes=True,
        keep_problems=True,
        idempotency_key=key,
    ) as taking:
        for at in range(0, len(DATA), 100_000):
            taking.feed(DATA[at : at + 100_000])
        return taking.finish()


def rows(connection: psycopg.Connection) -> dict[str, int]:
    found = {}
    for table in TABLES:
        (found[table],) = connection.execute(f"SELECT count(*) FROM penstock.{table}".encode()).fetchall()[0]
    return found


def listed(database: str) -> list[FileRow]:
    return with_connection(database, lambda connection: stored.list_files(connection, owner="me", limit=10))


def content_of(database: str, file: FileRow) -> bytes:
    async def read() -> bytes:
        async with pooled(database) as pool:
            return b"".join([piece async for piece in stored.content(pool, file)])

    return asyncio.run(read())


def assert_whole(database: str, connection: psycopg.Connection, file: FileRow) -> None:
    """This file and nothing else."""
    assert listed(database) == [file]
    assert file.lines == 8_000
    assert content_of(database, file) == DATA
    assert rows(connection) == {
        "files": 1,
        "file_lanes": 1,
        "templates": 8_000,
        "file_chunks": file.chunks,
        "upload_parts": 0,
    }


@pytest.mark.parametrize("statement", [TEMPLATES, CHUNKS])
@pytest.mark.parametrize("point", [0, 1, "middle", "last", "after CopyDone"], ids=str)
@pytest.mark.parametrize("reachable", [True, False], ids=["reachable", "away"])
def test_cut_during_copy(
    database: str,
    connection: psycopg.Connection,
    proxy: PostgresProxy,
    statement: str,
    point: Any,
    reachable: bool,
) -> None:
    def arm() -> Trigger:
        if point == "after CopyDone":
            return proxy.swallow(statement)
        place: CopyPoint = point
        return proxy.cut_copy(place, statement)

    cut = arm()
    if not reachable:
        # Whatever is asked after the cut is not answered either.
        proxy.cut_before("lock_timeout", times=None)
    with pytest.raises(psycopg.OperationalError):
        upload(proxy.proxied(database))
    assert cut.fired == 1
    assert listed(database) == []
    sweep_leftovers(database, grace_s=30)
    assert rows(connection) == NOTHING
    proxy.heal()
    done = upload(proxy.proxied(database))
    assert not done.existed
    assert_whole(database, connection, done.file)


def test_the_answer_to_the_seal_is_lost(database: str, connection: psycopg.Connection, proxy: PostgresProxy) -> None:
    lost = proxy.swallow(SEAL)
    done = upload(proxy.proxied(database))
    assert (lost.fired, done.existed) == (1, False)
    assert_whole(database, connection, done.file)
    again = upload(proxy.proxied(database))
    assert (again.existed, again.file) == (True, done.file)
    assert_whole(database, connection, done.file)


def test_the_answer_to_the_seal_is_lost_and_nobody_can_be_asked(
    database: str, connection: psycopg.Connection, proxy: PostgresProxy
) -> None:
    proxy.swallow(SEAL)
    proxy.cut_before("lock_timeout", times=None)
    with pytest.raises(psycopg.OperationalError):
        upload(proxy.proxied(database))
    sweep_leftovers(database, grace_s=30)
    (file,) = listed(database)
    assert_whole(database, connection, file)
    proxy.heal()
    again = upload(proxy.proxied(database))
    assert (again.existed, again.file) == (True, file)
    assert_whole(database, connection, file)


@pytest.mark.parametrize("statement", ["INSERT INTO penstock.files", "set_config\\('synchronous_commit'", SEAL])
def test_cut_before_a_statement(
    database: str, connection: psycopg.Connection, proxy: PostgresProxy, statement: str
) -> None:
    proxy.cut_before(statement)
    with pytest.raises(psycopg.OperationalError):
        upload(proxy.proxied(database))
    assert listed(database) == []
    sweep_leftovers(database, grace_s=30)
    assert rows(connection) == NOTHING
    done = upload(proxy.proxied(database))
    assert_whole(database, connection, done.file)


def test_the_answer_to_the_opening_is_lost(database: str, connection: psycopg.Connection, proxy: PostgresProxy) -> None:
    """The row is there, and nobody has heard of its source."""
    proxy.swallow("INSERT INTO penstock.files")
    with pytest.raises(psycopg.OperationalError):
        upload(proxy.proxied(database))
    assert listed(database) == []
    sweep_leftovers(database, grace_s=30)
    assert rows(connection) == NOTHING


def open_upload(database: str) -> uploads.UploadRow:
    upload, _ = with_connection(
        database,
        lambda connection: uploads.create_upload(
            connection,
            owner="me",
            filename="f",
            purpose="batch",
            mime_type="text/jsonl",
            size=len(DATA),
            limits=LIMITS,
        ),
    )
    return upload


def add(conninfo: str, upload: uploads.UploadRow, data: bytes, key: str | None = None) -> PartRow:
    about: dict[str, Any] = {"owner": "me", "worker_id": WORKER, "limits": LIMITS, "idempotency_key": key}
    with closing(PartWriter(conninfo, upload_id=upload.id, **about)) as taking:
        taking.feed(data)
        return taking.finish()


def _commit_of(statement: str) -> Callable[[str], bool]:
    """The first COMMIT after that statement."""
    seen = False

    def match(text: str) -> bool:
        nonlocal seen
        seen = seen or statement in text
        return seen and text.startswith("COMMIT")

    return match


def test_parts_are_absent_or_whole_and_complete_is_answered_once(
    database: str, connection: psycopg.Connection, proxy: PostgresProxy
) -> None:
    open_one = open_upload(database)
    way = proxy.proxied(database)
    proxy.cut_copy("middle", CHUNKS)
    with pytest.raises(psycopg.OperationalError):
        add(way, open_one, DATA)
    sweep_leftovers(database, grace_s=30)
    assert rows(connection) == NOTHING

    half = len(DATA) // 2
    first = add(way, open_one, DATA[:half])
    lost = proxy.swallow("INSERT INTO penstock.upload_parts")
    second = add(way, open_one, DATA[half:], "part-2")
    assert lost.fired == 1
    assert add(way, open_one, DATA[half:], "part-2") == second

    completing: dict[str, Any] = {"owner": "me", "worker_id": WORKER, "upload_id": open_one.id, "limits": LIMITS}
    part_ids = [first.id, second.id]
    proxy.cut_before("UPDATE penstock.uploads")
    with pytest.raises(psycopg.OperationalError):
        uploads.complete_upload(way, part_ids=part_ids, **completing)
    assert listed(database) == []
    lost = proxy.swallow(_commit_of("UPDATE penstock.uploads"))
    done = uploads.complete_upload(way, part_ids=part_ids, **completing)
    assert lost.fired == 1
    assert done == uploads.complete_upload(way, part_ids=part_ids, **completing)
    assert done.file is not None
    sweep_leftovers(database, grace_s=30)
    assert_whole(database, connection, done.file)


_UPLOADER = """
import sys
from uuid import UUID
from penstock.config import IntakeLimits
from penstock.intake.intake import FileIntake

taking = FileIntake(sys.argv[1], owner="me", worker_id=UUID(sys.argv[2]), filename="f", limits=IntakeLimits(),
                    keep_bytes=True, keep_problems=True, idempotency_key="key")
while data := sys.stdin.buffer.read(100_000):
    taking.feed(data)
    print(taking.bytes_taken, flush=True)
"""


def test_a_killed_uploader_leaves_what_the_sweep_finds(database: str, connection: psycopg.Connection) -> None:
    arguments = [sys.executable, "-c", _UPLOADER, database, str(uuid4())]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(DATA)
        process.stdin.flush()
        while int(process.stdout.readline()) < len(DATA) // 100_000 * 100_000:
            pass
        # Copied by another thread, and committed as no more comes.
        wait_until(lambda: min(rows(connection)[table] for table in ("templates", "file_chunks")) > 0, 30)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdin.close()
    assert listed(database) == []
    # What the server was doing for the killed one, it ends once it notices.
    wait_until(lambda: sweep_leftovers(database, grace_s=30) > 0, 30)
    assert rows(connection) == NOTHING
    assert_whole(database, connection, upload(database).file)
