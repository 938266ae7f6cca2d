"""Jobs over images: many files or a zip in, each image one row: its bytes for the processor, its metadata in sheets."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import openpyxl
import psycopg
import pytest

from tests.support.cli import ask, slow_down_rows
from tests.support.images import archive, gif, jpeg, png
from tests.support.jobs import items_of, job_of, until_state
from tests.support.mock_process import start_mock_process
from tests.support.server import Answered, ServerProcess, served
from tests.support.thorough import some
from tests.support.wait import wait_until

PROCESSORS = """
import hashlib

def look(item):
    return {"length": len(item.image), "digest": hashlib.sha256(item.image).hexdigest()}
"""
CONFIG = """
[[processors]]
name = "look"
function = "image_processors_of_tests:look"
"""
LOOK = {"processor": "look", "jobType": "photos"}
COLUMNS = ["path", "name", "media_type", "bytes", "width", "height", "sha256"]
FILES = [("b/2.png", png(2, 3)), ("a/1.gif", gif(4, 5)), ("photo 3.jpg", jpeg(6, 7)), ("again.png", png(2, 3))]

Files = Sequence[tuple[str, bytes]]


def serving(directory: Path, database: str, *args: str, workers: int = 1, name: str = "serve") -> Any:
    (directory / "image_processors_of_tests.py").write_text(PROCESSORS)
    (directory / "penstock.toml").write_text(CONFIG)
    path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    config = ("--config", directory / "penstock.toml", "--set", "retry_base_s=0.001", "--set", "purge_throttle_ms=0")
    options: dict[str, Any] = {"database": database, "workers": workers, "env": {"PYTHONPATH": path}, "name": name}
    return served(directory, *config, *args, **options)


@pytest.fixture
def server(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    with serving(tmp_path, database_18) as running:
        yield running


LIMITS = ("--set", "max_images=6", "--set", "max_image_bytes=65536")


@pytest.fixture
def idle(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    """A server that works nothing off, and takes few and small images."""
    with serving(tmp_path, database_18, *LIMITS, workers=0) as running:
        yield running


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    """The same, for tests that leave nothing in it."""
    with serving(tmp_path_factory.mktemp("images"), shared_database_18, *LIMITS, workers=0) as running:
        yield running


def post(server: ServerProcess, files: Files, spec: Any = LOOK, headers: dict[str, str] | None = None) -> Answered:
    """`POST /api/jobs` with some files, as a browser sends them."""
    parts = [(f'name="file"; filename="{name}"', data) for name, data in files]
    parts.insert(len(parts) // 2, ('name="spec"', json.dumps(spec).encode()))
    body = b"".join(
        b"--edge\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (head.encode(), data) for head, data in parts
    )
    told = {"content-type": "multipart/form-data; boundary=edge", **(headers or {})}
    return server.ask("POST", "/api/jobs", body + b"--edge--\r\n", headers=told)


def start(server: ServerProcess, files: Files, spec: Any = LOOK) -> str:
    answer = post(server, files, spec)
    assert answer.status == 200, answer.content
    name: str = answer.json["jobId"]
    return name


def counts(database: str) -> tuple[int, ...]:
    """Images, those with bytes, and uses."""
    with psycopg.connect(database, autocommit=True) as connection:
        tables = ("blobs", "blob_bytes", "blob_uses")
        return tuple(ask(connection, f"SELECT count(*) FROM penstock.{table}") for table in tables)


@pytest.mark.parametrize("kind", ["files", "zip"])
def test_from_images_to_a_sheet(server: ServerProcess, database_18: str, kind: str) -> None:
    zipped = [("all.zip", archive(*FILES))]
    name = start(server, FILES if kind == "files" else zipped)
    job = until_state(server, name, "DONE")
    assert (job["total"], job["failed"], job["ingest"]["rows"], job["columns"]) == (4, 0, 4, COLUMNS)
    assert job["filename"] == ("2.png" if kind == "files" else "all.zip")
    items = items_of(server, name)
    files = FILES if kind == "files" else sorted(FILES)
    for item, (path, data) in zip(items, files, strict=True):
        sha256 = hashlib.sha256(data).hexdigest()
        assert list(item["input"]) == COLUMNS
        assert (item["input"]["path"], item["input"]["name"]) == (path, path.rpartition("/")[2])
        assert (item["input"]["sha256"], item["input"]["bytes"]) == (sha256, len(data))
        assert item["result"] == {"length": len(data), "digest": sha256}
    assert counts(database_18) == (3, 3, 4)

    sheet = server.ask("POST", f"/api/jobs/{name}/export?format=csv").content
    header, *rows = csv.reader(io.StringIO(sheet.decode()))
    assert header == [*COLUMNS, "length", "digest", "status", "attempts", "error"]
    assert [row[0] for row in rows] == [path for path, _ in files]
    book = openpyxl.load_workbook(io.BytesIO(server.ask("POST", f"/api/jobs/{name}/export?format=xlsx").content))
    cells = [[str(cell) for cell in row[:-1]] for row in book.worksheets[0].iter_rows(values_only=True)]
    assert cells == [row[:-1] for row in [header, *rows]]
    # The upload can still be fetched as it came.
    (stored,) = server.ask("GET", "/v1/files?purpose=job").json["data"]
    content = server.ask("GET", f"/v1/files/{stored['id']}/content").content
    assert content == b"".join(data for _, data in (FILES if kind == "files" else zipped))


def test_a_model_is_sent_the_image(tmp_path: Path, database_18: str) -> None:
    """The mock's answer has a digest of the request in it: it differs where the image does."""
    with start_mock_process() as mock, serving(tmp_path, database_18, "--base-url", mock.base_url) as server:
        chat = {"type": "chat", "provider": "default", "model": "small", "prompt": "What is this?"}
        name = start(server, FILES, {"processor": chat})
        until_state(server, name, "DONE")
        answers = [item["result"]["answer"] for item in items_of(server, name)]
    assert all("What is this?" in answer for answer in answers)
    assert answers[0] == answers[3]
    assert len(set(answers)) == 3


