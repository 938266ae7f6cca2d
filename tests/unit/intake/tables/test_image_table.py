"""Images: what their headers say, and archives that are not what they should be."""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import KIB, MIB, IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.stored_bytes import StoredBytes
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.image_size import image_size
from penstock.intake.tables.image_table import ImageTable
from penstock.intake.tables.table import TableSpec
from tests.support.images import archive, gif, jpeg, png, webp_extended, webp_lossless, webp_lossy
from tests.support.tables import read_rows, refused, typed

FORMS = {
    "png": (png, "image/png"),
    "gif": (gif, "image/gif"),
    "jpeg": (jpeg, "image/jpeg"),
    "webp": (webp_lossy, "image/webp"),
    "webp lossless": (webp_lossless, "image/webp"),
    "webp extended": (webp_extended, "image/webp"),
}


@given(st.sampled_from(sorted(FORMS)), st.integers(1, 16_383), st.integers(1, 16_383))
def test_width_and_height_come_from_the_header(form: str, width: int, height: int) -> None:
    make, media_type = FORMS[form]
    assert image_size(make(width, height), media_type) == (width, height)


@given(st.sampled_from(sorted({media_type for _, media_type in FORMS.values()})), st.binary(max_size=64))
def test_any_header_gives_a_size_or_is_damaged(media_type: str, data: bytes) -> None:
    with suppress(ValueError):
        assert min(image_size(data, media_type)) > 0


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_one_row(form: str) -> None:
    make, media_type = FORMS[form]
    data = make(640, 480)
    columns, rows = read_rows(data, "photo.bin")
    sha256 = hashlib.sha256(data).hexdigest()
    assert columns == ("path", "name", "media_type", "bytes", "width", "height", "sha256")
    assert list(typed(rows)[0].values()) == ["photo.bin", "photo.bin", media_type, len(data), 640, 480, sha256]
    assert rows[0].custom_id == rows[0].summary == "photo.bin"
    assert rows[0].blob == (sha256, data, media_type)


@pytest.mark.parametrize("form", FORMS)
def test_an_image_that_ends_too_early_is_refused_wherever_it_ends(form: str) -> None:
    data = FORMS[form][0](640, 480)
    for size in range(16, len(data)):
        refusal = refused(data[:size], "photo.bin")
        assert refusal.code == "corrupt_file"
        assert "cut short" in refusal.message or "header is damaged" in refusal.message
    assert len(read_rows(data + b"what some cameras add", "photo.bin")[1]) == 1


@pytest.mark.parametrize(("make", "side"), [(png, 2**31), (png, 65_536), (webp_extended, 2**24)])
def test_an_image_of_an_impossible_size_is_refused(make: Callable[[int, int], bytes], side: int) -> None:
    assert f"{side:,} x 1 pixels; more than 65,535 on a side (max_image_side)" in refused(make(side, 1), "a").message
    assert read_rows(png(65_535, 1), "a.png", limits=TableLimits(max_image_side=65_535))


def test_an_empty_archive_holds_no_images_where_its_bytes_are_stored() -> None:
    data = archive()
    file = io.BufferedReader(StoredBytes(lambda _: data, len(data)))
    with (
        pytest.raises(IntakeRefused, match=r"in\.zip: holds no images"),
        open_table(file, "in.zip", TableSpec(), TableLimits(), IntakeLimits()),
    ):
        pass


def several(files: list[tuple[str, bytes]], limits: TableLimits | None = None) -> ImageTable:
    images = [(path, lambda data=data: data) for path, data in files]
    return ImageTable("upload", images, limits or TableLimits(), IntakeLimits(), several=True)


def test_several_files_are_rows_in_their_order() -> None:
    rows = list(several([("b/2.png", png(1, 2)), ("a/1.gif", gif(3, 4))]).rows())
    assert [(row["path"], row["name"], row["width"]) for row in typed(rows)] == [
        ("b/2.png", "2.png", 1),
        ("a/1.gif", "1.gif", 3),
    ]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            [("a.csv", b"a,b\n"), ("b.csv", b"a,b\n")],
            '"a.csv": not an image; it looks like text; several files at once',
        ),
        ([("a.png", png(1, 1)), ("b.zip", archive(("c.png", png(1, 1))))], '"b.zip": a zip archive inside the upload'),
        ([("a.png", png(1, 1)), ("a.png", png(1, 1))], '"a.png": 2 images have this path'),
        ([("a.png", png(1, 1)), ("b.png", png(1, 1, bytes(2000)))], '"b.png": larger than 1,024 bytes'),
    ],
)
def test_what_is_no_image_among_several_is_named(files: list[tuple[str, bytes]], words: str) -> None:
    with pytest.raises(IntakeRefused, match=f"upload: {re.escape(words)}"):
        list(several(files, TableLimits(max_image_bytes=KIB)).rows())


def test_a_zip_is_rows_in_the_order_of_paths() -> None:
    data = archive(
        ("z.png", png(1, 1)),
        ("dir/", b""),
        ("dir/ü.gif", gif(2, 2)),
        ("__MACOSX/dir/._ü.gif", b"litter"),
        ("dir/.DS_Store", b"litter"),
        (".git/config.png", b"litter"),
        ("dir/Thumbs.db", b"litter"),
        ("a\\b.png", png(3, 3)),
        ("plain.webp", webp_lossy(4, 4)),
    )
    columns, rows = read_rows(data, "in.zip")
    assert len(columns) == 7
    assert [row.custom_id for row in rows] == ["a/b.png", "dir/ü.gif", "plain.webp", "z.png"]
    assert [row["width"] for row in typed(rows)] == [3, 2, 4, 1]
    assert read_rows(data, "in.zip") == (columns, rows)


