"""Tables read from bytes, as the tests of their readers look at them."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

import msgspec
import pytest

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.table import TableRow, TableSpec


def read_rows(
    data: bytes | BinaryIO,
    name: str,
    spec: TableSpec | None = None,
    *,
    limits: TableLimits | None = None,
    intake: IntakeLimits | None = None,
) -> tuple[tuple[str, ...], list[TableRow]]:
    """Columns, as they are at the end, and all rows."""
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    with open_table(file, name, spec or TableSpec(), limits or TableLimits(), intake or IntakeLimits()) as table:
        rows = list(table.rows())
        return table.columns, rows


def typed(rows: list[TableRow]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(row.body)["row"] for row in rows]


def raw(rows: list[TableRow]) -> list[Any]:
    return [msgspec.json.decode(row.body)["raw"] for row in rows]


def refused(
    data: bytes | BinaryIO,
    name: str,
    spec: TableSpec | None = None,
    *,
    limits: TableLimits | None = None,
    intake: IntakeLimits | None = None,
) -> IntakeRefused:
    """Why the file is refused."""
    with pytest.raises(IntakeRefused) as caught:
        read_rows(data, name, spec, limits=limits, intake=intake)
    assert caught.value.message.startswith((name, f'"{name}"'))
    assert caught.value.hint, "a refusal says what to do"
    return caught.value
