"""XLSX sheets: a workbook written front to back. Text is inline, so that no table of all texts is kept; the list of
sheets comes last, so that their number need not be known before.

Excel's limits are kept: a sheet is followed by another when it is full, and longer text is cut, with a mark. Text is
stored as text: nothing in it is taken for a formula, and it needs no apostrophe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import count
from math import isfinite
from typing import Any

from penstock.config import GIB
from penstock.errors import UsageError
from penstock.export.sheets.values import Value, json_text
from penstock.export.sheets.zip_stream import IN_64_BITS, ZipStream

_MAX_SHEET_ROWS = 1_048_576
_MAX_COLUMNS = 16_384
_MAX_CELL_UNITS = 32_767
_MAX_NAME_UNITS = 31
_CUT_MARK = "… [cut]"
_FIRST_INEXACT = 10**15
"""Excel keeps 15 digits of a number: longer whole numbers, such as ids, are kept as text."""
_MAX_SHEET_BYTES = 2 * GIB
"""Size at which the next sheet begins: half of what a part of the ZIP can have, since it is asked between two pages."""

_ILLEGAL = "\x00-\x08\x0b-\x1f\ufffe\uffff"
"""Characters that XML cannot hold, and CR, which its readers turn into LF. Excel writes them as `_xHHHH_`."""
_SPECIAL = re.compile(f"[&<>_{_ILLEGAL}]")
# An underscore that would be read as the beginning of such an escape is escaped itself.
_TO_HEX = re.compile(f"[{_ILLEGAL}]|_(?=x[0-9A-Fa-f]{{4}}(?:_|[{_ILLEGAL}]))")
_NOT_IN_NAMES = re.compile(f"[\\[\\]:*?/\\\\\x7f-\x9f{_ILLEGAL}]")

_XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_CONTENT = "application/vnd.openxmlformats-officedocument.spreadsheetml"

_STYLES = (
    f'{_XML}<styleSheet xmlns="{_MAIN}">'
    '<fonts count="2"><font><sz val="11"/><name val="Calibri"/></font>'
    '<font><b/><sz val="11"/><name val="Calibri"/></font></fonts>'
    # Excel takes the first two fills for its own.
    '<fills count="2"><fill><patternFill patternType="none"/></fill>'
    '<fill><patternFill patternType="gray125"/></fill></fills>'
    '<borders count="1"><border><left/><right/><top/><bottom/><diagonal/></border></borders>'
    '<cellStyleXfs count="1"><xf numFmtId="0" fontId="0" fillId="0" borderId="0"/></cellStyleXfs>'
    '<cellXfs count="2"><xf numFmtId="0" fontId="0" fillId="0" borderId="0" xfId="0"/>'
    '<xf numFmtId="0" fontId="1" fillId="0" borderId="0" xfId="0" applyFont="1"/></cellXfs>'
    '<cellStyles count="1"><cellStyle name="Normal" xfId="0" builtinId="0"/></cellStyles>'
    "</styleSheet>"
)
_BOLD = 1
"""Number of the header's style in `cellXfs`."""


