from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from penstock.export.sheets.jsonl_writer import JsonlWriter
from penstock.export.sheets.values import Value
from tests.support.sheets import FORMULAS, texts, values, write_sheet


@given(
    st.lists(texts, min_size=2, max_size=2, unique=True), st.lists(st.lists(values, min_size=2, max_size=2), max_size=8)
)
def test_every_row_is_one_line_with_every_column(columns: list[str], rows: list[list[Value]]) -> None:
    lines = write_sheet(JsonlWriter(columns), rows).decode().splitlines(keepends=True)
    assert all(line.endswith("\n") for line in lines)
    assert [json.loads(line) for line in lines] == [dict(zip(columns, row, strict=True)) for row in rows]


def test_a_formula_is_text_like_any_other() -> None:
    lines = write_sheet(JsonlWriter(["a"]), [[formula] for formula in FORMULAS]).decode().splitlines()
    assert [json.loads(line)["a"] for line in lines] == FORMULAS


def test_numbers_that_json_does_not_have_are_null() -> None:
    assert JsonlWriter(["a", "b"]).write([[float("nan"), float("inf")]]) == b'{"a":null,"b":null}\n'
