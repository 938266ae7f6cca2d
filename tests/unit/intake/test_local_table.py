"""Tables of this machine: what counts as the same input, and which files of a folder are images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.config import IntakeLimits, TableLimits
from penstock.errors import UsageError
from penstock.intake.local_table import LocalTable, find_table
from penstock.intake.tables.table import TableSpec
from tests.support.images import archive, gif, png
from tests.support.tables import typed


def paths_of(table: LocalTable) -> list[str]:
    with table.open(TableSpec(), TableLimits(), IntakeLimits()) as opened:
        return [row["path"] for row in typed(list(opened.rows()))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in {
        "b.png": png(1, 1),
        "a/ü.gif": gif(2, 2),
        "a/1.png": png(3, 3),
        ".hidden.png": b"",
        ".git/x.png": b"",
        "a/Thumbs.db": b"",
    }.items():
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "photos"


def test_a_folder_is_its_images_in_the_order_of_their_paths(folder: Path) -> None:
    table = find_table([folder])
    assert table.name == "photos"
    assert paths_of(table) == ["a/1.png", "a/ü.gif", "b.png"]
    assert table.bytes_read == table.size


def test_several_paths_keep_their_order(folder: Path) -> None:
    table = find_table([folder / "b.png", folder / "a"])
    assert paths_of(table) == [f"{folder}/{name}" for name in ("b.png", "a/1.png", "a/ü.gif")]


def test_one_file_is_a_table_an_image_or_a_zip(folder: Path) -> None:
    assert paths_of(find_table([folder / "b.png"])) == ["b.png"]
    (folder / "all.zip").write_bytes(archive(("x/y.png", png(1, 1))))
    assert paths_of(find_table([folder / "all.zip"])) == ["x/y.png"]


def test_a_change_is_seen(folder: Path) -> None:
    def told() -> tuple[dict[str, str], bytes]:
        table = find_table([folder])
        return table.origin, table.digest

    before = told()
    assert told() == before
    os.utime(folder / "b.png", ns=(1, 1))
    origin, digest = told()
    assert (origin != before[0], digest) == (True, before[1])  # touched, not changed
    (folder / "b.png").rename(folder / "c.png")
    assert told()[1] != digest
    (folder / "c.png").rename(folder / "b.png")
    assert told()[1] == digest
    (folder / "b.png").write_bytes(png(9, 9))
    assert told()[1] != digest


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.png: cannot be read: No such file"):
        paths_of(find_table([folder / "gone.png", folder / "b.png"]))
