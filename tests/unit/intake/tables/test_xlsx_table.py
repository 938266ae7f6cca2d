"""Workbooks: what a sheet shows is what its rows hold; what cannot be read is refused, and the child is gone."""

from __future__ import annotations

import datetime as dt
import io
import os
import resource
import unicodedata
import zipfile
from collections.abc import Sequence
from pathlib import Path

import openpyxl
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import MIB, IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.table import TableSpec
from tests.support.tables import raw, read_rows, refused, typed

Value = str | int | float | bool | dt.date | dt.time | None


def workbook(*rows: Sequence[Value], at: tuple[int, int] = (1, 1)) -> bytes:
    """A workbook whose only sheet, "Data", holds the rows, its first cell at that row and column."""
    book = openpyxl.Workbook()
    sheet = book.worksheets[0]
    sheet.title = "Data"
    for row, values in enumerate(rows, at[0]):
        for column, value in enumerate(values, at[1]):
            sheet.cell(row, column, value)
    return saved(book)


def saved(book: openpyxl.Workbook) -> bytes:
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


def sheets_and_chart() -> bytes:
    """A workbook of a hidden sheet, a chart, and two sheets of one row."""
    book = openpyxl.Workbook()
    book.worksheets[0].title = "Hidden"
    book.worksheets[0].sheet_state = "hidden"
    book.create_chartsheet("Chart")
    for title in ("First", "Second"):
        book.create_sheet(title)
    for sheet in book.worksheets:
        sheet.append(["title"])
        sheet.append([sheet.title])
    book.active = 1
    return saved(book)


