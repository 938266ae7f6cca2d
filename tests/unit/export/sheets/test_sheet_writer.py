from __future__ import annotations

import gzip
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import UsageError
from penstock.export.sheets.values import Value
from penstock.export.sheets.writer import sheet_writer
from tests.support.sheets import values, write_sheet
from tests.support.thorough import thorough

FORMATS = ["csv", "xlsx", "jsonl"]
COLUMNS = ["a", "b"]

formats = pytest.mark.parametrize("format_", FORMATS)


@given(st.sampled_from(FORMATS), st.lists(st.lists(values, min_size=2, max_size=2), max_size=8))
def test_the_same_rows_give_the_same_bytes_and_gzip_holds_them(format_: str, rows: list[list[Value]]) -> None:
    plain = write_sheet(sheet_writer(format_, COLUMNS, gzip=False, title="x"), rows)
    assert plain == write_sheet(sheet_writer(format_, COLUMNS, gzip=False, title="x"), rows)
    packed = write_sheet(sheet_writer(format_, COLUMNS, gzip=True, title="x"), rows)
    assert gzip.decompress(packed) == plain
    assert packed[4:8] == bytes(4), "a time would make the same rows give other bytes"


@formats
def test_a_file_is_named_after_its_format(format_: str) -> None:
    plain, packed = (sheet_writer(format_, COLUMNS, gzip=wanted, title="x") for wanted in (False, True))
    assert (plain.extension, packed.extension) == (format_, f"{format_}.gz")
    assert (plain.media_type == "application/gzip", packed.media_type) == (False, "application/gzip")


def test_the_byte_order_mark_is_passed_on() -> None:
    assert sheet_writer("csv", COLUMNS, gzip=False, title="x", bom=True).begin().startswith(b"\xef\xbb\xbf")


def test_another_format_is_refused() -> None:
    with pytest.raises(UsageError, match="'pdf' is no format of sheets") as refused:
        sheet_writer("pdf", COLUMNS, gzip=False, title="x")
    assert refused.value.hint == "Choose csv, xlsx or jsonl."


@formats
@pytest.mark.parametrize("value", ["\ud800", ["\udfff"], {"\ud83d": 1}])
def test_text_that_is_not_unicode_is_refused(format_: str, value: Value) -> None:
    writer = sheet_writer(format_, COLUMNS, gzip=False, title="x")
    writer.begin()
    with pytest.raises(UnicodeEncodeError):
        writer.write([[1, value]])


@formats
def test_memory_does_not_grow_with_the_rows(format_: str) -> None:
    writer = sheet_writer(format_, ["a"], gzip=True, title="x")
    page: list[list[Value]] = [[f"text {number}"] for number in range(1_000)]
    tracemalloc.start()
    try:
        writer.begin()
        for _ in range(10):
            writer.write(page)
        first_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        for _ in range(290 if thorough() else 90):
            writer.write(page)
        writer.end()
        assert tracemalloc.get_traced_memory()[1] < first_peak + 64 * 1024
    finally:
        tracemalloc.stop()
