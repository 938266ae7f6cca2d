"""CSV: any usual dialect and encoding gives the cells that were written; all else is refused with its place."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import tracemalloc
from contextlib import suppress
from typing import BinaryIO, Literal, cast

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import MIB, IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.dialect import SAMPLE_BYTES
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.table import TableSpec
from tests.support.tables import raw, read_rows, refused, typed
from tests.support.thorough import thorough

CELL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
SPECIAL = st.text('ab",;\t|\r\n \u2028é', max_size=6)


@st.composite
def tables(draw: st.DrawFn) -> list[list[str]]:
    width = draw(st.integers(1, 4))
    cells = st.lists(CELL | SPECIAL, min_size=width, max_size=width)
    rows = cells.filter(lambda row: any(cell.strip() for cell in row))
    return draw(st.lists(rows, min_size=1, max_size=8))


@given(
    tables(),
    st.sampled_from(",;\t|"),
    # Python 3.11 writes a \r without quotes unless lines end in it.
    st.sampled_from(
        [("\n", csv.QUOTE_ALL), ("\r", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)]
    ),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_cells_come_back_as_they_were_written(
    table: list[list[str]], delimiter: str, style: tuple[str, Literal[0, 1]], encoding: str
) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=style[0], quoting=style[1])
    header = [f"h{place}" for place in range(len(table[0]))]
    writer.writerows([header, *table])
    spec = TableSpec(delimiter=delimiter if len(header) == 1 else None)
    columns, rows = read_rows(text.getvalue().encode(encoding), "in.csv", spec)
    assert columns == tuple(header)
    assert raw(rows) == table
    assert [row.custom_id for row in rows] == [str(number) for number in range(1, len(table) + 1)]


class Cut(io.BytesIO):
    """A file that is read in small pieces from behind the sample on."""

    def __init__(self, data: bytes, piece_bytes: int) -> None:
        super().__init__(data)
        self._piece_bytes = piece_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        return super().read(min(size, max(SAMPLE_BYTES - self.tell(), self._piece_bytes)))


@given(tables(), st.integers(1, 5), st.sampled_from(["utf-8", "utf-16"]), st.sampled_from(["\n", "\r\n", "\r"]))
def test_pieces_may_be_cut_anywhere(table: list[list[str]], piece_bytes: int, encoding: str, line_end: str) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=line_end, quoting=csv.QUOTE_ALL)
    fills_the_sample = "x" * (SAMPLE_BYTES // (2 if encoding == "utf-16" else 1) - 30)
    writer.writerows([["h"] * len(table[0]), [fills_the_sample] + ["y"] * (len(table[0]) - 1), *table])
    file = Cut(text.getvalue().encode(encoding), piece_bytes)
    assert raw(read_rows(file, "in.csv", TableSpec(delimiter=","))[1])[1:] == table


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_found(delimiter: str) -> None:
    lines = ["a{0}b{0}c", '"x, y; z"{0}1,5{0}"p|q"', "{0}2,5{0}last"]
    data = "\n".join(lines).replace("{0}", delimiter)
    if delimiter == ",":
        data = data.replace("1,5", '"1,5"').replace("2,5", '"2,5"')
    columns, rows = read_rows(data.encode(), "in.csv")
    assert columns == ("a", "b", "c")
    assert raw(rows) == [["x, y; z", "1,5", "p|q"], ["", "2,5", "last"]]


def test_a_single_column_of_sentences_is_one_column() -> None:
    columns, rows = read_rows(b"text\nhello, world\none, two, three\n", "in.txt")
    assert columns == ("text",)
    assert raw(rows) == [["hello, world"], ["one, two, three"]]


def test_a_tsv_is_separated_by_tabs_whatever_else_it_holds() -> None:
    columns, rows = read_rows(gzip.compress(b"a,b,c\td\n1,2,3\t4\n"), "in.TSV.gz")
    assert columns == ("a_b_c", "d")
    assert typed(rows) == [{"a_b_c": "1,2,3", "d": 4}]


def test_rows_are_typed_and_summed_up() -> None:
    columns, rows = read_rows(b"ID,Title,Price\n 007 ,Lamp, 9.50 \n8,,true\n", "in.csv")
    assert columns == ("id", "title", "price")
    assert rows[0].body == b'{"row":{"id":"007","title":"Lamp","price":9.5},"raw":[" 007 ","Lamp"," 9.50 "]}'
    assert [row.summary for row in rows] == ["Lamp", "8 · true"]
    assert typed(rows)[1] == {"id": 8, "title": None, "price": True}


def test_blank_lines_and_rows_of_nothing_are_skipped() -> None:
    columns, rows = read_rows(b"\n  \na;b\n\n1;2\n;\n   \n ; \n3;4\n\n", "in.csv")
    assert columns == ("a", "b")
    assert raw(rows) == [["1", "2"], ["3", "4"]]
    assert [row.custom_id for row in rows] == ["1", "2"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_the_encoding_is_found(encoding: str) -> None:
    data = "name;preis\r\nJürgen Müßig;5 €\r\n".encode(encoding)
    assert raw(read_rows(data, "in.csv")[1]) == [["Jürgen Müßig", "5 €"]]


def test_big_endian_utf_16_and_stated_encodings() -> None:
    text = "名前,b\n東京,2\n"
    assert typed(read_rows(codecs.BOM_UTF16_BE + text.encode("utf-16-be"), "in.csv")[1]) == [{"名前": "東京", "b": 2}]
    for encoding in ("shift_jis", "utf-16-le", "gb18030"):
        rows = read_rows(text.encode(encoding), "in.csv", TableSpec(encoding=encoding))[1]
        assert typed(rows) == [{"名前": "東京", "b": 2}]


def test_a_character_may_be_cut_by_the_sample_and_by_every_piece() -> None:
    data = ("a,b\n" + "x€,ü\n" * 40_000).encode()
    rows = read_rows(data, "in.csv")[1]
    assert len(rows) == 40_000
    assert set(map(tuple, raw(rows))) == {("x€", "ü")}


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_packed_text_is_unpacked(pack: object) -> None:
    assert callable(pack)
    ending = "gz" if pack is gzip.compress else "zst"
    data = pack("a;b\n1;ä\n".encode("utf-16"))
    assert typed(read_rows(data, f"in.csv.{ending}")[1]) == [{"a": 1, "b": "ä"}]


def test_reading_again_gives_the_same_rows() -> None:
    data = b"a;b\n" + b"".join(b'%d;"x\n%d"\n' % (number, number) for number in range(3000))
    assert read_rows(data, "in.csv") == read_rows(data, "in.csv")


def test_a_cell_larger_than_the_csv_module_would_take() -> None:
    cell = "x" * 300_000
    assert raw(read_rows(f'a,b\n1,"{cell}"\n'.encode(), "in.csv")[1]) == [["1", cell]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "in.csv: holds no rows"),
        (b"\n\n", "in.csv: holds no rows"),
        (b"a,b\n", "in.csv: holds no rows"),
        (b"a,b\n\n ,\n", "in.csv: holds no rows"),
        (b'a,b\n"x\ny",1\n\n1,2,3\n', "in.csv: row 2 (line 5): 3 cells; the header has 2"),
        (b"a,b\n1,2\n1\n", "in.csv: row 2 (line 3): 1 cell; the header has 2"),
        (b'a,b\n1,2\n"x"y,2\n', "in.csv: row 2 (line 3): text follows a closing quote"),
        (b'a,b\n1,2\n3,"x\n4,5\n', "in.csv: row 2 (line 3): a quote is opened and never closed"),
        (b'"a,b\n1,2\n', "in.csv: the header (line 1): a quote is opened and never closed"),
        (b"a,b\n1,2\n3,\0\n", "in.csv: line 3: a null byte"),
        ("a,b\n1,2\n".encode("utf-16-le"), "in.csv: line 1: a null byte"),
        (b"a,b\n\x81\xff,2\n", "in.csv: byte 5 (0x81) is not valid UTF-8, and the text is not Windows-1252 either"),
        (b"a,b\n\x01\xff,2\n", "in.csv: byte 6 (0xff) is not valid UTF-8"),
        (b"a,b\n" + b"x,y\n" * 20_000 + b"\xfc,y\n", "in.csv: line 20,002, byte 80,005 of the file (0xfc)"),
        (b"\xef\xbb\xbfa,b\n" + b"x,y\n" * 40_000 + b"q,\xfc", "line 40,002, byte 160,010 of the file (0xfc)"),
        (b"a,b\n" + b"x,y\n" * 20_000 + b"z,\xe2\x82", "line 20,002, byte 80,007 of the file (0xe2)"),
        (b"a\xfc,b\n" + b"x,y\n" * 20_000 + b"\x81,y\n", "(0x81): not valid cp1252"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_its_place(data: bytes, words: str) -> None:
    assert words in refused(data, "in.csv").message


def test_a_refused_row_is_listed_by_its_line() -> None:
    (bad,) = refused(b"a,b\n\n1,2,3\n", "in.csv").bad_lines
    assert (bad.line, bad.reason) == (3, "3 cells; the header has 2")


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (b"a,b\n1,2\n3,4\n", TableLimits(max_rows=1), "in.csv: more than 1 rows (max_rows)"),
        (b"a,b,c\n1,2,3\n", TableLimits(max_columns=2), "the header (line 1): more than 2 columns (max_columns)"),
        (
            b"a,b\n1,2\n3,%b\n" % (b"x" * 100),
            TableLimits(max_cell_bytes=64),
            "row 2 (line 3): cell 2 is longer than 64 bytes (max_cell_bytes)",
        ),
        (
            b"a,b\n1,%b\n" % ("ü" * 40).encode(),
            TableLimits(max_cell_bytes=64),
            "row 1 (line 2): cell 2 is longer than 64 bytes (max_cell_bytes)",
        ),
        (
            b"a,b\n1,%b\n" % (b"x" * 600),
            TableLimits(max_row_bytes=1024),
            "row 1 (line 2): larger than 1,024 bytes (max_row_bytes)",
        ),
    ],
)
def test_limits_hold(data: bytes, limits: TableLimits, words: str) -> None:
    assert words in refused(data, "in.csv", limits=limits).message


def test_a_type_that_does_not_fit_names_row_line_and_column() -> None:
    refusal = refused(b"a;b\n1;2\n\n1;x\n", "in.csv", TableSpec(types={"b": "integer"}))
    assert refusal.message.startswith('in.csv: row 2 (line 4), column b: "x" is not a whole number')
    assert refusal.bad_lines[0].field == "b"


@pytest.mark.parametrize("encoding", ["klingon", "base64", "idna", "utf-7", "x\0y"])
def test_an_encoding_that_is_none_is_refused(encoding: str) -> None:
    assert "is not the name of a text encoding" in refused(b"a\n1\n", "in.csv", TableSpec(encoding=encoding)).message


class Repeated(io.RawIOBase):
    """A file of any size that lies nowhere: a start, then the same again and again."""

    def __init__(self, start: bytes, repeated: bytes, size: int) -> None:
        self._start = start
        self._repeated = repeated
        self._block = repeated * (128 * 1024 // len(repeated) + 2)
        self._size = size
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        assert 0 < size <= 128 * 1024
        piece = self._start[self._at : self._at + size]
        if not piece and self._at < self._size:
            offset = (self._at - len(self._start)) % len(self._repeated)
            piece = self._block[offset : offset + min(size, self._size - self._at)]
        self._at += len(piece)
        return piece


@pytest.mark.parametrize(
    ("start", "repeated", "words"),
    [
        (b'a,b\n1,2\n3,"', b"never closed ", "row 2 (line 3): longer than 2,097,152 bytes (max_row_bytes)"),
        (b'a,b\n1,2\n3,"', b"never closed\n", "row 2 (line 3): a cell is longer than 1,048,576 bytes (max_cell_bytes)"),
        (b"a,b\n1,2\n3,", b"no line end, ", "row 2 (line 3): longer than 2,097,152 bytes (max_row_bytes)"),
        (b'a,b\n1,2\n3,"', b'many\n","cells', "row 2 (line 3): longer than 2,097,152 bytes (max_row_bytes)"),
        (b"", b"no header at all ", "the header (line 1): longer than 2,097,152 bytes (max_row_bytes)"),
    ],
)
def test_a_row_without_an_end_takes_no_memory(start: bytes, repeated: bytes, words: str) -> None:
    file = Repeated(start, repeated, 300 * MIB)
    tracemalloc.start()
    try:
        refusal = refused(cast(BinaryIO, file), "in.csv", limits=TableLimits(max_row_bytes=2 * MIB))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert words in refusal.message
    assert "never closed" in str(refusal.hint)
    assert file.tell() < 3 * MIB
    assert peak < 32 * MIB


def test_many_rows_take_no_memory() -> None:
    line = b"%b,x\n" % (b"long" * 200)
    file = cast(BinaryIO, Repeated(b"a,b\n", line, len(b"a,b\n") + 10_000 * len(line)))
    tracemalloc.start()
    try:
        with open_table(file, "in.csv", TableSpec(), TableLimits(), IntakeLimits()) as table:
            count = sum(1 for _ in table.rows())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 10_000
    assert peak < 3 * MIB


@settings(max_examples=200 if thorough() else 100)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(IntakeRefused):
        read_rows(b"a,b\n" + data, "in.csv")