def test_a_workbook_is_read_where_many_descriptors_are_open() -> None:
    """Those of a server with a thousand clients have numbers that `select` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4_096)), hard))
    source = os.open(os.devnull, os.O_RDONLY)
    opened = [os.dup(source) for _ in range(1_100)]
    try:
        assert read_rows(workbook(["Name"], ["Oak"]), "in.xlsx")[0] == ("name",)
    finally:
        for descriptor in (source, *opened):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_values_are_what_people_see() -> None:
    data = workbook(
        ["Name", "Stück", 2024, None, "At", "On", "Time", "Yes"],
        [
            " a\u0308 ",
            3.0,
            0.1 + 0.2,
            "00123",
            dt.datetime.fromisoformat("2024-05-01T10:30"),
            dt.date(2024, 5, 1),
            dt.time(8, 5),
            True,
        ],
        ["#N/A", 1e300, -7, "#DIV/0!", None, None, None, False],
    )
    columns, rows = read_rows(data, "in.xlsx")
    assert columns == ("name", "stück", "2024", "column_4", "at", "on", "time", "yes")
    assert list(typed(rows)[0].values()) == [
        "ä",
        3,
        0.3,
        "00123",
        "2024-05-01T10:30:00",
        "2024-05-01",
        "08:05:00",
        True,
    ]
    assert list(typed(rows)[1].values()) == [None, 1e300, -7, None, None, None, None, False]
    assert raw(rows)[0][:4] == [" a\u0308 ", 3.0, pytest.approx(0.3), "00123"]
    assert [row.custom_id for row in rows] == ["1", "2"]
    assert rows[0].summary == "ä · 3 · 0.3"


_FIRST, _LAST = dt.datetime.fromisoformat("1950-01-01"), dt.datetime.fromisoformat("2100-01-01")
CELL: st.SearchStrategy[Value] = (
    st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_characters="_="), min_size=1, max_size=8).map(
        lambda text: f"x{text}x"
    )
    | st.integers(-(10**14), 10**14)
    | st.floats(-1e9, 1e9, allow_subnormal=False).map(lambda number: float(f"{number:.12g}"))
    | st.booleans()
    | st.dates(_FIRST.date(), _LAST.date())
    | st.datetimes(_FIRST, _LAST).map(lambda at: at.replace(hour=13, microsecond=0))
    | st.none()
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=1, max_size=30))
def test_values_come_back_as_they_were_written(table: list[list[Value]]) -> None:
    table.append(["last", 1, 1])
    _, rows = read_rows(workbook(["a", "b", "c"], *table), "in.xlsx")
    shown = [[_shown(value) for value in row] for row in table if row != [None] * 3]
    assert [list(row.values()) for row in typed(rows)] == shown


def _shown(value: Value) -> Value:
    if isinstance(value, dt.date):
        return value.isoformat()
    return unicodedata.normalize("NFC", value) if isinstance(value, str) else value


def test_whole_numbers_are_exact_as_far_as_a_sheet_can_hold_them() -> None:
    numbers = [1234567890123456, 2**53 - 1, -(2**53), 123456789012345]
    _, rows = read_rows(workbook(["n"], *([number] for number in numbers)), "in.xlsx")
    assert [row["n"] for row in typed(rows)] == numbers


def test_blank_rows_and_an_offset_do_not_move_the_row_numbers() -> None:
    data = workbook(["a", "b"], [1, 2], [None, None], [3, "x"], at=(5, 3))
    columns, rows = read_rows(data, "in.xlsx")
    assert columns == ("a", "b")
    assert typed(rows) == [{"a": 1, "b": 2}, {"a": 3, "b": "x"}]
    refusal = refused(data, "in.xlsx", TableSpec(types={"b": "integer"}))
    assert refusal.message.startswith('in.xlsx: sheet "Data", row 8, column b: "x" is not a whole number')
    assert refusal.bad_lines[0].line == 8


@pytest.mark.parametrize(
    ("sheet", "title"),
    [(None, "First"), ("First", "First"), (3, "First"), ("Second", "Second"), (4, "Second"), (1, "Hidden")],
)
def test_a_sheet_is_chosen_by_name_or_number(sheet: str | int | None, title: str) -> None:
    assert typed(read_rows(sheets_and_chart(), "in.xlsx", TableSpec(sheet=sheet))[1]) == [{"title": title}]


def test_a_file_on_disk_is_read_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "no_ending"
    path.write_bytes(workbook(["a"], [1]))
    with path.open("rb") as file:
        assert typed(read_rows(file, "in.bin")[1]) == [{"a": 1}]


def only_chart() -> bytes:
    book = openpyxl.Workbook()
    book.create_chartsheet("Chart")
    book.remove(book.worksheets[0])
    return saved(book)


def archive(**files: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in files.items():
            zipped.writestr(name.replace("__", "/"), content)
    return out.getvalue()


def encrypted() -> bytes:
    """An OLE container as Office writes it around a workbook with a password: a header, then a directory."""
    header = bytearray(512)
    header[:8] = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
    header[30:32] = (9).to_bytes(2, "little")
    header[48:52] = (1).to_bytes(4, "little")
    return bytes(header) + bytes(512) + "Root Entry\0EncryptedPackage\0".encode("utf-16-le").ljust(512, b"\0")


@pytest.mark.parametrize(
    ("data", "sheet", "words", "hint"),
    [
        (workbook(["a"]), None, 'in.xlsx: sheet "Data": holds no rows', "state the `sheet`"),
        (workbook(), None, 'in.xlsx: sheet "Data": holds no rows', "state the `sheet`"),
        (workbook(["a"], [1]), "Other", 'in.xlsx: has no sheet "Other"', 'Its sheets are 1 "Data".'),
        (workbook(["a"], [1]), 0, "in.xlsx: has no sheet number 0", 'Its sheets are 1 "Data".'),
        (sheets_and_chart(), 5, "in.xlsx: has no sheet number 5", '1 "Hidden", 2 "Chart", 3 "First", 4 "Second"'),
        (sheets_and_chart(), "Chart", 'the sheet "Chart" is a chart or a macro', 'Its sheets are 1 "Hidden"'),
        (only_chart(), None, "in.xlsx: has no sheet of cells", "Expected a sheet with a header"),
        (encrypted(), None, "in.xlsx: the workbook is protected with a password", "without the password"),
        (encrypted().replace(b"E\0n\0c\0", b"W\0o\0r\0"), None, "in.xlsx: an old Office file", "save it as .xlsx"),
        (b"a,b\n1,2\n", None, "in.xlsx: the name ends in .xlsx, and the content looks like text", "Expected .csv"),
        (archive(other=b"x"), None, "in.xlsx: not a workbook: the archive has no xl/ folder", "Save it again"),
        (archive(xl__workbook=b"x"), None, "in.xlsx: not a workbook that can be read", "Save it again"),
        (b"PK\x03\x04 and then nothing", None, "in.xlsx: the zip archive is damaged", "fetch or make it again"),
        (workbook(["a"], [1])[:-30], None, "in.xlsx: the zip archive is damaged", "fetch or make it again"),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, sheet: str | int | None, words: str, hint: str) -> None:
    refusal = refused(data, "in.xlsx", TableSpec(sheet=sheet))
    assert words in refusal.message
    assert hint in str(refusal.hint)


def with_formula(cell: bytes) -> bytes:
    """A workbook of two sheets with a formula in B2 of the second, whose cell is written so."""
    book = openpyxl.Workbook()
    for sheet in (book.worksheets[0], book.create_sheet("Data")):
        sheet.append(["a", "b"])
        sheet.append([1, "=A2*2"])
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(book))) as read, zipfile.ZipFile(out, "w") as written:
        for name in read.namelist():
            content = read.read(name)
            if name.endswith("sheet2.xml"):
                assert b'<c r="B2"><f>A2*2</f><v /></c>' in content
                content = content.replace(b'<c r="B2"><f>A2*2</f><v /></c>', cell)
            written.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize(
    "cell",
    [
        b'<c r="B2"><f>A2*2</f><v /></c>',
        b'<c r="B2" s="1"><f>A2*2</f></c>',
        b'<c r="B2"><f t="shared" si="0"/><v></v></c>',
        b'<x:c xmlns:x="http://schemas.openxmlformats.org/spreadsheetml/2006/main" r="B2"><x:f>A2*2</x:f></x:c>',
        b'<c r="B2" t="str"><f>A2*2</f></c>',
    ],
)
def test_a_formula_that_was_never_calculated_is_refused(cell: bytes) -> None:
    refusal = refused(with_formula(cell), "in.xlsx", TableSpec(sheet="Data"))
    assert 'in.xlsx: sheet "Data", B2: a formula that was never calculated' in refusal.message
    assert "save it" in str(refusal.hint)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (b'<c r="B2"><f>A2*2</f><v>2</v></c>', 2),
        (b'<c r="B2" t="str"><f>""</f><v></v></c>', None),
        (b'<c r="B2" t="e"><f>1/0</f><v>#DIV/0!</v></c>', None),
    ],
)
def test_a_formula_has_the_value_that_was_calculated(cell: bytes, value: int | None) -> None:
    _, rows = read_rows(with_formula(cell), "in.xlsx", TableSpec(sheet="Data"))
    assert typed(rows) == [{"a": 1, "b": value}]


BOMB = archive(xl__sheet=bytes(20 * MIB))


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (BOMB, TableLimits(), 'in.xlsx: "xl/sheet" expands more than 200 times (max_zip_ratio)'),
        (BOMB, TableLimits(max_zip_ratio=2000, max_unpacked_bytes=MIB), "more than 1,048,576 bytes when unpacked"),
        (workbook(["a"], [1]), TableLimits(max_zip_entries=3), "more than 3 files in the archive (max_zip_entries)"),
        (workbook(["a"], [1], [2]), TableLimits(max_rows=1), "in.xlsx: more than 1 rows (max_rows)"),
        (workbook(["a", "b"], [1, 2]), TableLimits(max_columns=1), 'sheet "Data", row 1: more than 1 columns'),
        (
            workbook(["a"], [1], ["x" * 100]),
            TableLimits(max_cell_bytes=64),
            'in.xlsx: sheet "Data", row 3: cell 1 is longer than 64 bytes (max_cell_bytes)',
        ),
        (
            workbook(["a"], [1], ["x" * 30_000]),
            TableLimits(max_row_bytes=1024),
            'in.xlsx: sheet "Data", row 3: larger than 1,024 bytes (max_row_bytes)',
        ),
    ],
)
def test_limits_hold(data: bytes, limits: TableLimits, words: str) -> None:
    assert words in refused(data, "in.xlsx", limits=limits).message


def test_a_directory_of_very_many_files_is_not_taken_apart() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        for number in range(2000):
            zipped.writestr(f"xl/{number}", b"")
    words = "more than 1,000 files in the archive (max_zip_entries)"
    assert words in refused(out, "in.xlsx", limits=TableLimits(max_zip_entries=1000)).message
    words = "more than 10 files in the archive (max_zip_entries)"
    assert words in refused(out, "in.xlsx", limits=TableLimits(max_zip_entries=10)).message


def test_a_sheet_that_needs_more_memory_than_allowed_is_refused() -> None:
    book = openpyxl.Workbook()
    book.worksheets[0]["A1"] = "a"
    book.worksheets[0]["XFD1048576"] = "far away"
    refusal = refused(saved(book), "in.xlsx", limits=TableLimits(max_xlsx_memory_bytes=256 * MIB))
    assert "needs more than 268,435,456 bytes of memory (max_xlsx_memory_bytes) to be read" in refusal.message
    assert refusal.code == "file_too_large"


def test_the_least_memory_reads_a_small_sheet() -> None:
    rows = read_rows(workbook(["a"], [1]), "in.xlsx", limits=TableLimits(max_xlsx_memory_bytes=256 * MIB))[1]
    assert typed(rows) == [{"a": 1}]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "xlsx_child" in " ".join(child.cmdline())]


LONG = workbook(["a"], *[["text " * 20] for _ in range(5_000)])


def test_the_child_is_gone_when_the_table_is_closed_early() -> None:
    with open_table(io.BytesIO(LONG), "in.xlsx", TableSpec(), TableLimits(), IntakeLimits()) as table:
        rows = table.rows()
        assert next(rows).custom_id == "1"
        assert len(children()) == 1
    assert children() == []


def test_a_child_that_is_killed_is_told_from_the_end_of_the_sheet() -> None:
    with open_table(io.BytesIO(LONG), "in.xlsx", TableSpec(), TableLimits(), IntakeLimits()) as table:
        (child,) = children()
        child.kill()
        with pytest.raises(IntakeRefused, match="needs more than 2,147,483,648 bytes of memory"):
            list(table.rows())
