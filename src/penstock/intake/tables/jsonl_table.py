"""JSON Lines in, rows out: one object a line, plain, gzip or zstd."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, BinaryIO

import msgspec

from penstock.config import IntakeLimits, TableLimits
from penstock.intake import explain
from penstock.intake.explain import Fault
from penstock.intake.refusal import BadLine, IntakeRefused
from penstock.intake.tables.cells import CONVERSIONS, Cell, clean
from penstock.intake.tables.columns import ColumnNames, check_row, kept_columns, stated_types, summarise
from penstock.intake.tables.table import RowFault, TableRow, TableSpec, no_rows, too_many_rows
from penstock.intake.unpack import Unpacker, unpack

_BOM = b"\xef\xbb\xbf"
_QUOTE, _NULL, _NESTED = ord('"'), b"null", b"{["
_MAX_DIGITS = 4_300
"""Python refuses to read a longer integer; a shorter line cannot hold one."""
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_cell = msgspec.json.Decoder(Cell).decode
_encode = msgspec.json.Encoder().encode


class JsonlTable:
    """A file of JSON Lines that is being read."""

    def __init__(self, file: BinaryIO, name: str, spec: TableSpec, limits: TableLimits, intake: IntakeLimits) -> None:
        self._name = name
        self._limits = limits
        self._intake = intake
        self._keep = kept_columns(name, spec)
        self._types = stated_types(spec)
        self._given = ColumnNames(spec.rename, limits)
        self._names: dict[str, str] = {}
        """Canonical names by key, in the order in which keys were first seen."""
        self._read = self._read_rows(_split(unpack(file, Unpacker(name, intake)), intake.max_line_bytes))
        self._first = next(self._read)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._keep or self._names.values())

    def rows(self) -> Iterator[TableRow]:
        return chain([self._first], self._read)

    def _read_rows(self, lines: Iterable[tuple[int, bytes | None]]) -> Iterator[TableRow]:
        """Rows up to the first bad line; from there on, further bad lines to list with it."""
        number = 0
        bad: list[BadLine] = []
        for place, line in lines:
            if line is not None:
                line = line.removeprefix(_BOM) if place == 1 else line
                if explain.is_blank(line):
                    continue
            row = explain.too_long(self._intake) if line is None else self._build(line, number + 1)
            if isinstance(row, Fault):
                bad.append(BadLine(place, *row))
                if len(bad) > self._intake.max_reported_lines:
                    break
            elif not bad:
                number += 1
                if number > self._limits.max_rows:
                    raise too_many_rows(self._name, self._limits.max_rows)
                yield row
        if bad:
            most = self._intake.max_reported_lines
            raise IntakeRefused.for_lines(self._name, bad[:most], more=len(bad) > most)
        if not number:
            raise no_rows(self._name, "Expected one JSON object per line.")

    def _build(self, line: bytes, number: int) -> TableRow | Fault:
        line = line.strip()
        try:
            line.decode()  # the decoder takes values that it skips without a look at their UTF-8
            fields = _decode_fields(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            fault = explain.object_fault(line, self._intake)
            return fault or Fault("", "the line cannot be read", "invalid_json_line")
        if fault := explain.shape_fault(line, self._intake):
            return fault
        if len(line) > _MAX_DIGITS and (fault := explain.number_fault(line)):
            return fault
        try:
            row = self._row(fields)
            body = _encode({"row": row, "raw": msgspec.Raw(line)})
            check_row(body, self._limits)
        except RowFault as found:
            return Fault(found.column, found.reason, "invalid_request")
        return TableRow(body, summarise(row), str(number), None)

    def _row(self, fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for key, value in fields.items():
            name = self._names.get(key)
            if name is None:
                name = self._names[key] = self._given.add(key)
            row[name] = self._value(name, value)
        if self._keep is None:
            return row
        return {name: row[name] for name in self._keep if name in row}

    def _value(self, name: str, value: msgspec.Raw) -> Any:
        """A field's value: text is cleaned, a stated type is made, all else stays as it was written."""
        return self._convert(name, bytes(value)) if name in self._types else _clean_value(value)

    def _convert(self, name: str, text: bytes) -> Cell:
        kind = self._types[name]
        if text[0] in _NESTED:
            raise RowFault(name, f"an object or an array is not of the type {kind}", "")
        try:
            return CONVERSIONS[kind](_decode_cell(text))
        except (ValueError, msgspec.DecodeError) as error:
            raise RowFault(name, str(error), "") from None


def _clean_value(value: msgspec.Raw) -> Any:
    text = bytes(value)
    if text[0] == _QUOTE:
        return clean(_decode_text(text)) or None
    return None if text == _NULL else value


def build_row(line: bytes, limits: TableLimits) -> tuple[bytes, str, list[str]]:
    """Body, summary and columns of the row that a single JSON object stands for. Raises RowFault."""
    given = ColumnNames({}, limits)
    row = {given.add(key): _clean_value(value) for key, value in _decode_fields(line).items()}
    body = _encode({"row": row, "raw": msgspec.Raw(line)})
    check_row(body, limits)
    return body, summarise(row), list(row)


def _split(pieces: Iterable[bytes], max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines by number, without their ends. None is a line that is too long, of which nothing is held."""
    held: list[bytes] = []
    size = place = 0
    for piece in pieces:
        if not size and piece.endswith(b"\n") and explain.is_blank(piece):  # millions of empty lines are no work
            place += piece.count(b"\n")
            continue
        *ended, rest = piece.split(b"\n")
        for line in ended:
            held.append(line)
            size += len(line)
            place += 1
            yield place, b"".join(held) if size <= max_line_bytes else None
            held.clear()
            size = 0
        size += len(rest)
        if size <= max_line_bytes:
            held.append(rest)
        else:
            held.clear()
    if size:
        yield place + 1, b"".join(held) if size <= max_line_bytes else None
