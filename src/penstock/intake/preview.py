"""The first rows of a table, read and not stored."""

from __future__ import annotations

import io
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.table import ColumnType, TableSpec
from penstock.intake.tables.xlsx_table import XlsxTable

PREVIEW_ROWS: Final = 10


class Column(NamedTuple):
    name: str
    type: ColumnType | None
    """Type of the values seen; None if there were none."""


class Preview(NamedTuple):
    """The beginning of a table."""

    columns: list[Column]
    rows: list[dict[str, Any]]
    raw: list[Any]
    """Cells of the same rows as they stand in the file."""
    images: bool
    """Whether the rows stand for images."""
    sheets: list[str]
    """Sheets of a workbook."""
    problem: str | None
    """Why it could not be read, or not any further."""


class _Body(msgspec.Struct):
    row: dict[str, Any]
    raw: Any = None


_decode = msgspec.json.Decoder(_Body).decode


def read_preview(
    content: bytes, name: str, spec: TableSpec, tables: TableLimits, intake: IntakeLimits, *, cut: bool
) -> Preview:
    """Read the first rows of a file, of which only the beginning may be there (`cut`). Blocks."""
    if cut:
        content = content[: content.rfind(b"\n") + 1] or content
    columns: tuple[str, ...] = ()
    found: list[_Body] = []
    sheets: list[str] = []
    images, problem = False, None
    try:
        with open_table(io.BytesIO(content), name, spec, tables, intake) as table:
            sheets = table.sheets if isinstance(table, XlsxTable) else []
            for row in islice(table.rows(), PREVIEW_ROWS):
                found.append(_decode(row.body))
                images = images or row.blob is not None
            columns = table.columns
    except IntakeRefused as refused:
        # What is missing of a file that was cut is no fault of its beginning.
        problem = None if cut and found else refused.advice
    rows = [body.row for body in found]
    columns = columns or tuple(dict.fromkeys(column for row in rows for column in row))
    shown = [Column(column, _type_of([row.get(column) for row in rows])) for column in columns]
    return Preview(shown, rows, [body.raw for body in found], images, sheets, problem)


def _type_of(values: list[Any]) -> ColumnType | None:
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return None
    if kinds == {bool}:
        return "boolean"
    if kinds == {int}:
        return "integer"
    return "number" if kinds <= {int, float} else "text"
