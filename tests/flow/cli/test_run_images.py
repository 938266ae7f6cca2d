"""`penstock run` over images: a folder, a zip or several files in, a sheet of all of them out."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from penstock.intake.sweep import purge_failed
from tests.support.cli import call_count, opened, run_cli, start_cli
from tests.support.images import archive, gif, jpeg, png
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.prepared import Prepared
from tests.support.thorough import some
from tests.support.wait import wait_until

FUNCTION = """
import hashlib

def look(item):
    return {"digest": hashlib.sha256(item.image).hexdigest()}
"""
FILES = {"a/1.png": png(1, 2), "b.gif": gif(3, 4), "c.jpg": jpeg(5, 6)}
LOOK = ("--processor", "looks:look", "-o", "out.csv")
COLUMNS = ["path", "name", "media_type", "bytes", "width", "height", "sha256"]


@pytest.fixture
def site(tmp_path: Path, prepared: Prepared) -> Path:
    """A directory with a database, a module `looks` and a folder `photos`."""
    prepared(tmp_path / ".penstock")
    return furnish(tmp_path)


def furnish(tmp_path: Path) -> Path:
    (tmp_path / "looks.py").write_text(FUNCTION)
    for name, data in FILES.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path


@pytest.fixture
def mock() -> Iterator[MockProcess]:
    with start_mock_process() as upstream:
        yield upstream


def read_sheet(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def counts(site: Path) -> tuple[int, ...]:
    """Images, those with bytes, and uses."""
    with opened(site / ".penstock") as connection:
        return count_rows(connection, "blobs", "blob_bytes", "blob_uses")


def count_rows(connection: psycopg.Connection, *tables: str) -> tuple[int, ...]:
    query = ", ".join(f"(SELECT count(*) FROM penstock.{table})" for table in tables)
    found = connection.execute(f"SELECT {query}".encode()).fetchone()
    assert found is not None
    return found


@pytest.mark.parametrize("workers", some(["2", "1"], 1))
def test_a_function_for_each_image_of_a_folder(site: Path, workers: str) -> None:
    run_cli("run", "photos", *LOOK, "--workers", workers, cwd=site).expect(0)
    rows = read_sheet(site / "out.csv")
    assert list(rows[0]) == [*COLUMNS, "digest", "status", "attempts", "error"]
    assert [row["path"] for row in rows] == list(FILES)
    assert [row["digest"] for row in rows] == [hashlib.sha256(data).hexdigest() for data in FILES.values()]
    assert [row["sha256"] for row in rows] == [row["digest"] for row in rows]


def test_a_prompt_for_each_image(site: Path, mock: MockProcess) -> None:
    ask = ("--base-url", mock.base_url, "--model", "small", "--prompt", "What is {{ name }}?", "-o", "out.csv")
    (site / "all.zip").write_bytes(archive(*FILES.items()))
    for images in (["photos"], ["all.zip"], [f"photos/{name}" for name in FILES]):
        run_cli("run", *images, *ask, cwd=site).expect(0)
        rows = read_sheet(site / "out.csv")
        assert [row["name"] for row in rows] == ["1.png", "b.gif", "c.jpg"]
        assert all(f"What is {row['name']}?" in row["answer"] for row in rows)
    # The archive has the folder's rows: they are not called again. By their own names they are others.
    assert counts(site) == (3, 3, 6)
    assert call_count(mock) == 6
    run_cli("run", "photos", *ask, cwd=site).expect(0)
    assert call_count(mock) == 6


def test_a_dry_run_shows_the_image_and_sends_nothing(site: Path, mock: MockProcess) -> None:
    ask = ("--base-url", mock.base_url, "--model", "small", "--prompt", "What is this?", "--dry-run")
    _, _, body = run_cli("run", "photos", *ask, cwd=site).expect(0).stdout.partition("\n")
    text, image = json.loads(body)["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert call_count(mock) == 0


@pytest.mark.again
def test_a_killed_run_goes_on(site: Path) -> None:
    folder = site / "many"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number:03}.png").write_bytes(png(1, number + 1, os.urandom(2_000)))
    with start_mock_process("--latency", "20ms") as slow:
        ask = ("--base-url", slow.base_url, "--model", "small", "--prompt", "{{ path }}", "--concurrency", "4")
        command = ("run", "many", *ask, "-o", "out.csv")
        with start_cli(*command, cwd=site) as process:
            wait_until(lambda: call_count(slow) > 40, 60)
            process.kill()
        run_cli(*command, cwd=site).expect(0)
    rows = read_sheet(site / "out.csv")
    assert [row["path"] for row in rows] == [f"{number:03}.png" for number in range(300)]
    assert {row["status"] for row in rows} == {"DONE"}
    assert counts(site) == (300, 300, 300)


def test_a_changed_folder_is_run_anew(site: Path) -> None:
    run_cli("run", "photos", *LOOK, cwd=site).expect(0)
    (site / "photos" / "0.png").write_bytes(png(7, 8))
    ended = run_cli("run", "photos", *LOOK, cwd=site).expect(0)
    assert "photos has changed since" in ended.stderr
    assert [row["path"] for row in read_sheet(site / "out.csv")] == ["0.png", *FILES]


@pytest.mark.parametrize(
    ("images", "options", "words"),
    [
        (["photos"], LOOK, 'photos: "z.txt": not an image; it looks like text'),
        (["photos/b.gif", "gone.png"], LOOK, "gone.png: no such file"),
        (["photos/b.gif", "looks.py"], LOOK, '"looks.py": not an image'),
        (["photos/a", "photos/a/1.png"], LOOK, '"photos/a/1.png": 2 images have this path'),
        (["photos"], ("--processor", "looks:look", "-o", "photos/out.csv"), "would lie among the images of photos"),
        (["photos/a/1.png"], ("--processor", "looks:look", "-o", "x.txt"), "its ending names no format of sheets"),
        (["empty"], LOOK, "empty: holds no images"),
        (["photos"], (*LOOK, "--set", "max_images=2"), "4 images; more than 2 (max_images)"),
        (["photos"], (*LOOK, "--set", "max_image_bytes=1024"), '"b2.png": larger than 1,024 bytes (max_image_bytes)'),
        (["bomb.zip"], LOOK, '"bomb.png" expands more than 200 times (max_zip_ratio)'),
    ],
)
def test_what_cannot_be_taken_is_said_and_leaves_nothing(
    tmp_path: Path, shared_database_18: str, images: list[str], options: tuple[str, ...], words: str
) -> None:
    site = furnish(tmp_path)
    large = "max_image_bytes=1024" in options
    (site / "photos" / ("b2.png" if large else "z.txt")).write_bytes(png(1, 1, bytes(2_000)) if large else b"hello")
    (site / "empty").mkdir()
    (site / "bomb.zip").write_bytes(archive(("bomb.png", png(1, 1, bytes(4 << 20)))))
    run_cli("run", *images, *options, "--database-url", shared_database_18, cwd=site).refuses(2, words)
    with psycopg.connect(shared_database_18, autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM penstock.files WHERE state <> 'failed'").fetchone() == (0,)
        purge_failed(connection)  # rows that take longer than a moment to delete are left to this sweep
        assert count_rows(connection, "files", "blobs", "blob_bytes", "blob_uses") == (0, 0, 0, 0)


def test_what_was_stored_before_a_refusal_goes(site: Path) -> None:
    """Images are stored some megabytes at a time: the first of these are there before the last is read."""
    for number in range(6):
        (site / "photos" / f"c{number}.png").write_bytes(png(1, number + 1, os.urandom(1 << 20)))
    (site / "photos" / "z.txt").write_text("hello")
    run_cli("run", "photos", *LOOK, cwd=site).refuses(2, '"z.txt": not an image')
    with opened(site / ".penstock") as connection:
        assert connection.execute("SELECT count(*) FROM penstock.files WHERE state <> 'failed'").fetchone() == (0,)
        purge_failed(connection)  # what takes longer than a moment to delete is left to this sweep
        assert count_rows(connection, "files", "blobs", "blob_bytes", "blob_uses") == (0, 0, 0, 0)