class XlsxWriter:
    """Writer of an XLSX workbook. The limits are parameters for tests."""

    media_type = f"{_CONTENT}.sheet"
    extension = "xlsx"

    def __init__(
        self,
        columns: Sequence[str],
        *,
        title: str,
        max_sheet_rows: int = _MAX_SHEET_ROWS,
        max_sheet_bytes: int = _MAX_SHEET_BYTES,
        zip64_offset: int = IN_64_BITS,
    ) -> None:
        if len(columns) > _MAX_COLUMNS:
            raise UsageError(
                f"xlsx: a sheet of {len(columns):,} columns; Excel's have at most {_MAX_COLUMNS:,}",
                hint="Export as csv or jsonl.",
            )
        self._columns = columns
        self._letters = [_column_letters(number) for number in range(1, len(columns) + 1)]
        self._title = title
        self._max_sheet_rows = max_sheet_rows
        self._max_sheet_bytes = max_sheet_bytes
        self._zip = ZipStream(zip64_offset=zip64_offset)
        self._sheets: dict[str, str] = {}
        """Area of each sheet that is closed, by the sheet's name."""
        self._rows = 0
        """Rows of the open sheet, its header among them."""

    def begin(self) -> bytes:
        relations = _relations([("officeDocument", "xl/workbook.xml")])
        return (
            self._zip.add("_rels/.rels", relations.encode())
            + self._zip.add("xl/styles.xml", _STYLES.encode())
            + self._open_sheet()
        )

    def write(self, rows: Sequence[Sequence[Value]]) -> bytes:
        sent = []
        done = 0
        while done < len(rows):
            if self._rows >= self._max_sheet_rows or self._zip.part_bytes >= self._max_sheet_bytes:
                sent += [self._close_sheet(), self._open_sheet()]
            page = rows[done : done + self._max_sheet_rows - self._rows]
            sent.append(self._zip.write("".join(self._row_elements(page)).encode()))
            self._rows += len(page)
            done += len(page)
        return b"".join(sent)

    def end(self) -> bytes:
        last_sheet = self._close_sheet()
        parts = [f"worksheets/sheet{number}.xml" for number in range(1, len(self._sheets) + 1)]
        relations = _relations([*(("worksheet", part) for part in parts), ("styles", "styles.xml")])
        return (
            last_sheet
            + self._zip.add("xl/workbook.xml", self._workbook().encode())
            + self._zip.add("xl/_rels/workbook.xml.rels", relations.encode())
            + self._zip.add("[Content_Types].xml", _content_types(parts).encode())
            + self._zip.end()
        )

    def _open_sheet(self) -> bytes:
        number = len(self._sheets) + 1
        widths = "".join(
            f'<col min="{n}" max="{n}" width="{_width(name)}" customWidth="1"/>'
            for n, name in enumerate(self._columns, 1)
        )
        header = "".join(
            f'<c r="{letters}1" s="{_BOLD}"{_content(name)}'
            for letters, name in zip(self._letters, self._columns, strict=True)
        )
        selected = ' tabSelected="1"' if number == 1 else ""
        self._rows = 1
        return self._zip.open(f"xl/worksheets/sheet{number}.xml") + self._zip.write(
            f'{_XML}<worksheet xmlns="{_MAIN}"><sheetViews><sheetView workbookViewId="0"{selected}>'
            '<pane ySplit="1" topLeftCell="A2" activePane="bottomLeft" state="frozen"/></sheetView></sheetViews>'
            f'<cols>{widths}</cols><sheetData><row r="1">{header}</row>'.encode()
        )

    def _row_elements(self, rows: Sequence[Sequence[Value]]) -> Iterator[str]:
        for number, row in enumerate(rows, self._rows + 1):
            cells = [
                f'<c r="{letters}{number}"{_content(value)}'
                for letters, value in zip(self._letters, row, strict=True)
                if value is not None
            ]
            yield f'<row r="{number}">{"".join(cells)}</row>'

    def _close_sheet(self) -> bytes:
        last = self._letters[-1]
        self._sheets[self._free_sheet_name()] = f"$A$1:${last}${self._rows}"
        end = f'</sheetData><autoFilter ref="A1:{last}{self._rows}"/></worksheet>'
        return self._zip.write(end.encode()) + self._zip.close()

    def _free_sheet_name(self) -> str:
        taken = {name.casefold() for name in self._sheets}
        names = (_sheet_name(self._title, number) for number in count(len(self._sheets) + 1))
        return next(name for name in names if name.casefold() not in taken)

    def _workbook(self) -> str:
        sheets = "".join(
            f'<sheet name="{escape(name)}" sheetId="{number}" r:id="rId{number}"/>'
            for number, name in enumerate(self._sheets, 1)
        )
        # Excel finds a filter again by this name.
        filters = "".join(
            f'<definedName name="_xlnm._FilterDatabase" localSheetId="{place}" hidden="1">'
            f"{_quoted(name)}!{area}</definedName>"
            for place, (name, area) in enumerate(self._sheets.items())
        )
        return (
            f'{_XML}<workbook xmlns="{_MAIN}" xmlns:r="{_RELATION}"><bookViews><workbookView/></bookViews>'
            f"<sheets>{sheets}</sheets><definedNames>{filters}</definedNames></workbook>"
        )


