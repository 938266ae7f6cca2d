"""Names of columns and values of cells, as docs/adr/0016-jobs.md says them."""

from __future__ import annotations

import unicodedata
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.cells import CONVERSIONS, Cell, type_cell
from penstock.intake.tables.columns import MAX_SUMMARY_CHARS, Columns, canonical_name, summarise
from penstock.intake.tables.table import ColumnType, RowFault, TableSpec


def named(*headers: str, **spec: object) -> tuple[str, ...]:
    return Columns("in.csv", headers, msgspec.convert(spec, TableSpec), TableLimits()).names


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("Preis (€)", "preis"),
        ("  First Name ", "first_name"),
        ("a__b--c", "a_b_c"),
        ("ÄÖÜ 2", "äöü_2"),
        ("Stra\u00dfe", "straße"),
        ("e\u0301te\u0301", "été"),
        ("हिन्दी", "हिन्दी"),
        ("名前", "名前"),
        ("€", ""),
        ("", ""),
    ],
)
def test_a_canonical_name_keeps_letters_and_digits(header: str, name: str) -> None:
    assert canonical_name(header) == name


@given(st.text(max_size=30))
def test_a_canonical_name_is_its_own_canonical_name(header: str) -> None:
    name = canonical_name(header)
    assert canonical_name(name) == name


def test_equal_and_empty_headers_get_names_of_their_own() -> None:
    assert named("a", "A", "", "a ", "€") == ("a", "a_2", "column_3", "a_3", "column_5")
    assert named("a_2", "a", "a", "a") == ("a_2", "a", "a_3", "a_4")
    assert named("a", "a", "a_2", "a") == ("a", "a_2", "a_2_2", "a_3")


@given(st.lists(st.sampled_from(["a", "a_2", "a_2_2", "", "column_2", "b c", "B-C"]), min_size=1, max_size=12))
def test_names_are_unique(headers: list[str]) -> None:
    assert len(set(named(*headers))) == len(headers)


def test_renaming_comes_first() -> None:
    rename = {"Preis (€)": "Price EUR", "name": "title"}
    assert named("Preis (€) ", "NAME", "price-eur", rename=rename) == ("price_eur", "title", "price_eur_2")


def test_columns_are_kept_in_the_order_asked_for() -> None:
    columns = Columns("in.csv", ["a", "b", "c"], TableSpec(keep=["c", "A"], types={"c": "text"}), TableLimits())
    assert columns.names == ("c", "a")
    built = columns.build([["1", "2", "3"]])
    assert built.fault is None
    assert built.bodies == [b'{"row":{"c":"3","a":1},"raw":["1","2","3"]}']


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"keep": ["d"]}, '`keep` names the column "d", which the file does not have'),
        ({"types": {"d": "text"}}, '`types` names the column "d"'),
        ({"rename": {"d": "e"}}, '`rename` names the column "d"'),
        ({"keep": []}, "`keep` names no column"),
        ({"keep": ["a", "A"]}, "`keep` names a column twice"),
    ],
)
def test_a_spec_that_does_not_fit_the_file_is_refused(spec: dict[str, object], words: str) -> None:
    with pytest.raises(IntakeRefused) as caught:
        named("a", "b", **spec)
    assert words in caught.value.message
    assert caught.value.hint


def test_too_many_columns_and_too_long_names_are_refused() -> None:
    with pytest.raises(RowFault, match=r"more than 3 columns \(max_columns\)"):
        Columns("in.csv", "abcd", TableSpec(), TableLimits(max_columns=3))
    with pytest.raises(RowFault, match=r"longer than 256 characters \(max_column_name_chars\)"):
        named("a" * 257)
    assert named("a" * 257, rename={"a" * 257: "b"}) == ("b",)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("", None),
        (" \t\u00a0", None),
        ("0", 0),
        ("-17", -17),
        (" 42 ", 42),
        ("123456789012345", 123456789012345),
        ("1234567890123456", "1234567890123456"),
        ("007", "007"),
        ("+5", "+5"),
        ("1,000", "1,000"),
        ("1e5", "1e5"),
        ("1.50", 1.5),
        ("-0.25", -0.25),
        ("00.5", "00.5"),
        (".5", ".5"),
        ("5.", "5."),
        ("0.12345678901234", 0.12345678901234),
        ("0.123456789012345", "0.123456789012345"),
        ("-12345678.9012345", -12345678.9012345),
        ("-", "-"),
        ("١٢", "١٢"),
        ("True", True),
        ("FALSE", False),
        ("t", "t"),
        ("2024-05-01", "2024-05-01"),
        (" e\u0301 ", "é"),
        ("#N/A", "#N/A"),
        (None, None),
        (True, True),
        (5.0, 5),
        (-0.0, 0),
        (0.1 + 0.2, 0.3),
        (1e300, 1e300),
        (float("inf"), None),
    ],
)
def test_a_cell_has_the_value_that_its_text_shows(cell: Cell, value: Cell) -> None:
    found = type_cell(cell)
    assert found == value
    assert type(found) is type(value)


