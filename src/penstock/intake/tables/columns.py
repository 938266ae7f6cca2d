"""Columns of a table: their canonical names, and the row that a record's cells become."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from penstock.config import TableLimits
from penstock.intake.explain import quoted
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.cells import CONVERSIONS, Cell, type_column
from penstock.intake.tables.table import ColumnType, RowFault, TableSpec

MAX_SUMMARY_CHARS = 120
_TELLING = dict.fromkeys(("title", "brand", "sku")).keys()
_LISTED = 20
_encoder = msgspec.json.Encoder()
_encode = _encoder.encode


class _Body(msgspec.Struct, gc=False):
    """Row as it is stored."""

    row: Any
    raw: Any


def canonical_name(text: str) -> str:
    """Lower case, each run of other characters than letters (with their marks) and digits as one `_`."""
    lowered = unicodedata.normalize("NFC", text.lower())
    letters = (char if char.isalnum() or unicodedata.category(char)[0] == "M" else " " for char in lowered)
    return "_".join("".join(letters).split())


class ColumnNames:
    """Names given to a table's headers, one after the other."""

    def __init__(self, rename: Mapping[str, str], limits: TableLimits) -> None:
        self._rename = {key.strip(): name for key, name in rename.items()}
        self._limits = limits
        self._count = 0
        self._times: dict[str, int] = {}
        """How often a name was wanted: where the search for a free one begins."""
        self._taken: set[str] = set()
        self.not_renamed = set(self._rename)
        """Keys of `rename` that no header has answered to."""

    def add(self, header: str) -> str:
        """The canonical name of the next column."""
        self._count += 1
        if self._count > self._limits.max_columns:
            reason = f"more than {self._limits.max_columns:,} columns (max_columns)"
            raise RowFault("", reason, "Leave out columns, or raise max_columns.")
        header = header.strip()
        for key in (header, canonical_name(header)):
            if key in self._rename:
                self.not_renamed.discard(key)
                header = self._rename[key]
                break
        wanted = canonical_name(header) or f"column_{self._count}"
        if len(wanted) > self._limits.max_column_name_chars:
            reason = f"a name longer than {self._limits.max_column_name_chars:,} characters (max_column_name_chars)"
            raise RowFault(quoted(header), reason, "Rename the column, or raise max_column_name_chars.")
        name = wanted
        while name in self._taken:
            self._times[wanted] = self._times.get(wanted, 1) + 1
            name = f"{wanted}_{self._times[wanted]}"
        self._taken.add(name)
        return name


class BuiltRows(NamedTuple):
    """Rows made of records, up to the first that cannot be taken; and what is wrong with that one."""

    bodies: list[bytes]
    summaries: list[str]
    fault: RowFault | None


class Columns:
    """Columns of a table with a header, in the order of its rows."""

    def __init__(self, name: str, headers: Iterable[str], spec: TableSpec, limits: TableLimits) -> None:
        self._limits = limits
        given = ColumnNames(spec.rename, limits)
        found = [given.add(header) for header in headers]
        types = stated_types(spec)
        kept = kept_columns(name, spec) or found
        places = {column: place for place, column in enumerate(found)}
        wrong = [("rename", key) for key in sorted(given.not_renamed)]
        wrong += [("keep", column) for column in kept if column not in places]
        wrong += [("types", column) for column in types if column not in places]
        if wrong:
            raise _unknown(name, *wrong[0], found)
        self.width = len(found)
        self.names = tuple(kept)
        self._picked: list[tuple[int, Callable[[Sequence[Cell]], list[Cell]]]] = [
            (places[column], _converter(types.get(column))) for column in kept
        ]
        self._telling = [kept.index(column) for column in _TELLING if column in kept]
        fields = {f"column_{place}": column for place, column in enumerate(kept)}
        self._make_row = msgspec.defstruct("Row", [(field, Any) for field in fields], rename=fields, gc=False)
        self._unusual_bytes = min(limits.max_row_bytes, limits.max_cell_bytes)

    def build(self, records: Sequence[Sequence[Cell]]) -> BuiltRows:
        """Build the rows that have these cells, up to the first that cannot be taken."""
        if not records:
            return BuiltRows([], [], None)
        values: list[list[Cell]] = []
        cells = list(zip(*records, strict=True))
        try:
            for place, convert in self._picked:
                values.append(convert(cells[place]))
        except ValueError as error:
            if len(records) > 1:
                return self._build_each(records)
            hint = "Correct the cell, or take the column out of `types`."
            return BuiltRows([], [], RowFault(self.names[len(values)], str(error), hint))
        bodies = _encoder.encode_lines(list(map(_Body, map(self._make_row, *values), records))).split(b"\n")
        bodies.pop()  # what follows the last line's end
        if max(map(len, bodies)) > self._unusual_bytes:
            if len(records) > 1:
                return self._build_each(records)
            try:
                self._check_cells(records[0])
                check_row(bodies[0], self._limits)
            except RowFault as fault:
                return BuiltRows([], [], fault)
        return BuiltRows(bodies, self._summarise(values), None)

    def _build_each(self, records: Sequence[Sequence[Cell]]) -> BuiltRows:
        bodies: list[bytes] = []
        summaries: list[str] = []
        for record in records:
            built = self.build([record])
            if built.fault is not None:
                return BuiltRows(bodies, summaries, built.fault)
            bodies += built.bodies
            summaries += built.summaries
        return BuiltRows(bodies, summaries, None)

    def _summarise(self, values: Sequence[Sequence[Cell]]) -> list[str]:
        """`summarise` of each row, from the values column by column."""
        lines = _join_columns([values[place] for place in self._telling])
        if not lines or not all(lines):
            first = _join_columns(values[:3])
            lines = [line or instead for line, instead in zip(lines, first, strict=True)] if lines else first
        # Looked at together: it is rare that one of them is not printable.
        return lines if "".join(lines).isprintable() else list(map(_one_line, lines))

    def _check_cells(self, cells: Sequence[Cell]) -> None:
        most = self._limits.max_cell_bytes
        for place, cell in enumerate(cells, 1):
            if isinstance(cell, str) and len(cell.encode()) > most:
                reason = f"cell {place} is longer than {most:,} bytes (max_cell_bytes)"
                raise RowFault("", reason, "Shorten it, or raise max_cell_bytes.")


