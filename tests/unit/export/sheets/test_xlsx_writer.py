from __future__ import annotations

import re
import zipfile
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpyxl import Workbook, load_workbook
from python_calamine import CalamineWorkbook

from penstock.errors import UsageError
from penstock.export.sheets.values import Value, json_text
from penstock.export.sheets.xlsx_writer import XlsxWriter
from tests.support.sheets import FORMULAS, texts, values, write_sheet

# Row numbers in front: readers drop rows at the end that have nothing.
COLUMNS = ["n", "value"]


def workbook(cells: list[Value], title: str = "Sheet", **limits: int) -> bytes:
    """A workbook of numbered rows, each with one of the values."""
    rows: list[list[Value]] = [[number, value] for number, value in enumerate(cells, 1)]
    return write_sheet(XlsxWriter(COLUMNS, title=title, **limits), rows)


def opened(file: bytes) -> Workbook:
    return load_workbook(BytesIO(file))


def values_by_openpyxl(file: bytes) -> list[Any]:
    return [unescape(row[1].value) for sheet in opened(file) for row in sheet.iter_rows(min_row=2)]


def values_by_calamine(file: bytes) -> list[Any]:
    book = CalamineWorkbook.from_filelike(BytesIO(file))
    return [row[1] for name in book.sheet_names for row in book.get_sheet_by_name(name).to_python()[1:]]


def unescape(value: Any) -> Any:
    """The value as Excel reads it: openpyxl leaves `_xHHHH_` as it stands."""
    if not isinstance(value, str):
        return value
    return re.sub("_x([0-9A-Fa-f]{4})_", lambda found: chr(int(found[1], 16)), value)


def stored(value: Value) -> Any:
    """The value as a workbook holds it."""
    if isinstance(value, list | dict):
        return json_text(value)
    if type(value) is int and abs(value) >= 10**15:
        return str(value)
    return value


@given(st.lists(values, max_size=8))
def test_two_readers_get_every_value(written: list[Value]) -> None:
    file = workbook(written)
    expected = [stored(value) for value in written]
    assert values_by_openpyxl(file) == expected
    for value, wanted in zip(values_by_calamine(file), expected, strict=True):
        # Calamine leaves the escapes of two characters as they stand, and reads an empty cell as "".
        assert re.search("[\ufffe\uffff]", str(wanted)) or value == ("" if wanted is None else wanted)


@given(st.lists(texts | st.sampled_from(FORMULAS), min_size=1, max_size=8))
def test_text_is_text_whatever_is_in_it(written: list[str]) -> None:
    sheet = opened(workbook(list(written))).active
    assert sheet is not None
    assert [row[1].data_type for row in sheet.iter_rows(min_row=2)] == ["s"] * len(written)


def test_numbers_are_numbers_as_long_as_excel_keeps_them() -> None:
    written: list[Value] = [0, -5, 10**15 - 1, -0.25, 1e-7, 1e300, True, 10**15, -(10**15), float("nan"), float("-inf")]
    sheet = opened(workbook(written)).active
    assert sheet is not None
    kinds = "".join(row[1].data_type for row in sheet.iter_rows(min_row=2))
    assert kinds == "nnnnnnbssss"
    assert values_by_openpyxl(workbook(written))[-2:] == ["nan", "-inf"]


def test_what_xml_cannot_hold_is_escaped_as_excel_does() -> None:
    file = workbook(["a\x00b", "\r", "_x0041_", "_x0041\x01", "x_x"])
    with zipfile.ZipFile(BytesIO(file)) as parts:
        sheet = parts.read("xl/worksheets/sheet1.xml").decode()
    found = re.findall('<c r="B[2-9]" t="inlineStr"><is><t>(.*?)</t>', sheet)
    assert found == ["a_x0000_b", "_x000D_", "_x005F_x0041_", "_x005F_x0041_x0001_", "x_x"]