@given(st.text(max_size=20))
def test_a_value_shows_the_text_it_was_made_of(text: str) -> None:
    value = type_cell(text)
    if isinstance(value, str):
        assert value == unicodedata.normalize("NFC", text.strip())
    elif value is None:
        assert not text.strip()
    elif isinstance(value, bool):
        assert text.strip().lower() == str(value).lower()
    else:
        assert float(text) == value


@pytest.mark.parametrize(
    ("kind", "cell", "value"),
    [
        ("text", " 007 ", "007"),
        ("text", "  ", None),
        ("text", 5.0, "5"),
        ("text", True, "true"),
        ("integer", "+0042", 42),
        ("integer", "123456789012345678", 123456789012345678),
        ("integer", 7.0, 7),
        ("integer", "", None),
        ("number", "1e3", 1000.0),
        ("number", "0012", 12),
        ("number", ".5", 0.5),
        ("number", " ", None),
        ("boolean", "TRUE", True),
        ("boolean", "0", False),
        ("boolean", 1.0, True),
        ("boolean", None, None),
    ],
)
def test_a_stated_type_is_made(kind: ColumnType, cell: Cell, value: Cell) -> None:
    found = CONVERSIONS[kind](cell)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("kind", "cell", "words"),
    [
        ("integer", "1.5", '"1.5" is not a whole number of at most 18 digits'),
        ("integer", "1234567890123456789", "at most 18 digits"),
        ("number", "1,5", '"1,5" is not a number, written like -1234.5'),
        ("number", "1e999", "is not a number"),
        ("number", "nan", "is not a number"),
        ("boolean", "ja", '"ja" is not a boolean: true, false, 1 or 0'),
    ],
)
def test_a_cell_of_another_type_is_refused(kind: ColumnType, cell: str, words: str) -> None:
    columns = Columns("in.csv", ["a", "b"], TableSpec(types={"b": kind}), TableLimits())
    bodies, summaries, fault = columns.build([["x", ""], ["x", cell], ["x", ""], ["x", cell]])
    assert len(bodies) == len(summaries) == 1
    assert isinstance(fault, RowFault)
    assert words in fault.reason
    assert fault.column == "b"


def test_a_spec_is_read_from_json() -> None:
    decode = msgspec.json.Decoder(TableSpec).decode
    spec = decode(
        '{"rename":{"a":"b"},"keep":["b"],"types":{"b":"text"},"sheet":2,"delimiter":"\\t","encoding":"cp1252"}'
    )
    assert spec == TableSpec({"a": "b"}, ["b"], {"b": "text"}, 2, "\t", "cp1252")
    for wrong in ('{"colour":1}', '{"types":{"a":"date"}}', '{"delimiter":";;"}', '{"delimiter":"\\""}'):
        with pytest.raises(msgspec.ValidationError):
            decode(wrong)


def test_a_summary_says_what_a_row_is_about() -> None:
    assert summarise({"id": 7, "sku": "A-1", "title": "Lamp", "brand": None}) == "Lamp · A-1"
    assert summarise({"id": 7, "on": True, "c": None, "d": "x"}) == "7 · true"
    assert summarise({"title": None, "a": 1.5}) == "1.5"
    assert summarise({"title": "two\r\nlines\0"}) == "two lines"
    assert summarise({}) == ""
    assert len(summarise({"title": "x" * 1000, "brand": "y"})) == MAX_SUMMARY_CHARS


@pytest.mark.parametrize("headers", [["title", "a", "sku"], ["sku", "a", "b"], ["a", "b", "c", "d"], ["title"]])
def test_rows_built_together_have_the_summaries_of_each(headers: list[str]) -> None:
    cells = ["7", "Lamp", "", "true", "1.50", "two\nlines", "\0", "é" * 500]
    each = [list(chosen) for chosen in product(cells, repeat=min(len(headers), 3))]
    records = [record + ["x"] * (len(headers) - len(record)) for record in each]
    columns = Columns("in.csv", headers, TableSpec(), TableLimits())
    for some in (records, [["7"] * len(headers)] * 3, [["Lamp"] * len(headers)] * 3):
        built = columns.build(some)
        assert built.summaries == [summarise(msgspec.json.decode(body)["row"]) for body in built.bodies]
