"""Formats: the content decides, then the name; what is neither is refused with what it looks like."""

from __future__ import annotations

import bz2

import pytest

from tests.support.tables import read_rows, refused


@pytest.mark.parametrize(
    ("data", "name", "words"),
    [
        (b"a,b\n1,2\n", "in.dat", "in.dat: the name ends in .dat, and the content looks like text"),
        (b"a,b\n1,2\n", "in", "in: the name has no ending, and the content looks like text"),
        (b"a,b\n1,2\n", "in.zip", "in.zip: the name ends in .zip, and the content looks like text"),
        (b"<!DOCTYPE html><table>", "in.xls", "in.xls: the name ends in .xls, and the content looks like HTML"),
        (b"[1]", "in.json", "in.json: the name ends in .json, and the content looks like text"),
        (bz2.compress(b"a,b\n1,2\n"), "in.csv", "in.csv: looks like bzip2"),
        (b"%PDF-1.7\n", "in.csv", "in.csv: looks like a PDF document"),
        (b"7z\xbc\xaf\x27\x1c\0", "in.7z", "in.7z: looks like a 7-Zip archive"),
        (b"BM\x36\0\0\0\0\0\0\0", "in.bmp", "in.bmp: looks like a BMP image"),
        (b"\0\0\0\x18ftypmp42", "in.mp4", "in.mp4: looks like a video"),
    ],
)
def test_what_is_no_table_is_refused(data: bytes, name: str, words: str) -> None:
    refusal = refused(data, name)
    assert words in refusal.message
    assert refusal.code == "unsupported_format"
    assert "Expected .csv" in str(refusal.hint)


@pytest.mark.parametrize("name", ["in.png", "in.zip", "in.xlsx"])
def test_an_empty_file_is_said_to_be_empty(name: str) -> None:
    refusal = refused(b"", name)
    assert (refusal.message, refusal.code) == (f"{name}: the file is empty", "empty_file")


@pytest.mark.parametrize("header", ["BMI", "BZhotel", "PAR1", "GIF", "PK", "RIFF"])
def test_a_header_may_begin_like_a_format_of_bytes(header: str) -> None:
    columns, rows = read_rows(f"{header},b\n1,2\n".encode(), "in.csv")
    assert columns == (header.lower(), "b")
    assert len(rows) == 1
