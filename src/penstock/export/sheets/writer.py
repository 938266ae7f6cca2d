"""Writers of sheets, chosen by format. A writer is given pages of rows and gives back the bytes to send next."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from penstock.errors import UsageError
from penstock.export.sheets.csv_writer import CsvWriter
from penstock.export.sheets.jsonl_writer import JsonlWriter
from penstock.export.sheets.values import Value
from penstock.export.sheets.xlsx_writer import XlsxWriter

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
"""What tells zlib to write gzip's header, with no time and no name in it, and gzip's trailer."""


class SheetWriter(Protocol):
    """Writer of one sheet: `begin` once, `write` for each page of rows, `end` once.

    The file is what the three return, one after the other; some of it may be empty. The same rows in the same pages
    give the same bytes. Text with a lone surrogate, which no stored row or result has, raises UnicodeEncodeError.
    """

    media_type: str
    extension: str
    """Ending of a file's name, without the dot."""

    def begin(self) -> bytes: ...

    def write(self, rows: Sequence[Sequence[Value]]) -> bytes:
        """Rows' bytes. A row has a value for each of the writer's columns, in their order."""
        ...

    def end(self) -> bytes: ...


def sheet_writer(
    format: str,  # noqa: A002 -- the wire's word
    columns: Sequence[str],
    *,
    gzip: bool,
    title: str,
    bom: bool = False,
) -> SheetWriter:
    """Writer of `csv`, `xlsx` or `jsonl`. `title` names the sheets of a workbook; `bom` makes Excel read a CSV file as
    UTF-8. Columns have different names, as `SheetColumns` gives them."""
    writer: SheetWriter
    match format:
        case "csv":
            writer = CsvWriter(columns, bom=bom)
        case "xlsx":
            writer = XlsxWriter(columns, title=title)
        case "jsonl":
            writer = JsonlWriter(columns)
        case _:
            raise UsageError(f"format: '{format[:100]}' is no format of sheets", hint="Choose csv, xlsx or jsonl.")
    return _Gzipped(writer) if gzip else writer


class _Gzipped:
    """Writer of a sheet that is compressed as a whole."""

    def __init__(self, sheet: SheetWriter) -> None:
        self.media_type = "application/gzip"
        self.extension = f"{sheet.extension}.gz"
        self._sheet = sheet
        self._deflate = zlib.compressobj(wbits=_GZIP_WINDOW)

    def begin(self) -> bytes:
        return self._deflate.compress(self._sheet.begin())

    def write(self, rows: Sequence[Sequence[Value]]) -> bytes:
        return self._deflate.compress(self._sheet.write(rows))

    def end(self) -> bytes:
        return self._deflate.compress(self._sheet.end()) + self._deflate.flush()