def with_flag(data: bytes) -> bytes:
    """The archive with its first entry marked as encrypted, in its header and in the directory."""
    changed = bytearray(data)
    changed[6] |= 1
    changed[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(changed)


def declared(data: bytes, size: int) -> bytes:
    """The archive with another unpacked size declared for its only entry."""
    changed = bytearray(data)
    struct.pack_into("<I", changed, 22, size)
    struct.pack_into("<I", changed, data.index(b"PK\x01\x02") + 24, size)
    return bytes(changed)


ONE = archive(("a.png", png(1, 1)))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (archive(), "in.zip: holds no images"),
        (archive(("dir/", b""), ("__MACOSX/a.png", b"")), "in.zip: holds no images"),
        (archive(("a.png", png(1, 1)), ("b.zip", ONE)), 'in.zip: "b.zip": a zip archive inside the upload'),
        (archive(("../a.png", png(1, 1))), 'in.zip: "../a.png": a path that leads out of the archive'),
        (archive(("/a.png", png(1, 1))), 'in.zip: "/a.png": a path that leads out of the archive'),
        (archive(("..\\a.png", png(1, 1))), "a path that leads out of the archive"),
        (archive(("C:\\a.png", png(1, 1))), "a path that leads out of the archive"),
        (archive(("a.png", png(1, 1)), ("x.pdf", b"%PDF-1.7 ")), 'in.zip: "x.pdf": not an image; it looks like a PDF'),
        (archive(("x.svg", b"<?xml?><svg/>")), '"x.svg": not an image; it looks like an SVG image'),
        (archive(("x.heic", b"\0\0\0\x18ftypheic")), '"x.heic": not an image; it looks like a HEIC image'),
        (archive(("x.png", b"")), '"x.png": not an image; it looks like an empty file'),
        (archive(("x.txt", b"hello")), '"x.txt": not an image; it looks like text'),
        (archive(("x.png", png(1, 1)[:20])), '"x.png": damaged: its header is cut short'),
        (archive(("x.png", png(0, 1))), '"x.png": damaged: its header says that it has no pixels'),
        (archive(("x.jpg", b"\xff\xd8\xff\xe0\0\x04ab no marker")), '"x.jpg": damaged: its header is damaged'),
        (archive(("a\x01.png", png(1, 1))), "a path with control characters"),
        (archive(("a" * 600 + ".png", png(1, 1))), "a path of 604 characters; expected 1 to 512 characters"),
        (with_flag(ONE), 'in.zip: "a.png": encrypted'),
        (archive(("a.png", png(1, 1)), method=zipfile.ZIP_LZMA), '"a.png": compressed by method 14'),
        (declared(ONE, 20), 'in.zip: "a.png": damaged: Bad CRC-32'),
        (ONE[:40] + b"\xff" + ONE[41:], 'in.zip: "a.png": damaged: '),
        (b"PK\x03\x04 and then nothing", "in.zip: the zip archive is damaged"),
    ],
)
def test_what_is_no_archive_of_images_is_refused_by_name(data: bytes, words: str) -> None:
    assert words in refused(data, "in.zip").message


def test_two_images_of_one_path_are_refused() -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = archive(("a.png", png(1, 1)), ("a.png", png(2, 2)))
    assert 'in.zip: "a.png": 2 images have this path' in refused(data, "in.zip").message


def test_a_large_image_is_no_large_directory() -> None:
    limits = TableLimits(max_zip_entries=1)
    assert typed(read_rows(stored(200_000), "in.zip", limits=limits)[1])[0]["bytes"] > 200_000


def stored(size: int) -> bytes:
    return archive(("big.png", png(1, 1, bytes(size))), method=zipfile.ZIP_STORED)


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (archive(("a.png", png(1, 1)), ("b.png", png(1, 1))), TableLimits(max_images=1), "2 images; more than 1 (max"),
        (archive(("a.png", png(1, 1)), ("b.png", png(1, 1))), TableLimits(max_zip_entries=1), "(max_zip_entries)"),
        (stored(2000), TableLimits(max_image_bytes=KIB), '"big.png": larger than 1,024 bytes (max_image_bytes)'),
        (stored(2000), TableLimits(max_unpacked_bytes=KIB), "more than 1,024 bytes when unpacked (max_unpacked_bytes)"),
        (
            archive(("bomb.png", png(1, 1, bytes(4 * MIB)))),
            TableLimits(),
            '"bomb.png" expands more than 200 times (max_zip_ratio)',
        ),
        # A directory that lies about the size gives no more than it says.
        (declared(archive(("bomb.png", png(1, 1, bytes(4 * MIB)))), 64), TableLimits(), '"bomb.png": damaged: Bad CRC'),
    ],
)
def test_limits_hold(data: bytes, limits: TableLimits, words: str) -> None:
    assert words in refused(data, "in.zip", limits=limits).message
