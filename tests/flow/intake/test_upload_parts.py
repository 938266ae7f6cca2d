"""Uploads in parts: any order, at once, one file in the end or none."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from penstock.config import IntakeLimits
from penstock.intake import files as stored
from penstock.intake import parts as uploads
from penstock.intake.files import FileRow
from penstock.intake.message_batch import MessageBatchIntake
from penstock.intake.pace import paced
from penstock.intake.parts import CompletedUpload, PartRow, PartWriter, UploadMissing, UploadNotPending, UploadRow
from penstock.intake.refusal import IntakeRefused
from penstock.intake.sweep import purge_failed, sweep_abandoned
from penstock.intake.writer import IdempotencyConflict
from tests.support.db import pooled, with_connection
from tests.support.wait import wait_until

WORKER = uuid4()
LIMITS = IntakeLimits()
LINES = b"".join(
    json.dumps(
        {
            "custom_id": f"id-{number}",
            "url": "/v1/embeddings",
            "body": {"model": "m", "input": random.Random(number).randbytes(300).hex()},
        }
    ).encode()
    + b"\n"
    for number in range(8_000)
)


@pytest.fixture
def connection(database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(database, autocommit=True, prepare_threshold=None) as connection:
        yield connection


def create(database: str, size: int = len(LINES), **options: Any) -> UploadRow:
    about: dict[str, Any] = {
        "owner": "me",
        "filename": "big.jsonl",
        "purpose": "batch",
        "mime_type": "text/jsonl",
        "limits": LIMITS,
    }
    return create_or_find(database, **(about | {"size": size} | options))[0]


def create_or_find(database: str, **options: Any) -> tuple[UploadRow, bool]:
    return with_connection(database, lambda connection: uploads.create_upload(connection, **options))


def get(database: str, upload_id: UUID, owner: str | None = "me", now: datetime | None = None) -> UploadRow | None:
    return with_connection(database, lambda connection: uploads.get_upload(connection, upload_id, owner, now=now))


def cancel(database: str, upload_id: UUID, owner: str = "me") -> UploadRow:
    return with_connection(database, lambda connection: uploads.cancel_upload(connection, upload_id, owner))


def writer(database: str, upload_id: UUID, **options: Any) -> PartWriter:
    about: dict[str, Any] = {"owner": "me", "worker_id": WORKER, "limits": LIMITS} | options
    return PartWriter(database, upload_id=upload_id, **about)


def add(database: str, upload_id: UUID, data: bytes, **options: Any) -> PartRow:
    with closing(writer(database, upload_id, **options)) as taking:
        for at in range(0, len(data), 300_000):
            taking.feed(data[at : at + 300_000])
        return taking.finish()


def complete(database: str, upload_id: UUID, part_ids: list[UUID], **options: Any) -> CompletedUpload:
    about: dict[str, Any] = {"owner": "me", "worker_id": WORKER, "limits": LIMITS} | options
    return uploads.complete_upload(database, upload_id=upload_id, part_ids=part_ids, **about)


def cut(data: bytes, count: int) -> list[bytes]:
    places = [0, *sorted(random.Random(count).sample(range(1, len(data)), count - 1)), len(data)]
    return [data[start:stop] for start, stop in pairwise(places)]


def content_of(database: str, file: FileRow) -> bytes:
    async def read() -> bytes:
        async with pooled(database) as pool:
            return b"".join([piece async for piece in stored.content(pool, file)])

    return asyncio.run(read())


def rows(connection: psycopg.Connection) -> dict[str, int]:
    found = {}
    for table in ("files", "templates", "file_chunks", "upload_parts"):
        (found[table],) = connection.execute(f"SELECT count(*) FROM penstock.{table}".encode()).fetchall()[0]
    return found


NOTHING = {"files": 0, "templates": 0, "file_chunks": 0, "upload_parts": 0}


def test_parts_sent_at_once_become_one_file_in_the_order_given(database: str, connection: psycopg.Connection) -> None:
    upload = create(database, expires_after_s=7200)
    assert (upload.status, upload.bytes, upload.expires_at - upload.created_at) == (
        "pending",
        len(LINES),
        timedelta(hours=1),
    )
    pieces = cut(LINES, 5)
    with ThreadPoolExecutor(5) as threads:
        parts = list(threads.map(lambda piece: add(database, upload.id, piece), pieces))
    spare = add(database, upload.id, b"not used")
    assert spare.bytes == 8
    assert [part.bytes for part in parts] == list(map(len, pieces))
    done = complete(database, upload.id, [part.id for part in parts], md5=hashlib.md5(LINES).hexdigest().upper())
    assert (done.upload.status, done.upload.file_id) == ("completed", done.file and done.file.id)
    assert done.file is not None
    assert (done.file.lines, done.file.bytes, done.file.filename) == (8_000, len(LINES), "big.jsonl")
    assert done.file.digest == hashlib.sha256(LINES).digest()
    assert done.file.expires_at == done.file.created_at + timedelta(hours=2)
    assert content_of(database, done.file) == LINES

    assert purge_failed(connection) > 0
    assert rows(connection) == {"files": 1, "templates": 8_000, "file_chunks": done.file.chunks, "upload_parts": 0}
    assert complete(database, upload.id, [part.id for part in parts]) == done
    with pytest.raises(UploadNotPending, match="is completed; expected pending"):
        add(database, upload.id, b"late")
    with pytest.raises(UploadNotPending):
        cancel(database, upload.id)


def test_completing_keeps_the_pace_and_stops(database: str) -> None:
    """Also where the lines of the file are not read."""

    class Gone(Exception):  # noqa: N818 - not an error
        pass

    def stop() -> None:
        raise Gone

    upload = create(database, purpose="user_data")
    part = add(database, upload.id, LINES)
    with paced(stop), pytest.raises(Gone):
        complete(database, upload.id, [part.id])
    assert get(database, upload.id) == upload
    assert complete(database, upload.id, [part.id]).upload.status == "completed"


def test_completing_at_once_makes_one_file(database: str, connection: psycopg.Connection) -> None:
    upload = create(database)
    parts = [add(database, upload.id, piece).id for piece in cut(LINES, 3)]
    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda _: complete(database, upload.id, parts), range(3)))
    assert done[0] == done[1] == done[2]
    purge_failed(connection)
    assert rows(connection)["files"] == 1
    assert rows(connection)["templates"] == 8_000


def test_what_does_not_fit_is_refused_and_the_upload_stays_open(database: str, connection: psycopg.Connection) -> None:
    upload = create(database)
    first, second = (add(database, upload.id, piece).id for piece in cut(LINES, 2))
    for part_ids, md5, message in [
        ([first], None, "bytes together; expected"),
        ([first, second, uuid4()], None, "the upload has no part"),
        ([first, first], None, "named twice"),
        ([], None, "0 bytes together"),
        ([first, second], "0" * 32, "md5"),
        ([second, first], hashlib.md5(LINES).hexdigest(), "md5"),
    ]:
        with pytest.raises(IntakeRefused, match=message):
            complete(database, upload.id, part_ids, md5=md5)
    assert rows(connection)["files"] == 0
    done = complete(database, upload.id, [second, first])  # lines are cut in another place: a file all the same
    assert done.file is not None
    assert done.file.problems is not None


def test_parts_have_limits(database: str, connection: psycopg.Connection) -> None:
    upload = create(database, size=100)
    with pytest.raises(IntakeRefused, match="the size of the whole upload") as caught:
        add(database, upload.id, b"x" * 101)
    assert caught.value.code == "file_too_large"
    with pytest.raises(IntakeRefused, match="max_part_bytes") as caught:
        add(database, upload.id, b"x" * 51, limits=IntakeLimits(max_part_bytes=50))
    assert caught.value.code == "file_too_large"
    with pytest.raises(IntakeRefused, match="empty"):
        add(database, upload.id, b"")
    for _ in range(3):
        add(database, upload.id, b"x" * 100)
    with pytest.raises(IntakeRefused, match="the 3 parts there are hold more than enough"):
        add(database, upload.id, b"x")
    with pytest.raises(IntakeRefused) as caught:
        create(database, size=LIMITS.max_upload_bytes + 1)
    assert caught.value.code == "file_too_large"
    upload = create(database, size=100)
    add(database, upload.id, b"x")
    with pytest.raises(IntakeRefused, match="the 1 parts"):
        add(database, upload.id, b"x", limits=IntakeLimits(max_upload_parts=1))
    assert rows(connection)["files"] == 0


def test_a_cancelled_upload_leaves_nothing(database: str, connection: psycopg.Connection) -> None:
    upload = create(database)
    parts = [add(database, upload.id, piece).id for piece in cut(LINES, 2)]
    assert cancel(database, upload.id).status == "cancelled"
    assert cancel(database, upload.id).status == "cancelled"
    assert purge_failed(connection) > 0
    assert rows(connection) == NOTHING
    with pytest.raises(UploadNotPending, match="is cancelled"):
        complete(database, upload.id, parts)
    with pytest.raises(UploadNotPending, match="is cancelled"):
        add(database, upload.id, b"late")


def test_a_part_under_way_when_its_upload_ends_is_not_added(database: str, connection: psycopg.Connection) -> None:
    upload = create(database, size=10_000_000)
    with closing(writer(database, upload.id)) as taking:
        taking.feed(random.Random(1).randbytes(6_000_000))
        cancel(database, upload.id)
        with pytest.raises(UploadNotPending, match="is cancelled"):
            taking.finish()
    assert rows(connection) == NOTHING


def test_a_part_and_a_cancel_at_once_leave_nothing_behind(database: str, connection: psycopg.Connection) -> None:
    """Whichever comes first, no part outlives its upload."""
    for _ in range(10):
        upload = create(database, size=1000)

        def part(upload_id: UUID = upload.id) -> bool:
            try:
                return bool(add(database, upload_id, b"x"))
            except UploadNotPending:
                return False

        with ThreadPoolExecutor(3) as threads:
            adding = [threads.submit(part) for _ in range(2)]
            threads.submit(cancel, database, upload.id).result()
            for one in adding:
                one.result()
        purge_failed(connection)
        assert rows(connection) == NOTHING


def test_an_upload_expires(database: str, connection: psycopg.Connection) -> None:
    upload = create(database, size=10)
    add(database, upload.id, b"x" * 5)

    def expire(after_s: float) -> int:
        now = upload.expires_at + timedelta(seconds=after_s)
        return with_connection(database, lambda connection: uploads.expire_uploads(connection, now=now))

    late = get(database, upload.id, now=upload.expires_at)
    assert late is not None
    assert late.status == "expired"
    assert expire(1) == 0, "somebody may be completing it"
    assert expire(601) == 1
    assert expire(601) == 0
    assert purge_failed(connection) == 1
    assert rows(connection) == NOTHING
    with pytest.raises(UploadNotPending, match="is expired"):
        add(database, upload.id, b"late")
    with pytest.raises(UploadNotPending, match="is expired"):
        cancel(database, upload.id)


def test_a_killed_part_is_swept(database: str, connection: psycopg.Connection) -> None:
    upload = create(database, size=10_000_000)
    taking = writer(database, upload.id)
    taking.feed(random.Random(1).randbytes(6_000_000))
    wait_until(lambda: rows(connection)["file_chunks"] == 5, 30)  # all whole pieces: none is being copied
    assert len(sweep_abandoned(connection, grace_s=30)) == 1
    assert purge_failed(connection) > 0
    assert rows(connection) == NOTHING


def test_keys(database: str, connection: psycopg.Connection) -> None:
    options = {"owner": "me", "filename": "f", "purpose": "batch", "mime_type": "t", "limits": LIMITS, "size": 10}
    first, existed = create_or_find(database, **options, idempotency_key="k")
    again, existed_again = create_or_find(database, **options, idempotency_key="k")
    assert (existed, existed_again, again) == (False, True, first)
    with pytest.raises(IdempotencyConflict):
        create_or_find(database, **(options | {"size": 11}), idempotency_key="k")
    other, existed = create_or_find(database, **(options | {"owner": "you"}), idempotency_key="k")
    assert not existed

    part = add(database, first.id, b"x", idempotency_key="p")
    assert add(database, first.id, b"x", idempotency_key="p") == part
    with pytest.raises(IdempotencyConflict):
        add(database, first.id, b"y", idempotency_key="p")
    assert add(database, other.id, b"y", idempotency_key="p", owner="you") != part
    assert rows(connection) == {"files": 0, "templates": 0, "file_chunks": 2, "upload_parts": 2}


def test_others_do_not_see_an_upload(database: str) -> None:
    upload = create(database)
    assert get(database, upload.id, "you") is None
    assert get(database, upload.id, None) == get(database, upload.id) == upload
    for forbidden in (
        lambda: cancel(database, upload.id, "you"),
        lambda: add(database, upload.id, b"x", owner="you"),
        lambda: complete(database, upload.id, [], owner="you"),
        lambda: cancel(database, uuid4()),
    ):
        with pytest.raises(UploadMissing, match="No such Upload object: upload_"):
            forbidden()


def message_batch(database: str, requests: list[Any], **options: Any) -> Any:
    body = json.dumps({"requests": requests}, indent=1).encode()
    about: dict[str, Any] = {"owner": "me", "worker_id": WORKER, "limits": LIMITS} | options
    with closing(MessageBatchIntake(database, **about)) as taking:
        for at in range(0, len(body), 10_000):
            taking.feed(body[at : at + 10_000])
        return taking.finish()


def test_a_message_batch_is_stored_as_a_file(database: str, connection: psycopg.Connection) -> None:
    requests = [{"custom_id": f"r-{n}", "params": {"model": f"m{n % 2}", "max_tokens": n}} for n in range(1000)]
    done = message_batch(database, requests, expires_after_s=60, idempotency_key="k")
    assert (done.file.lines, done.file.purpose, done.existed) == (1000, "message_batch", False)
    assert message_batch(database, requests, idempotency_key="k").file == done.file
    with pytest.raises(IdempotencyConflict):
        message_batch(database, requests[1:], idempotency_key="k")
    lanes = connection.execute("SELECT route, endpoint, total FROM penstock.file_lanes ORDER BY route").fetchall()
    assert lanes == [("m0", "/v1/messages", 500), ("m1", "/v1/messages", 500)]
    found = connection.execute("SELECT custom_id, body FROM penstock.templates ORDER BY line").fetchall()
    assert [{"custom_id": custom_id, "params": json.loads(body)} for custom_id, body in found] == requests
    assert content_of(database, done.file).count(b"\n") == 1000


def test_a_message_batch_that_is_refused_leaves_nothing(database: str, connection: psycopg.Connection) -> None:
    requests = [{"custom_id": f"r-{n}", "params": {"model": f"m{n}", "max_tokens": n}} for n in range(10)]
    with pytest.raises(IntakeRefused, match=r"^requests\.3\.params\.model: .*max_routes_per_file") as caught:
        message_batch(database, requests, limits=IntakeLimits(max_routes_per_file=3))
    assert caught.value.code == "invalid_request"
    with pytest.raises(IntakeRefused, match=r"^requests\.10\.custom_id: "):
        message_batch(database, [*requests, requests[0]])
    assert rows(connection) == NOTHING
