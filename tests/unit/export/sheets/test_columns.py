from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.export.sheets.columns import SheetColumns
from penstock.export.sheets.jsonl_writer import JsonlWriter

names = st.sampled_from(
    ["a", "a_2", "status", "status_2", "error", "result_a", "result_a_2", "result_status", "attempts"]
)
lists = st.lists(names, unique=True)


def test_the_columns_are_the_inputs_then_the_results_then_what_became_of_the_row() -> None:
    assert SheetColumns(["sku", "title"], ["brand"]).header == ["sku", "title", "brand", "status", "attempts", "error"]


@pytest.mark.parametrize(
    ("input_columns", "result_columns", "header"),
    [
        (["a"], ["a"], "a result_a status attempts error"),
        (["a", "result_a"], ["a"], "a result_a result_a_2 status attempts error"),
        (["a"], ["a", "result_a"], "a result_a result_result_a status attempts error"),
        (["a"], ["status", "error"], "a result_status result_error status attempts error"),
        (["status"], ["status"], "status result_status status_2 attempts error"),
        (["status", "status_2"], [], "status status_2 status_3 attempts error"),
    ],
)
def test_a_name_that_is_taken_is_changed(input_columns: list[str], result_columns: list[str], header: str) -> None:
    assert SheetColumns(input_columns, result_columns).header == header.split()


@given(lists, lists)
def test_names_are_unique_and_a_column_recorded_later_changes_none(inputs: list[str], results: list[str]) -> None:
    header = SheetColumns(inputs, results).header
    assert len(set(header)) == len(header) == len(inputs) + len(results) + 3
    assert header[: len(inputs)] == inputs
    earlier = SheetColumns(inputs, results[:-1]).header if results else header
    assert [name for name in header if name in earlier] == earlier


def test_a_row_has_its_values_under_their_columns() -> None:
    columns = SheetColumns(["a", "b"], ["b", "c"])
    body = json.dumps({"raw": [" 1", "x", {"y": 1}], "row": {"b": "x", "a": 1, "z": 3}}).encode()
    (done,) = columns.assemble([body], [b'{"c":[1,{"d":null}],"b":-2.5,"other":1}'], ["DONE"], [2], [None])
    assert dict(zip(columns.header, done, strict=True)) == {
        "a": 1,
        "b": "x",
        "result_b": -2.5,
        "c": [1, {"d": None}],
        "status": "DONE",
        "attempts": 2,
        "error": None,
    }


@pytest.mark.parametrize("result", [None, b"", b"<html>", b"[1]", b"null", b'"\xff"', b'{"b":', b"[" * 5_000])
def test_a_row_without_a_result_has_no_result_columns(result: bytes | None) -> None:
    columns = SheetColumns(["a", "b"], ["b", "c"])
    bodies = [b'{"row":{"a":true},"raw":[]}', b'{"row":{}}']
    assert columns.assemble(bodies, [result, b'{"c":1}'], ["ERROR", "DONE"], [3, 1], ["status 500", None]) == [
        (True, None, None, None, "ERROR", 3, "status 500"),
        (None, None, None, 1, "DONE", 1, None),
    ]


@pytest.mark.parametrize("odd", [['say "no"'], ["back\\slash", "line\nend"], [f"c{number}" for number in range(500)]])
def test_names_that_are_odd_or_many_have_their_values(odd: list[str]) -> None:
    given: dict[str, int] = {name: place for place, name in enumerate(odd)}
    columns = SheetColumns(["a"], odd)
    (row,) = columns.assemble([b'{"row":{"a":1}}'], [json.dumps(given).encode()], ["DONE"], [1], [None])
    assert row == (1, *given.values(), "DONE", 1, None)
    (line,) = JsonlWriter(columns.header).write([row]).splitlines()
    assert json.loads(line) == {"a": 1, **given, "status": "DONE", "attempts": 1, "error": None}
