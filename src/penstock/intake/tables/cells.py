"""Cells: from the text or the value in a file to the value that processors and screens see."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import cast

from penstock.intake.explain import quoted
from penstock.intake.tables.table import ColumnType

Cell = str | int | float | bool | None
"""A cell as it came: of a CSV file always text, of a workbook what the sheet holds."""

_MAX_DIGITS = 15
"""What a double, and with it JSON everywhere, keeps of any decimal number."""
_MAX_EXACT = 2**53
"""Up to here a double holds every whole number as it is."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(\.[0-9]{1,14})?").fullmatch
_WHOLE_NUMBERS = re.compile(r"(?:-?(?:0|[1-9][0-9]{0,14})\n)+").fullmatch
_TYPED_START = frozenset("-0123456789tTfF")
_BOOLEANS = {"true": True, "false": False}
_STATED_BOOLEANS = _BOOLEANS | {"1": True, "0": False}
_STATED_INTEGER = re.compile(r"[+-]?[0-9]{1,18}").fullmatch
_STATED_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?").fullmatch


def clean(text: str) -> str:
    """Text without blanks around it, each character written in one way (NFC)."""
    text = text.strip()
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def is_blank(cell: Cell) -> bool:
    return not cell.strip() if isinstance(cell, str) else cell is None


def type_cell(cell: Cell) -> Cell:
    """The value of a cell in a column without a stated type. Runs for every cell, so the usual ones come first."""
    if not isinstance(cell, str):
        return _as_shown(cell) if isinstance(cell, float) else cell
    text = cell.strip()
    if not text:
        return None
    if text[0] in _TYPED_START:
        if found := _NUMBER(text):
            if found[1] is None:
                return int(text)
            return float(text) if len(text.lstrip("-")) <= _MAX_DIGITS + 1 else text
        if len(text) <= 5 and (truth := _BOOLEANS.get(text.lower())) is not None:
            return truth
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def type_column(cells: Sequence[Cell]) -> list[Cell]:
    """The values of a column without a stated type: `type_cell` of each, but for what can be told at less cost."""
    try:
        texts = list(map(str.strip, cast(Sequence[str], cells)))
    except TypeError:  # of a workbook
        return list(map(type_cell, cells))
    lines = "\n".join([*texts, ""])
    if _WHOLE_NUMBERS(lines) and lines.count("\n") == len(texts):
        return list(map(int, texts))
    return [
        None if not text else text if text[0] not in _TYPED_START and text.isascii() else type_cell(text)
        for text in texts
    ]


def _as_shown(number: float) -> float | int | None:
    """A sheet's number as people see it: whole if it is, else without the noise behind the fifteenth digit."""
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) <= _MAX_EXACT:
        return int(number)
    return float(f"{number:.{_MAX_DIGITS}g}")


def _shown(value: Cell) -> str:
    """A value as text, as JSON writes it."""
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value}"


def _to_text(cell: Cell) -> str | None:
    if isinstance(cell, str):
        return clean(cell) or None
    value = type_cell(cell)
    return None if value is None else _shown(value)


def _to_integer(cell: Cell) -> int | None:
    text = _to_text(cell)
    if text is not None and not _STATED_INTEGER(text):
        raise ValueError(f"{quoted(text)} is not a whole number of at most 18 digits")
    return None if text is None else int(text)


def _to_number(cell: Cell) -> float | int | None:
    text = _to_text(cell)
    if text is None:
        return None
    if not _STATED_NUMBER(text) or not math.isfinite(value := float(text)):
        raise ValueError(f"{quoted(text)} is not a number, written like -1234.5")
    return int(text) if _STATED_INTEGER(text) else value


def _to_boolean(cell: Cell) -> bool | None:
    text = _to_text(cell)
    if text is None:
        return None
    if (value := _STATED_BOOLEANS.get(text.lower())) is None:
        raise ValueError(f"{quoted(text)} is not a boolean: true, false, 1 or 0")
    return value


CONVERSIONS: dict[ColumnType, Callable[[Cell], Cell]] = {
    "text": _to_text,
    "integer": _to_integer,
    "number": _to_number,
    "boolean": _to_boolean,
}
"""What makes a cell's value of a stated type. Raises ValueError, with the reason, if it is of another."""