def _content(value: str | int | float | list[Any] | dict[str, Any]) -> str:
    """Cell's element from behind its reference on."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, bool):
        return f' t="b"><v>{value:d}</v></c>'
    elif isinstance(value, list | dict):
        text = json_text(value)
    else:
        text = str(value)
        if -_FIRST_INEXACT < value < _FIRST_INEXACT if isinstance(value, int) else isfinite(value):
            return f"><v>{text}</v></c>"
    if len(text) > _MAX_CELL_UNITS // 2:
        text = _cut(text, _MAX_CELL_UNITS, _CUT_MARK)
    if _SPECIAL.search(text):
        text = escape(_TO_HEX.sub(_to_hex, text), quote=False)
    # XML's readers may drop white space at either end.
    space = "" if text.strip() == text else ' xml:space="preserve"'
    return f' t="inlineStr"><is><t{space}>{text}</t></is></c>'


def _to_hex(found: re.Match[str]) -> str:
    return f"_x{ord(found[0]):04X}_"


def _cut(text: str, max_units: int, mark: str = "") -> str:
    """Text of at most so many units of UTF-16, which is how Excel counts; if it is cut, the mark is its end."""
    units = text.encode("utf-16-le")
    if len(units) <= 2 * max_units:
        return text
    return units[: 2 * (max_units - len(mark))].decode("utf-16-le", "ignore") + mark


def _sheet_name(title: str, number: int) -> str:
    """Name that Excel allows: the title, and from the second sheet on its number."""
    ending = f" ({number})" if number > 1 else ""
    name = " ".join(_NOT_IN_NAMES.sub(" ", title).split())
    name = _cut(name.strip("' "), _MAX_NAME_UNITS - len(ending)).rstrip("' ") + ending
    # Excel keeps "History" for itself.
    return "Sheet" + ending if name in ("", ending) or name.casefold() == "history" else name


def _quoted(name: str) -> str:
    """Sheet's name as formulas have it."""
    return escape("'" + name.replace("'", "''") + "'", quote=False)


def _width(name: str) -> int:
    """Column's width in characters: the header, and room for the filter's button."""
    return min(max(len(name) + 4, 12), 60)


def _column_letters(number: int) -> str:
    letters = ""
    while number:
        number, rest = divmod(number - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def _relations(targets: Iterable[tuple[str, str]]) -> str:
    """Part that lists what another part refers to; the ids are `rId1`, `rId2` and so on."""
    listed = "".join(
        f'<Relationship Id="rId{number}" Type="{_RELATION}/{kind}" Target="{target}"/>'
        for number, (kind, target) in enumerate(targets, 1)
    )
    return f'{_XML}<Relationships xmlns="{_PACKAGE}/relationships">{listed}</Relationships>'


def _content_types(sheets: Iterable[str]) -> str:
    kinds = [("workbook.xml", "sheet.main"), ("styles.xml", "styles"), *((sheet, "worksheet") for sheet in sheets)]
    listed = "".join(f'<Override PartName="/xl/{part}" ContentType="{_CONTENT}.{kind}+xml"/>' for part, kind in kinds)
    return (
        f'{_XML}<Types xmlns="{_PACKAGE}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Default Extension="xml" ContentType="application/xml"/>{listed}</Types>'
    )