@pytest.mark.parametrize("character", ["x", "😀", "&"])
def test_long_text_is_cut_with_a_mark(character: str) -> None:
    units = len(character.encode("utf-16-le")) // 2
    fits, too_long = character * (32_767 // units), character * 40_000
    (kept, cut) = values_by_openpyxl(workbook([fits, too_long]))
    assert kept == fits
    assert cut.endswith("… [cut]")
    assert cut.removesuffix("… [cut]").strip(character) == ""
    assert 32_767 - units < len(cut.encode("utf-16-le")) // 2 <= 32_767


def test_a_full_sheet_is_followed_by_another_with_the_same_header() -> None:
    for count, expected in [(0, [0]), (1, [1]), (3, [3]), (4, [3, 1]), (6, [3, 3]), (10, [3, 3, 3, 1])]:
        file = workbook(list(range(count)), "Job 7", max_sheet_rows=4)
        sheets = list(opened(file))
        assert [sheet.max_row - 1 for sheet in sheets] == expected
        assert [sheet.title for sheet in sheets] == ["Job 7", "Job 7 (2)", "Job 7 (3)", "Job 7 (4)"][: len(expected)]
        assert all([cell.value for cell in sheet[1]] == COLUMNS for sheet in sheets)
        assert values_by_openpyxl(file) == values_by_calamine(file) == list(range(count))


def test_a_sheet_that_would_be_too_long_for_its_part_is_followed_by_another() -> None:
    file = workbook(["x" * 1_000] * 9, max_sheet_bytes=5_000)
    assert [sheet.max_row - 1 for sheet in opened(file)] == [6, 3]


def test_every_sheet_has_a_bold_frozen_header_with_a_filter() -> None:
    book = opened(workbook([1, 2, 3], "It's", max_sheet_rows=3))
    for sheet, last in zip(book, (3, 2), strict=True):
        assert sheet.freeze_panes == "A2"
        assert sheet.auto_filter.ref == f"A1:B{last}"
        assert [[cell.font.b for cell in row] for row in sheet.iter_rows(max_row=2)] == [[True] * 2, [False] * 2]
        assert sheet.column_dimensions["A"].width == 12


def test_columns_have_the_letters_of_a_spreadsheet() -> None:
    columns = [f"c{number}" for number in range(1, 704)]
    sheet = opened(write_sheet(XlsxWriter(columns, title="x"), [[*range(1, 704)]])).active
    assert sheet is not None
    assert [sheet[place].value for place in ("A1", "Z1", "AA1", "ZZ1", "AAA1", "AAA2")] == [
        *("c1", "c26", "c27", "c702", "c703"),
        703,
    ]


def test_more_columns_than_excel_has_are_refused() -> None:
    XlsxWriter(["x"] * 16_384, title="x")
    with pytest.raises(UsageError, match="16,385 columns"):
        XlsxWriter(["x"] * 16_385, title="x")


@given(
    texts | st.sampled_from(["History", "a" * 40, "a" * 27 + " (2)", "😀" * 20, "'a'", "a/b\\c", "a" * 30 + "'", ""])
)
def test_sheets_have_names_that_excel_allows(title: str) -> None:
    names = opened(workbook([None] * 4, title, max_sheet_rows=2)).sheetnames
    assert len({name.casefold() for name in names}) == 4
    for name in names:
        assert 1 <= len(name.encode("utf-16-le")) // 2 <= 31
        assert not re.search(r"[\[\]:*?/\\\x00-\x1f]|^'|'$", name)
        assert name.casefold() != "history"


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Q1/Q2: [final]?", ["Q1 Q2 final", "Q1 Q2 final (2)"]),
        ("a" * 40, ["a" * 31, "a" * 27 + " (2)"]),
        ("a" * 27 + " (2)", ["a" * 27 + " (2)", "a" * 27 + " (3)"]),
        ("  ", ["Sheet", "Sheet (2)"]),
    ],
)
def test_a_title_is_kept_as_far_as_it_can_be(title: str, names: list[str]) -> None:
    assert opened(workbook([1, 2], title, max_sheet_rows=2)).sheetnames == names


def test_an_archive_has_64_bit_offsets_only_if_it_needs_them() -> None:
    plain, large = workbook(["x"] * 9), workbook(["x"] * 9, zip64_offset=500)
    assert b"PK\6\6" not in plain
    assert b"PK\6\6" in large
    for file in (plain, large):
        with zipfile.ZipFile(BytesIO(file)) as parts:
            assert parts.testzip() is None
        assert values_by_openpyxl(file) == values_by_calamine(file) == ["x"] * 9
    with zipfile.ZipFile(BytesIO(plain)) as parts:
        assert {part.extract_version for part in parts.infolist()} == {20}