def _converter(kind: ColumnType | None) -> Callable[[Sequence[Cell]], list[Cell]]:
    """What makes a column's values of its cells. Raises ValueError if one is not of the stated type."""
    if kind is None:
        return type_column
    convert = CONVERSIONS[kind]
    return lambda cells: list(map(convert, cells))


def check_row(body: bytes, limits: TableLimits) -> None:
    if len(body) > limits.max_row_bytes:
        raise row_too_large(limits)


def row_too_large(limits: TableLimits) -> RowFault:
    reason = f"larger than {limits.max_row_bytes:,} bytes (max_row_bytes)"
    return RowFault("", reason, "Shorten its cells, leave out columns, or raise max_row_bytes.")


def stated_types(spec: TableSpec) -> dict[str, ColumnType]:
    return {canonical_name(column): kind for column, kind in spec.types.items()}


def kept_columns(name: str, spec: TableSpec) -> list[str] | None:
    """The columns to keep, by canonical names; None for all."""
    if spec.keep is None:
        return None
    kept = [canonical_name(column) for column in spec.keep]
    if not kept or len(set(kept)) < len(kept):
        wrong = "a column twice" if kept else "no column"
        raise IntakeRefused(f"{name}: `keep` names {wrong}", hint="Name each column to keep once, or leave it out.")
    return kept


def summarise(row: Mapping[str, Any]) -> str:
    """What a row is about, in one short line: its title, brand and sku, else its first columns."""
    line = "" if _TELLING.isdisjoint(row) else _join(map(row.get, _TELLING))
    return _one_line(line or _join(islice(row.values(), 3)))


def _one_line(line: str) -> str:
    if line.isprintable():
        return line
    return " ".join("".join(char if char.isprintable() else " " for char in line).split())


def _join(values: Iterable[Any]) -> str:
    shown = [
        value[:MAX_SUMMARY_CHARS] if isinstance(value, str) else _encode(value).decode()
        for value in values
        if value is not None
    ]
    return " · ".join(shown)[:MAX_SUMMARY_CHARS]


def _join_columns(columns: Sequence[Sequence[Cell]]) -> list[str]:
    """`_join` of each row of these columns. No value of a table with a header is an empty text."""
    shown = list(map(_show_column, columns))
    if len(shown) == 1:
        return shown[0]
    return [" · ".join(filter(None, row))[:MAX_SUMMARY_CHARS] for row in zip(*shown, strict=True)]


def _show_column(values: Sequence[Cell]) -> list[str]:
    """Each value as a summary shows it; nothing for null."""
    if set(map(type, values)) == {int}:
        return list(map(str, values))
    return [
        "" if value is None else value[:MAX_SUMMARY_CHARS] if isinstance(value, str) else _encode(value).decode()
        for value in values
    ]


def _unknown(name: str, what: str, column: str, found: Sequence[str]) -> IntakeRefused:
    more = f", and {len(found) - _LISTED:,} more" if len(found) > _LISTED else ""
    return IntakeRefused(
        f"{name}: `{what}` names the column {quoted(column)}, which the file does not have",
        hint=f"Its columns are {', '.join(found[:_LISTED])}{more}.",
    )
