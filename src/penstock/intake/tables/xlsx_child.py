"""The process that reads one workbook: a sheet is loaded whole, so it happens where memory can be bounded.

Reads the workbook that is its standard input and writes one JSON value a line: a Head, then an array for each row of
the sheet from the first used one on, then an End; or a Refusal.
"""

from __future__ import annotations

import os
import resource
import sys
import zipfile
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from penstock.intake.tables.xlsx_formulas import find_uncalculated

if TYPE_CHECKING:
    from python_calamine import CalamineWorkbook

_LISTED = 20
_CALCULATE = "Open the workbook in a spreadsheet program and save it; or replace formulas by their values."


class Order(msgspec.Struct):
    """What to read: the only argument of the process, as JSON."""

    sheet: str | int | None
    max_memory_bytes: int


class Head(msgspec.Struct, tag=True):
    sheet: str
    first_row: int
    """Row that the sheet's first used cell is in, as Excel numbers them."""
    sheets: list[str] = []
    """Names of all sheets."""


class Refusal(msgspec.Struct, tag=True):
    reason: str
    hint: str


class End(msgspec.Struct, tag=True):
    pass


_encoder = msgspec.json.Encoder()


def main(order: Order, out: BinaryIO) -> None:
    _bound_memory(order.max_memory_bytes)
    from python_calamine import CalamineError, CalamineWorkbook

    try:
        workbook = CalamineWorkbook.from_path("/dev/stdin")
        chosen = _choose(workbook, order.sheet)
        if isinstance(chosen, Refusal):
            _write(out, chosen)
            return
        with Path("/dev/stdin").open("rb") as file:
            formula = find_uncalculated(file, workbook.sheet_names.index(chosen))
        if formula is not None:
            _write(out, Refusal(f'sheet "{chosen}", {formula}: a formula that was never calculated', _CALCULATE))
            return
        sheet = workbook.get_sheet_by_name(chosen)
    except (CalamineError, zipfile.BadZipFile) as error:
        _write(out, Refusal(f"not a workbook that can be read: {error}", "Save it again as .xlsx, or as CSV."))
        return
    first_row = sheet.start[0] if sheet.start else 0
    _write(out, Head(chosen, first_row + 1, workbook.sheet_names))
    rows = islice(sheet.iter_rows(), first_row, None)
    out.writelines(_encoder.encode(row) + b"\n" for row in rows)
    _write(out, End())


def _bound_memory(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError, OSError):  # macOS has no such bound; what the zip's directory declares is checked anyway
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _choose(workbook: CalamineWorkbook, wanted: str | int | None) -> str | Refusal:
    """The name of the sheet to read."""
    from python_calamine import SheetTypeEnum, SheetVisibleEnum

    sheets = workbook.sheets_metadata
    readable = [sheet for sheet in sheets if sheet.typ == SheetTypeEnum.WorkSheet]
    if not readable:
        return Refusal("has no sheet of cells", "Expected a sheet with a header and rows.")
    if wanted is None:
        visible = [sheet for sheet in readable if sheet.visible == SheetVisibleEnum.Visible]
        return (visible or readable)[0].name
    names = [sheet.name for sheet in sheets]
    if isinstance(wanted, int):
        found = names[wanted - 1] if 0 < wanted <= len(names) else None
    else:
        found = wanted if wanted in names else None
    listed = ", ".join(f'{place} "{name}"' for place, name in enumerate(names[:_LISTED], 1))
    hint = f"Its sheets are {listed}{' and more' if len(names) > _LISTED else ''}."
    if found is None:
        shown = f"number {wanted}" if isinstance(wanted, int) else f'"{wanted}"'
        return Refusal(f"has no sheet {shown}", hint)
    if found not in {sheet.name for sheet in readable}:
        return Refusal(f'the sheet "{found}" is a chart or a macro and has no rows', hint)
    return found


def _write(out: BinaryIO, line: Head | Refusal | End) -> None:
    out.write(_encoder.encode(line) + b"\n")


if __name__ == "__main__":
    try:
        main(msgspec.json.decode(sys.argv[1], type=Order), sys.stdout.buffer)
        sys.stdout.flush()
    except MemoryError:
        os.abort()  # as calamine does
