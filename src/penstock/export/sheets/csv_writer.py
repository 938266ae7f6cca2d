"""CSV sheets as RFC 4180 has them: UTF-8, commas, quotes where they are needed, CRLF.

The cells are those of `csv.writer`, which looks at each character of each: a page is written column by column instead,
in a seventh of the time where rows have a text of 500 characters.

Numbers are written as numbers, true and false as words, null as nothing, lists and objects as JSON text.

A spreadsheet takes text that begins like a formula for one, and runs it. Such text gets an apostrophe in front:

- text that begins with `=`, `+`, `-`, `@`, their full-width forms `＝＋－＠`, a tab, a CR or a LF, also after white
  space, NUL or U+FEFF;
- text that begins with apostrophes and goes on like that, so that the rule can be undone: remove one apostrophe from
  every text that begins with apostrophes and goes on like that, and leave all other text as it is.

A negative number is a number and stays as it is; the text "-5" is text.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import cast

from penstock.export.sheets.values import Value, json_text

_FORMULA = re.compile("'*[\\s\0\ufeff]*[=+\\-@＝＋－＠\t\r\n]")

_QUOTED = ',"\n\r'
"""Characters for which a cell is put in quotes."""


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
        lines: Iterable[str] = map(",".join, zip(*map(_cells, zip(*rows, strict=True)), strict=True))
        if len(self._columns) == 1:
            lines = (line or '""' for line in lines)  # a line with nothing in it would be no row
        return "\r\n".join([*lines, ""]).encode()

    def end(self) -> bytes:
        return b""


def _cells(column: Sequence[Value]) -> list[str]:
    """Cells of a page's column. Numbers need no look, plain text one for all, and text that occurs often one each."""
    kinds = set(map(type, column))
    if kinds == {int}:
        return list(map(str, column))
    if kinds <= {str, NoneType}:
        texts = [value or "" for value in cast("Sequence[str | None]", column)]
        if _are_plain(texts):
            return texts
        cells = {text: _cell(text) for text in set(texts)}
        return [cells[text] for text in texts]
    return list(map(_cell, column))


def _are_plain(texts: Sequence[str]) -> bool:
    """Whether all are cells as they are: no text has to be quoted, and each that is not empty begins with a letter or a
    digit."""
    begin, together = "".join([text[:1] for text in texts]), "".join(texts)
    return (begin.isalnum() or not begin) and not any(map(together.__contains__, _QUOTED))


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = json_text(value) if isinstance(value, list | dict) else value
    # Most text begins with a letter or a digit, which is asked faster than the pattern.
    if not text[:1].isalnum() and text is value and _FORMULA.match(text):
        text = f"'{text}"
    if any(map(text.__contains__, _QUOTED)):
        text = '"' + text.replace('"', '""') + '"'
    return text
