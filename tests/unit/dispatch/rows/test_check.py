"""A definition that no row can be rendered with is refused; rows that lack what others have are not."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from penstock.dispatch.rows.check import NotRenderable, check_rendering
from penstock.dispatch.rows.definition import parse_definition
from penstock.intake.tables.table import Blob, TableRow

PROMPT = parse_definition({"type": "chat", "provider": "p", "model": "m", "prompt": "{{ title }}"})


def row(**columns: object) -> TableRow:
    return TableRow(json.dumps({"row": columns, "raw": []}).encode(), "", "1", None)


def test_rows_pass_as_they_come() -> None:
    rows = [row(title=f"{number}") for number in range(3_000)]
    assert list(check_rendering(PROMPT, "rows.csv", iter(rows))) == rows


def test_one_row_that_can_be_rendered_is_enough() -> None:
    rows = [row(), row(title=None), row(name="x")]
    assert list(check_rendering(PROMPT, "rows.jsonl", iter(rows))) == rows


@pytest.mark.parametrize("count", [1, 999, 1_000, 5_000])
def test_a_column_that_no_row_has_is_named(count: int) -> None:
    with pytest.raises(NotRenderable) as caught:
        list(check_rendering(PROMPT, "rows.csv", iter([row(tilte="x", sku=1)] * count)))
    assert caught.value.message == (
        "rows.csv: row 1: prompt: line 1: there is no column 'title'; the columns are tilte, sku"
    )
    assert caught.value.hint


def test_an_image_is_there_to_be_rendered() -> None:
    http = {"type": "http", "provider": "p", "method": "POST", "path": "/", "body": {"picture": "{{ image }}"}}
    rows = [structs.replace(row(path="a.png"), blob=Blob("00", b"PNG", "image/png"))]
    assert list(check_rendering(parse_definition(http), "photos.zip", iter(rows))) == rows
    with pytest.raises(NotRenderable):
        list(check_rendering(parse_definition(http), "rows.csv", iter([row(path="a.png")])))


def test_no_rows_are_none_of_its_business() -> None:
    assert list(check_rendering(PROMPT, "rows.csv", iter([]))) == []
