"""Columns of a job's sheet: the input's, the result's, then what became of the row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import msgspec

from penstock.export.sheets.values import Value

_STATUS_COLUMNS = ("status", "attempts", "error")


class _Body(msgspec.Struct):
    """Stored row. Its `raw` is skipped."""

    row: dict[str, Any]


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_result = msgspec.json.Decoder(dict[str, Any]).decode


class SheetColumns:
    """Columns of a job's sheet, each with a name of its own.

    The input's columns keep their names. `status`, `attempts` and `error` stand last; one of them gets `_2` behind if
    the input has a column of that name. A result column whose name is taken by either, or by a result column before it,
    gets `result_` in front, and `_2`, `_3` and so on behind if that is taken, too. So a result column that is recorded
    later changes no name.
    """

    def __init__(self, input_columns: Sequence[str], result_columns: Sequence[str]) -> None:
        taken = set(input_columns)
        status = [_add_free_name(name, "", taken) for name in _STATUS_COLUMNS]
        results = [_add_free_name(name, "result_", taken) for name in result_columns]
        self.header = [*input_columns, *results, *status]
        self._input_columns = tuple(input_columns)
        self._result_columns = tuple(result_columns)
        self._no_results: list[Value] = [None] * len(result_columns)

    def assemble(
        self, row_json: bytes, result_json: bytes | None, status: str, attempts: int, error: str | None
    ) -> list[Value]:
        """Row of the sheet. A result that is not a JSON object, such as the page that a gateway answered with, has no
        columns."""
        values: list[Value] = list(map(_decode_body(row_json).row.get, self._input_columns))
        values += self._no_results if result_json is None else self._results(result_json)
        values += (status, attempts, error)
        return values

    def _results(self, result_json: bytes) -> list[Value]:
        try:
            result = _decode_result(result_json)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._no_results
        return list(map(result.get, self._result_columns))


def _add_free_name(name: str, prefix: str, taken: set[str]) -> str:
    """Name for a column, taken from now on: its own, or with the prefix, or with the first number that is free."""
    numbered = (f"{prefix}{name}_{number}" for number in count(2))
    free = next(candidate for candidate in chain((name, prefix + name), numbered) if candidate not in taken)
    taken.add(free)
    return free