def test_images_wait_for_room_in_memory(tmp_path: Path, database_18: str) -> None:
    """More of them than a worker may hold at once, some larger than that alone."""
    files = [(f"{number}.png", png(1, number + 1, os.urandom(size))) for number, size in enumerate([30_000] * 9)]
    files += [("large.png", png(1, 1, os.urandom(200_000))), *((f"{n}.gif", gif(n, n)) for n in range(1, 9))]
    with serving(tmp_path, database_18, "--set", "ready_max_bytes=65536") as server:
        name = start(server, files)
        job = until_state(server, name, "DONE")
        assert (job["total"], job["failed"]) == (len(files), 0)
        results = [item["result"]["digest"] for item in items_of(server, name)]
    assert results == [hashlib.sha256(data).hexdigest() for _, data in files]


def test_an_image_stays_as_long_as_a_job_has_it(idle: ServerProcess, database_18: str) -> None:
    first, second = start(idle, FILES), start(idle, FILES[:2])
    for name in (first, second):
        until_state(idle, name, "QUEUED")
    assert counts(database_18) == (3, 3, 6)
    assert idle.ask("DELETE", f"/api/jobs/{first}").status == 204
    wait_until(lambda: counts(database_18) == (2, 2, 2), 30)
    assert [item["input"]["path"] for item in items_of(idle, second)] == ["b/2.png", "a/1.gif"]
    assert idle.ask("DELETE", f"/api/jobs/{second}").status == 204
    wait_until(lambda: counts(database_18) == (0, 0, 0), 30)
    with psycopg.connect(database_18, autocommit=True) as connection:
        for place in ("templates", "file_chunks", "jobs", "files", "batches", "erasure_pieces"):
            wait_until(partial(_is_empty, connection, place), 30)


def _is_empty(connection: psycopg.Connection, place: str) -> bool:
    return ask(connection, f"SELECT count(*) FROM penstock.{place}") == 0


def test_a_key_stands_for_the_files_and_their_names(idle: ServerProcess) -> None:
    key = {"idempotency-key": "once"}
    first, again = (post(idle, FILES, headers=key) for _ in range(2))
    assert first.json == again.json
    renamed = [("other.png", FILES[0][1]), *FILES[1:]]
    assert post(idle, renamed, headers=key).status == 409


