"""Formulas of a sheet that were never calculated: their cells have no value, and would be read as empty."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from posixpath import normpath
from typing import IO, BinaryIO
from xml.etree import ElementTree

_PIECE_BYTES = 1024 * 1024
_MAX_CELL_BYTES = 256 * 1024
"""Bytes of a cell's XML, roughly: Excel's longest text is 32,767 characters, its longest formula 8,192."""
_FORMULA = re.compile(
    rb"<(?:\w+:)?c\b([^>]*)>\s*<(?:\w+:)?f\b(?:[^>]*/>|[^>]*>[^<]*</(?:\w+:)?f>)"
    rb"\s*(<(?:\w+:)?v\b(?:[^>]*/>|[^>]*>\s*</(?:\w+:)?v>)\s*)?</(?:\w+:)?c>"
)
"""A cell with a formula, and nothing in its value. Its attributes, and the value's element if there is one."""
_CELL = re.compile(rb'\br="([A-Z]{1,3}[0-9]{1,7})"')


def find_uncalculated(file: BinaryIO, number: int) -> str | None:
    """Find the first formula without a value in a workbook's sheet, by its number from 0: its place, such as `B2`."""
    with zipfile.ZipFile(file) as archive:
        path = _sheet_path(archive, number)
        if path is None:
            return None
        with archive.open(path) as sheet:
            return next(_uncalculated(sheet), None)


def _uncalculated(sheet: IO[bytes]) -> Iterator[str]:
    held = b""
    while piece := sheet.read(_PIECE_BYTES):
        held += piece
        if b"<f" in held or b":f" in held:
            for attributes, value in _FORMULA.findall(held):
                # Text that is empty is a value; the element is then there.
                if not (value and b't="str"' in attributes):
                    cell = _CELL.search(attributes)
                    yield cell[1].decode() if cell else "a cell"
        held = held.rpartition(b"c>")[2][-_MAX_CELL_BYTES:]


def _sheet_path(archive: zipfile.ZipFile, number: int) -> str | None:
    """The file in the archive that holds a sheet; None if the workbook is written in another way than usual."""
    try:
        workbook = _parse(archive, "xl/workbook.xml")
        targets = {link.get("Id"): link.get("Target", "") for link in _parse(archive, "xl/_rels/workbook.xml.rels")}
        sheets = [element for element in workbook.iter() if element.tag.endswith("}sheet")]
        link = next(value for name, value in sheets[number].items() if name.endswith("}id"))
        path = normpath(targets[link][1:] if targets[link].startswith("/") else f"xl/{targets[link]}")
    except (KeyError, IndexError, StopIteration, ElementTree.ParseError):
        return None
    return path if path.endswith(".xml") and path in archive.namelist() else None


def _parse(archive: zipfile.ZipFile, path: str) -> ElementTree.Element:
    return ElementTree.fromstring(archive.read(path))  # noqa: S314 -- expat bounds what entities expand to
