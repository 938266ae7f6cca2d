"""JSONL sheets: an object per row. Every column is a key of every row, null where the row has nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap

import msgspec

from penstock.export.result_lines import escape_line_ends
from penstock.export.sheets.values import Value, define_record

_ENCODER = msgspec.json.Encoder()


class JsonlWriter:
    """Writer of a JSONL file."""

    media_type = "application/x-jsonl"
    extension = "jsonl"

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._record = define_record(columns)

    def begin(self) -> bytes:
        return b""

    def write(self, rows: Sequence[Sequence[Value]]) -> bytes:
        if self._record is None:
            return escape_line_ends(_ENCODER.encode_lines([dict(zip(self._columns, row, strict=True)) for row in rows]))
        return escape_line_ends(_ENCODER.encode_lines(list(starmap(self._record, rows))))

    def end(self) -> bytes:
        return b""