BOMB = archive(("a.png", png(1, 1)), ("bomb.png", png(1, 1, bytes(4 << 20))))


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        (
            [("a.csv", b"a,b\n1,2\n"), ("b.csv", b"a,b\n1,2\n")],
            400,
            '"a.csv": not an image; it looks like text; several',
        ),
        ([*FILES, ("notes.txt", b"hello")], 400, 'upload: "notes.txt": not an image; it looks like text'),
        ([*FILES, ("c.zip", archive(*FILES))], 400, 'upload: "c.zip": a zip archive inside the upload'),
        ([*FILES, FILES[0]], 400, 'upload: "b/2.png": 2 images have this path'),
        ([*FILES, ("empty.png", b"")], 400, 'upload: "empty.png": not an image; it looks like an empty file'),
        (
            [*FILES, ("big.png", png(1, 1, bytes(1 << 17)))],
            400,
            '"big.png": larger than 65,536 bytes (max_image_bytes)',
        ),
        ([(f"{n}.png", png(1, 1)) for n in range(7)], 400, "'file' is given more than 6 times."),
        ([("a.zip", archive(*((f"{n}.png", png(1, 1)) for n in range(7))))], 413, "7 images; more than 6 (max_images)"),
        ([("a.zip", BOMB)], 413, '"bomb.png" expands more than 200 times (max_zip_ratio)'),
        ([("a.zip", archive(("b.zip", archive(*FILES))))], 400, 'a.zip: "b.zip": a zip archive inside the upload'),
        ([("a.zip", archive(("../a.png", png(1, 1))))], 400, "a path that leads out of the archive"),
        ([("a.zip", archive(*FILES)[:-30])], 400, "a.zip: the zip archive is damaged"),
    ],
)
def test_what_cannot_be_taken_is_said_and_leaves_nothing(
    refusing: ServerProcess, shared_database_18: str, files: Files, status: int, words: str
) -> None:
    refused = post(refusing, files)
    assert refused.status == status, refused.content
    assert words in refused.json["error"]["message"]
    with psycopg.connect(shared_database_18, autocommit=True) as connection:
        assert ask(connection, "SELECT count(*) FROM penstock.files WHERE state = 'ready'") == 0
        assert ask(connection, "SELECT count(*) FROM penstock.batches") == 0
    assert counts(shared_database_18) == (0, 0, 0)


@pytest.mark.parametrize("kind", some(["zip", "files"], 1))
def test_an_ingest_that_dies_goes_on_elsewhere(tmp_path: Path, database_18: str, kind: str) -> None:
    """Killed between two blocks of images: every image is a row once, and stored once."""
    images = 12
    files = [(f"{number:02}.png", png(1, number + 1, os.urandom(1 << 20))) for number in range(images)]
    liveness = ("--set", "heartbeat_interval_s=0.3", "--set", "heartbeat_grace_s=2")
    with psycopg.connect(database_18, autocommit=True) as connection:
        slow_down_rows(connection, 2)
        with serving(tmp_path, database_18, *liveness, name="first") as first:
            name = start(first, files if kind == "files" else [("all.zip", archive(*files))])
            wait_until(lambda: job_of(first, name)["ingest"]["rows"] > 0, 30)
            first.process.kill()
        connection.execute("DROP TRIGGER slow ON penstock.templates")
        assert 0 < ask(connection, "SELECT rows FROM penstock.jobs") < images
        with serving(tmp_path, database_18, *liveness, name="second") as second:
            job = until_state(second, name, "DONE")
            assert (job["total"], job["failed"]) == (images, 0)
            results = [item["result"]["digest"] for item in items_of(second, name)]
    assert results == [hashlib.sha256(data).hexdigest() for _, data in files]
    assert counts(database_18) == (images, images, images)


def test_a_job_that_is_cancelled_while_it_is_read_is_read_no_further(tmp_path: Path, database_18: str) -> None:
    files = [(f"{number:02}.png", png(1, number + 1, os.urandom(1 << 20))) for number in range(12)]
    with psycopg.connect(database_18, autocommit=True) as connection, serving(tmp_path, database_18) as server:
        slow_down_rows(connection, 2)
        name = start(server, files)
        wait_until(lambda: job_of(server, name)["ingest"]["rows"] > 0, 30)
        assert server.ask("POST", f"/api/jobs/{name}/cancel").status == 200
        wait_until(lambda: bool(job_of(server, name)["ingest"]["done"]), 30)
        job = until_state(server, name, "CANCELLED")
        assert 0 < job["total"] == job["ingest"]["rows"] < 12
