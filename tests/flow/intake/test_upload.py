"""Uploads: what came in comes back byte for byte, parsed or with what is wrong with it, or not at all."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import zstandard

from penstock.config import IntakeLimits
from penstock.intake import files as stored
from penstock.intake.files import ContentGone, FileRow
from penstock.intake.intake import FileIntake
from penstock.intake.pieces import PIECE_BYTES
from penstock.intake.refusal import IntakeGivenUp, IntakeRefused
from penstock.intake.sweep import sweep_abandoned, sweep_leftovers
from penstock.intake.writer import FileWriter, IdempotencyConflict, StoredFile
from tests.support.db import connected, pooled, with_connection
from tests.support.wait import wait_until

WORKER = uuid4()
URL = "/v1/chat/completions"
TABLES = ("files", "file_lanes", "templates", "file_chunks")


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True, prepare_threshold=None) as connection:
        yield connection


def line(number: int, model: str | None = "m", pad: str = "", **others: Any) -> bytes:
    body = {"messages": [{"content": f"{number} é\u2028{pad}"}]} | ({"model": model} if model else {})
    return json.dumps({"custom_id": f"id-{number}", "url": URL, "body": body} | others, ensure_ascii=False).encode()


def lines(count: int, *, padding: int = 0) -> bytes:
    words = random.Random(count)
    return b"".join(line(number, pad=words.randbytes(padding // 2).hex()) + b"\n" for number in range(count))


LARGE = lines(6000, padding=1000)
"""Several pieces, and several writes."""


def open_upload(database: str, **options: Any) -> FileIntake:
    about: dict[str, Any] = {
        "owner": "me",
        "worker_id": WORKER,
        "filename": "up.jsonl",
        "limits": IntakeLimits(),
        "purpose": "batch",
        "keep_bytes": True,
        "keep_problems": True,
    }
    return FileIntake(database, **(about | options))


def upload(database: str, data: bytes, *, step: int = 100_000, **options: Any) -> StoredFile:
    with open_upload(database, **options) as taking:
        for at in range(0, len(data), step):
            taking.feed(data[at : at + step])
        return taking.finish()


def content_of(database: str, file: FileRow) -> bytes:
    async def read() -> bytes:
        async with pooled(database) as pool:
            return b"".join([piece async for piece in stored.content(pool, file)])

    return asyncio.run(read())


def get(database: str, file_id: UUID, owner: str | None = "me") -> FileRow | None:
    return with_connection(database, lambda connection: stored.get_file(connection, file_id, owner))


def counts(connection: psycopg.Connection) -> dict[str, int]:
    found = {}
    for table in TABLES:
        (found[table],) = connection.execute(f"SELECT count(*) FROM penstock.{table}".encode()).fetchall()[0]
    return found


NOTHING = dict.fromkeys(TABLES, 0)


def test_a_file_comes_back_as_it_came_and_is_parsed(database: str, connection: psycopg.Connection) -> None:
    file = upload(database, LARGE, expires_after_s=3600).file
    assert file == get(database, file.id)
    assert (file.bytes, file.lines, file.digest) == (len(LARGE), 6000, hashlib.sha256(LARGE).digest())
    assert (file.filename, file.purpose, file.kind, file.owner) == ("up.jsonl", "batch", "input", "me")
    assert file.expires_at == file.created_at + timedelta(hours=1)
    assert file.problems is None
    assert content_of(database, file) == LARGE
    rows = connection.execute("SELECT line, custom_id, body FROM penstock.templates ORDER BY line").fetchall()
    expected = [json.loads(text) for text in LARGE.split(b"\n")[:-1]]
    assert [(number, entry["custom_id"], entry["body"]) for number, entry in enumerate(expected, 1)] == [
        (number, custom_id, json.loads(body)) for number, custom_id, body in rows
    ]
    (sizes,) = connection.execute("SELECT array_agg(size ORDER BY chunk) FROM penstock.file_chunks").fetchall()[0]
    assert set(sizes[:-1]) == {PIECE_BYTES}


@pytest.mark.parametrize(
    ("data", "requests"),
    [
        pytest.param(lines(3), 3, id="plain"),
        pytest.param(lines(3).replace(b"\n", b"\r\n"), 3, id="crlf"),
        pytest.param(b"\xef\xbb\xbf" + lines(3), 3, id="bom"),
        pytest.param(b"\n\n" + lines(2) + b"\n \n" + line(9) + b"\n\n", 3, id="blank lines"),
        pytest.param(lines(2) + line(9), 3, id="no final newline"),
        pytest.param(gzip.compress(lines(3)), 3, id="gzip"),
        pytest.param(gzip.compress(lines(2)) + gzip.compress(line(9)), 3, id="gzip in two members"),
        pytest.param(zstandard.ZstdCompressor().compress(lines(3)), 3, id="zstd"),
        pytest.param(gzip.compress(lines(5000, padding=1000)), 5000, id="gzip of several pieces"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_odd_files_come_back_as_they_came(database: str, data: bytes, requests: int, late: bool) -> None:
    with open_upload(database, purpose=None if late else "batch") as taking:
        for at in range(0, len(data), 77_777):
            taking.feed(data[at : at + 77_777])
        taking.purpose = "batch"
        file = taking.finish().file
    assert (file.lines, file.problems) == (requests, None)
    assert content_of(database, file) == data


def test_a_purpose_that_comes_last_has_the_bytes_read_again(database: str, connection: psycopg.Connection) -> None:
    with open_upload(database, purpose=None) as taking:
        taking.feed(LARGE)
        assert counts(connection)["templates"] == 0
        taking.purpose = "batch"
        file = taking.finish().file
    assert file.lines == 6000 == counts(connection)["templates"]
    assert content_of(database, file) == LARGE


def test_files_for_other_purposes_are_not_parsed(database: str, connection: psycopg.Connection) -> None:
    data = random.Random(1).randbytes(3_000_000)
    file = upload(database, data, purpose="user_data").file
    assert (file.lines, file.bytes, file.problems, file.purpose) == (0, len(data), None, "user_data")
    assert content_of(database, file) == data
    with open_upload(database) as taking:
        taking.feed(LARGE)
        taking.purpose = "assistants"
        file = taking.finish().file
    assert (file.lines, file.purpose) == (0, "assistants")
    assert (counts(connection)["templates"], counts(connection)["file_lanes"]) == (0, 0)


def test_an_empty_file_is_kept(database: str) -> None:
    file = upload(database, b"", purpose="user_data").file
    assert (file.bytes, file.chunks, content_of(database, file)) == (0, 0, b"")
    (problem,) = upload(database, b"").file.problems or []
    assert (problem["code"], problem["line"], problem["param"]) == ("empty_file", None, None)
    (problem,) = upload(database, b"\n \r\n").file.problems or []
    assert problem["code"] == "empty_file"


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"{oops", "invalid_json_line", None),
        (b'["an array"]', "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (line(0), "duplicate_custom_id", "custom_id"),
        (line(7, model=None), "missing_required_parameter", "body.model"),
        (line(7).replace(b'"model"', b'"stream": true, "model"'), "invalid_request", "body.stream"),
        (line(7).replace(b'"model"', b'"stream": "yes", "model"'), "invalid_request", "body.stream"),
        (json.dumps({"url": URL, "body": {"model": "m"}}).encode(), "missing_required_parameter", "custom_id"),
        (json.dumps({"custom_id": "x", "body": {"model": "m"}}).encode(), "missing_required_parameter", "url"),
        (line(7, url="http://evil/v1"), "invalid_request", "url"),
        (line(7, method="GET"), "invalid_request", "method"),
        (line(7, body=[1]), "invalid_request", "body"),
        (b'{"custom_id": "x", "body": {}, "body": {}, "url": "/v1"}', "invalid_request", "body"),
    ],
)
def test_a_file_with_a_bad_line_is_kept_with_what_is_wrong(
    database: str, connection: psycopg.Connection, bad: bytes, code: str, param: str | None
) -> None:
    data = lines(5) + bad + b"\n" + line(8)
    file = upload(database, data).file
    (problem,) = file.problems or []
    assert (problem["code"], problem["line"], problem["param"]) == (code, 6, param)
    assert problem["message"].startswith("This line is not parseable as valid JSON. ") == (code == "invalid_json_line")
    assert file.lines == 0
    assert content_of(database, file) == data
    assert counts(connection) == {"files": 1, "file_lanes": 0, "templates": 0, "file_chunks": 1}
    assert get(database, file.id) == file


def test_templates_written_before_a_bad_line_go(database: str, connection: psycopg.Connection) -> None:
    with open_upload(database) as taking:
        taking.feed(LARGE)
        taking.flush()
        assert counts(connection)["templates"] > 0
        taking.feed(b"oops\n" + line(17))
        file = taking.finish().file
    assert [(problem["code"], problem["line"]) for problem in file.problems or []] == [
        ("invalid_json_line", 6001),
        ("duplicate_custom_id", 6002),
    ]
    assert counts(connection)["templates"] == 0
    assert content_of(database, file) == LARGE + b"oops\n" + line(17)


def test_problems_are_bounded(database: str) -> None:
    data = b"oops\n" * 1_000_000
    file = upload(database, data, limits=IntakeLimits(max_reported_lines=3)).file
    assert [problem["line"] for problem in file.problems or []] == [1, 2, 3, None]
    assert content_of(database, file) == data


@pytest.mark.parametrize(
    ("data", "limits", "code"),
    [
        (lines(5), IntakeLimits(max_lines=4), "too_many_tasks"),
        (gzip.compress(lines(50))[:-20], IntakeLimits(), "invalid_request"),
        (b"PK\x03\x04 something", IntakeLimits(), "invalid_request"),
        (line(1, pad="x" * 2000), IntakeLimits(max_line_bytes=1000), "invalid_request"),
    ],
)
def test_a_file_that_cannot_be_read_is_kept_too(database: str, data: bytes, limits: IntakeLimits, code: str) -> None:
    file = upload(database, data, limits=limits).file
    assert [problem["code"] for problem in file.problems or []] == [code]
    assert content_of(database, file) == data


def test_what_is_too_large_is_refused_and_leaves_nothing(database: str, connection: psycopg.Connection) -> None:
    bomb = gzip.compress(b" " * 100_000_000)
    zeros = zstandard.ZstdCompressor().compress(b"\0" * 400_000_000)
    for data, limits in [
        (LARGE, IntakeLimits(max_upload_bytes=5_000_000)),
        (bomb, IntakeLimits(max_file_bytes=50_000_000)),
        (bomb, IntakeLimits(max_compression_ratio=100)),
        (zeros, IntakeLimits()),
    ]:
        with pytest.raises(IntakeRefused) as caught:
            upload(database, data, limits=limits)
        assert caught.value.code == "file_too_large"
        assert counts(connection) == NOTHING
    assert upload(database, bomb, purpose="user_data").file.bytes == len(bomb)


def test_an_upload_that_is_left_leaves_nothing(database: str, connection: psycopg.Connection) -> None:
    with open_upload(database) as taking:
        taking.feed(LARGE)
        taking.flush()
        assert counts(connection)["file_chunks"] > 0
    assert counts(connection) == NOTHING


def busy(connection: psycopg.Connection) -> list[Any]:
    """Other sessions on this database."""
    return connection.execute(
        "SELECT pid, state, query FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    ).fetchall()


def test_a_slow_uploader_holds_no_transaction_and_no_connection(
    database_18: str,
) -> None:
    with psycopg.connect(database_18, autocommit=True) as connection, open_upload(database_18) as taking:
        for at in range(0, len(LARGE), 65_536):
            taking.feed(LARGE[at : at + 65_536])
            if at % 10 == 0:
                wait_until(lambda: busy(connection) == [], 30)
        assert taking.finish().file.lines == 6000


def test_a_session_whose_answer_was_lost_is_closed(database_18: str) -> None:
    """A lost connection is not always known to be lost: psycopg may only say so of the statement it waited with."""
    limits = IntakeLimits()
    writer = FileWriter(database_18, owner="me", worker_id=uuid4(), filename="f", limits=limits, keep_bytes=True)
    for session in (writer.session, writer.another_session):
        with session() as lost:
            lost.pgconn.send_query(b"SELECT pg_sleep(60)")
        assert lost.closed


def test_a_key_makes_one_file(database: str, connection: psycopg.Connection) -> None:
    first = upload(database, LARGE, idempotency_key="k")
    again = upload(database, LARGE, idempotency_key="k", filename="other name")
    assert (first.existed, again.existed) == (False, True)
    assert again.file == first.file
    before = counts(connection)
    for data, purpose in ((LARGE, "user_data"), (LARGE[:-1] + b" ", "batch")):
        with pytest.raises(IdempotencyConflict):
            upload(database, data, idempotency_key="k", purpose=purpose)
    assert counts(connection) == before
    assert not upload(database, LARGE, idempotency_key="k", owner="another").existed
    assert not upload(database, LARGE, idempotency_key="k2").existed


def test_a_key_is_free_again_once_its_file_is_gone(database: str, connection: psycopg.Connection) -> None:
    first = upload(database, lines(3), idempotency_key="k").file
    connection.execute("UPDATE penstock.files SET deleted_at = now() WHERE id = %s", [first.id])
    second = upload(database, lines(4), idempotency_key="k")
    assert not second.existed
    connection.execute("UPDATE penstock.files SET expires_at = now() WHERE id = %s", [second.file.id])
    assert get(database, second.file.id) is None
    assert not upload(database, lines(5), idempotency_key="k").existed


def test_uploads_at_once_with_one_key_make_one_file(database: str, connection: psycopg.Connection) -> None:
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda _: upload(database, LARGE, idempotency_key="k"), range(4)))
    assert sorted(entry.existed for entry in done) == [False, True, True, True]
    assert len({entry.file.id for entry in done}) == 1
    assert counts(connection)["files"] == 1
    assert counts(connection)["templates"] == 6000


def test_a_file_that_was_swept_takes_no_more(database: str, connection: psycopg.Connection) -> None:
    def go_on(taking: FileIntake, finish: bool) -> None:
        taking.feed(LARGE)
        taking.finish() if finish else taking.flush()

    for finish in (False, True):
        with open_upload(database) as taking:
            taking.feed(LARGE)
            taking.flush()
            assert len(sweep_abandoned(connection, grace_s=30)) == 1
            with pytest.raises(IntakeGivenUp, match="another process gave this file up"):
                go_on(taking, finish)
        assert counts(connection) == NOTHING


def test_what_could_not_be_given_up_is_swept_although_its_worker_lives(
    database: str, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.execute(
        "INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
        " VALUES (%s, 'p', 'h', 'm', 1, 0, now(), now())",
        [WORKER],
    )
    with open_upload(database) as taking:
        taking.feed(LARGE)
        taking.flush()
        monkeypatch.setattr(taking._writer, "_conninfo", "host=/nowhere")
    assert counts(connection)["files"] == 1
    assert sweep_abandoned(connection, grace_s=30) == []
    assert sweep_leftovers(database, grace_s=30) > 0
    assert counts(connection) == NOTHING


def test_others_do_not_see_a_file(database: str) -> None:
    file = upload(database, lines(1)).file
    assert get(database, file.id, "you") is None
    assert get(database, file.id, None) == file
    assert get(database, uuid4(), None) is None


def test_a_file_deleted_while_it_is_read_ends_the_reading(database: str, connection: psycopg.Connection) -> None:
    file = upload(database, LARGE).file

    async def read() -> None:
        async with pooled(database) as pool:
            pieces = stored.content(pool, file)
            assert await anext(pieces) == LARGE[:PIECE_BYTES]
            connection.execute("DELETE FROM penstock.file_chunks")
            with pytest.raises(ContentGone):
                await anext(pieces)

    asyncio.run(read())


def _walk(database: str, change: Callable[[int], None], **options: Any) -> list[UUID]:
    async def walk() -> list[UUID]:
        seen: list[UUID] = []
        async with connected(database) as connection:
            while True:
                after = seen[-1] if seen else None
                page = await stored.list_files(connection, owner="me", after=after, limit=3, **options)
                if not page:
                    return seen
                seen += [file.id for file in page]
                change(len(seen))

    return asyncio.run(walk())


@pytest.mark.parametrize("ascending", [False, True])
def test_a_walk_neither_skips_nor_repeats_while_files_come_and_go(
    database: str, connection: psycopg.Connection, ascending: bool
) -> None:
    purposes = ["batch", "user_data"]
    made = [upload(database, lines(1), purpose=purposes[number % 2]).file.id for number in range(10)]
    upload(database, lines(1), owner="another")
    expected = made if ascending else made[::-1]

    def change(_: int) -> None:
        upload(database, lines(1), purpose="user_data")

    walked = _walk(database, lambda _: None, ascending=ascending)
    assert walked == expected
    assert _walk(database, lambda _: None, ascending=ascending, purpose="batch") == expected[ascending is False :: 2]
    gone = set(expected[4:6])

    def delete(seen: int) -> None:
        change(seen) if seen < 8 else None
        connection.execute("UPDATE penstock.files SET deleted_at = now() WHERE id = ANY (%s)", [list(gone)])

    walked = _walk(database, delete, ascending=ascending)
    assert [at for at in walked if at in made] == [at for at in expected if at not in gone]
    assert len(set(walked)) == len(walked)
