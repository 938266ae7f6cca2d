"""CSV sheets as RFC 4180 has them: UTF-8, commas, quotes where they are needed, CRLF.

CRLF is RFC 4180's, and makes `csv.writer` quote a cell for either of its characters: with LF as the end of a line, a CR
inside a cell would stand there unquoted before Python 3.13.

Numbers are written as numbers, true and false as words, null as nothing, lists and objects as JSON text.

A spreadsheet takes text that begins like a formula for one, and runs it. Such text gets an apostrophe in front:

- text that begins with `=`, `+`, `-`, `@`, their full-width forms `＝＋－＠`, a tab, a CR or a LF, also after white
  space, NUL or U+FEFF;
- text that begins with apostrophes and goes on like that, so that the rule can be undone: remove one apostrophe from
  every text that begins with apostrophes and goes on like that, and leave all other text as it is.

A negative number is a number and stays as it is; the text "-5" is text.
"""

from __future__ import annotations

import csv
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from io import StringIO

from penstock.export.sheets.values import Value, json_text

_FORMULA = re.compile("'*[\\s\0\ufeff]*[=+\\-@＝＋－＠\t\r\n]")


class CsvWriter:
    """Writer of a CSV file."""

    media_type = "text/csv; charset=utf-8"
    extension = "csv"

    def __init__(self, columns: Sequence[str], *, bom: bool = False) -> None:
        self._columns = columns
        self._bom = bom

    def begin(self) -> bytes:
        header = self.write([self._columns])
        return BOM_UTF8 + header if self._bom else header

    def write(self, rows: Sequence[Sequence[Value]]) -> bytes:
        page = StringIO()
        csv.writer(page, lineterminator="\r\n").writerows([[_cell(value) for value in row] for row in rows])
        return page.getvalue().encode()

    def end(self) -> bytes:
        return b""


def _cell(value: Value) -> str | int | float | None:
    if isinstance(value, str):
        # Most text begins with a letter or a digit, which is asked faster than the pattern.
        return value if value[:1].isalnum() or not _FORMULA.match(value) else f"'{value}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return json_text(value)
    return value
