"""JSON Lines as a table: objects as they came beside cleaned rows, and every bad line named."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import unicodedata
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import KIB, MIB, IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.table import TableSpec
from tests.support.tables import raw, read_rows, refused, typed


def test_rows_are_clean_and_objects_stay_as_they_came() -> None:
    line = b'{"First Name": "  e\\u0301 ", "n": 1.50, "deep": {"a": [ 1, "  x " ]}, "no": null, "": "", "t": "12"}'
    columns, rows = read_rows(b"\xef\xbb\xbf\n  " + line + b" \r\n\n", "in.jsonl")
    assert columns == ("first_name", "n", "deep", "no", "column_5", "t")
    row = b'{"first_name":"\xc3\xa9","n":1.50,"deep":{"a": [ 1, "  x " ]},"no":null,"column_5":null,"t":"12"}'
    assert rows[0].body == b'{"row":' + row + b',"raw":' + line + b"}"
    assert rows[0].custom_id == "1"
    assert rows[0].summary == 'é · 1.50 · {"a": [ 1, "  x " ]}'


def test_columns_are_the_first_row_s_and_grow() -> None:
    data = io.BytesIO(b'{"a":1,"B":2}\n{"b":3,"c":4}\n{"a":5}')
    with open_table(data, "in.ndjson", TableSpec(), TableLimits(), IntakeLimits()) as table:
        first = table.columns
        rows = list(table.rows())
        assert (first, table.columns) == (("a", "b"), ("a", "b", "b_2", "c"))
    assert typed(rows) == [{"a": 1, "b": 2}, {"b_2": 3, "c": 4}, {"a": 5}]
    assert [row.custom_id for row in rows] == ["1", "2", "3"]


def test_columns_are_renamed_kept_and_typed() -> None:
    spec = TableSpec(
        rename={"Preis €": "price", "id": "sku"}, keep=["sku", "price", "ok"], types={"sku": "text", "ok": "boolean"}
    )
    data = b'{"ok":"TRUE","Preis \xe2\x82\xac":2.5,"id":17,"x":1}\n{"id":true,"x":2}\n'
    columns, rows = read_rows(data, "in.jsonl", spec)
    assert columns == ("sku", "price", "ok")
    assert [list(row.items()) for row in typed(rows)] == [
        [("sku", "17"), ("price", 2.5), ("ok", True)],
        [("sku", "true")],
    ]
    assert raw(rows)[1] == {"id": True, "x": 2}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=4), min_size=1, max_size=6), st.booleans())
def test_objects_come_back(objects: list[dict[str, Any]], ascii_only: bool) -> None:
    data = "\r\n".join(json.dumps(entry, ensure_ascii=ascii_only) for entry in objects).encode(errors="surrogatepass")
    columns, rows = read_rows(data, "in.jsonl")
    assert raw(rows) == objects
    assert len(columns) == len({key for entry in objects for key in entry})
    for entry, row in zip(objects, typed(rows), strict=True):
        assert list(row.values()) == [
            unicodedata.normalize("NFC", value.strip()) or None if isinstance(value, str) else value
            for value in entry.values()
        ]


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)])
def test_packed_lines_are_unpacked(ending: str, pack: Any) -> None:
    assert typed(read_rows(pack(b'{"a":1}\n{"a":2}\n'), f"in.jsonl.{ending}")[1]) == [{"a": 1}, {"a": 2}]
    cut = pack(b'{"a":1}\n' * 100)[:-4]
    assert "ends in the middle" in refused(cut, f"in.jsonl.{ending}").message


def test_bad_lines_are_listed() -> None:
    data = b'{"a":1}\n{"a":}\n\n[1]\n{"a":1,"a":2}\n{"a":"\xff"}\n{"a":2}\n{"a":NaN}\n'
    refusal = refused(data, "in.jsonl")
    assert refusal.message.startswith("in.jsonl: 5 lines are not valid; nothing was stored\n")
    assert [str(bad) for bad in refusal.bad_lines] == [
        'line 2: not valid JSON: Expecting value at column 6, found "}"',
        "line 4: found an array; expected a JSON object",
        "line 5, a: the key is there twice; expected once",
        "line 6: byte 7 (0xff) is not valid UTF-8",
        "line 8: not valid JSON: NaN is not a JSON value; write null",
    ]


def test_rows_after_a_bad_line_are_not_given() -> None:
    data = io.BytesIO(b'{"a":1}\nx\n{"a":2}\n')
    with open_table(data, "in.jsonl", TableSpec(), TableLimits(), IntakeLimits()) as table:
        rows = table.rows()
        assert next(rows).custom_id == "1"
        with pytest.raises(IntakeRefused, match="line 2: not valid JSON"):
            next(rows)


def test_only_so_many_bad_lines_are_listed() -> None:
    refusal = refused(b"x\n" * 1000, "in.jsonl", intake=IntakeLimits(max_reported_lines=10))
    assert len(refusal.bad_lines) == 10
    assert refusal.more


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a":"x"}', 'line 2, a: "x" is not a whole number'),
        (b'{"a":[1]}', "line 2, a: an object or an array is not of the type integer"),
        (b'{"a":1e999}', "line 2, a: "),
        (b'{"b":%b}' % (b"[" * 200 + b"]" * 200), "line 2: nested deeper than 128 levels (max_nesting)"),
        (b'{"b":%b}' % (b"9" * 5000), "line 2: holds a number of thousands of digits"),
        (b'{"b":"%b"}' % (b"x" * 600), "line 2: larger than 1,024 bytes (max_row_bytes)"),
        (b'{"b":"%b"}' % (b"x" * 70_000), "line 2: longer than 65,536 bytes (max_line_bytes)"),
        (b'{"b":1,"c":2,"d":3}', "line 2: more than 3 columns (max_columns)"),
        (b'{"%b":1}' % (b"k" * 300), 'kkk...": a name longer than 256 characters (max_column_name_chars)'),
    ],
)
def test_what_cannot_be_taken_is_refused_with_its_line(line: bytes, words: str) -> None:
    limits = TableLimits(max_row_bytes=KIB, max_columns=3)
    spec = TableSpec(types={"a": "integer"})
    refusal = refused(
        b'{"a":1}\n' + line + b'\n{"a":2}\n',
        "in.jsonl",
        spec,
        limits=limits,
        intake=IntakeLimits(max_line_bytes=64 * KIB),
    )
    assert words in refusal.message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "in.jsonl: holds no rows"),
        (b" \n\n", "in.jsonl: holds no rows"),
        ('{"a":1}'.encode("utf-16"), "in.jsonl: looks like text in UTF-16"),
    ],
)
def test_files_without_rows_are_refused(data: bytes, words: str) -> None:
    assert words in refused(data, "in.jsonl").message


def test_too_many_rows_are_refused() -> None:
    assert "more than 2 rows (max_rows)" in refused(b"{}\n" * 3, "in.jsonl", limits=TableLimits(max_rows=2)).message


def test_a_line_without_an_end_takes_no_memory() -> None:
    data = gzip.compress(b'{"a":"' + b"x" * 32 * MIB, 1)
    tracemalloc.start()
    try:
        refusal = refused(data, "in.jsonl.gz", intake=IntakeLimits(max_line_bytes=MIB))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "line 1: longer than 1,048,576 bytes (max_line_bytes)" in refusal.message
    assert peak < 4 * MIB
