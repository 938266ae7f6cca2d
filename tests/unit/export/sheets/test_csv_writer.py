from __future__ import annotations

import csv
import re
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.export.sheets.csv_writer import CsvWriter
from penstock.export.sheets.values import Value, json_text
from tests.support.sheets import FORMULAS, texts, values, write_sheet

NEUTRALISED = re.compile("'+[\\s\0\ufeff]*[=+\\-@＝＋－＠\t\r\n]")


def cells(file: bytes) -> list[list[str]]:
    return list(csv.reader(StringIO(file.decode(), newline=""), strict=True))


def cell(value: Value) -> str:
    """The one cell of a sheet, as a spreadsheet gets it."""
    (_, (read,)) = cells(write_sheet(CsvWriter(["a"]), [[value]]))
    return read


def undo(text: str) -> str:
    """Text as it was before formulas were neutralised."""
    return text[1:] if NEUTRALISED.match(text) else text


def plain(value: Value) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list() | dict():
            return json_text(value)
        case _:
            return str(value)


@given(st.lists(texts, min_size=2, max_size=2), st.lists(st.lists(values, min_size=2, max_size=2), max_size=8))
def test_a_reader_gets_every_value_and_can_undo_what_was_neutralised(
    columns: list[str], rows: list[list[Value]]
) -> None:
    read = cells(write_sheet(CsvWriter(columns), rows))
    assert [[undo(text) for text in row] for row in read] == [
        columns,
        *([plain(value) for value in row] for row in rows),
    ]


@given(st.lists(st.tuples(values, values), max_size=8))
def test_cells_are_written_as_the_csv_module_does(rows: list[tuple[Value, Value]]) -> None:
    page = StringIO()
    shown = [[shown_cell(value) for value in row] for row in rows]
    csv.writer(page, lineterminator="\r\n").writerows(shown)
    assert CsvWriter(["a", "b"]).write(rows) == page.getvalue().encode()


def shown_cell(value: Value) -> str | int | float:
    """A value as it is handed to the csv module."""
    if isinstance(value, str) and re.match("'*[\\s\0\ufeff]*[=+\\-@＝＋－＠\t\r\n]", value):
        return f"'{value}"
    return value if isinstance(value, int | float) and not isinstance(value, bool) else plain(value)


@given(texts)
def test_no_text_begins_like_a_formula(text: str) -> None:
    assert not re.match("[\\s\0\ufeff]*[=+\\-@＝＋－＠\t\r\n]", cell(text))


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_gets_an_apostrophe(formula: str) -> None:
    assert cell(formula) == f"'{formula}"
    assert cell(f"'{formula}") == f"''{formula}"


@pytest.mark.parametrize("text", ["'tis", "a=1", "1-2", "'", " x", "", "(-5)", "é=", "#N/A"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert cell(text) == text


def test_a_header_is_text_like_any_other() -> None:
    assert CsvWriter(["=cmd", "b"]).begin() == b"'=cmd,b\r\n"


def test_numbers_stay_numbers() -> None:
    row: list[Value] = [-5, -0.5, 1e22, 10**30, True, False, None]
    assert CsvWriter(list("abcdefg")).write([row]) == b"-5,-0.5,1e+22,1%b,true,false,\r\n" % (b"0" * 30)


def test_cells_are_quoted_where_they_must_be() -> None:
    row: list[Value] = ["a,b", 'say "no"', "a\rb", "a\nb", " a ", {"k": [1, "x"]}]
    expected = b'"a,b","say ""no""","a\rb","a\nb", a ,"{""k"":[1,""x""]}"\r\n'
    assert CsvWriter(list("abcdef")).write([row]) == expected


def test_an_empty_cell_alone_is_a_row() -> None:
    assert cells(write_sheet(CsvWriter(["a"]), [[None], [""], [1]])) == [["a"], [""], [""], ["1"]]


def test_the_byte_order_mark_is_asked_for() -> None:
    assert CsvWriter(["ä"]).begin() == "ä\r\n".encode()
    assert CsvWriter(["ä"], bom=True).begin() == b"\xef\xbb\xbf" + "ä\r\n".encode()
