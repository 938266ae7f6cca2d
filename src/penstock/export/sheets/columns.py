"""Columns of a job's sheet: the input's, the result's, then what became of the row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count

import msgspec

from penstock.export.sheets.values import Value, values_reader

_STATUS_COLUMNS = ("status", "attempts", "error")
_NO_RESULT = b"{}"
_NO_OBJECT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


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
        self._read_inputs = values_reader(input_columns, inside="row")
        self._read_results = values_reader(result_columns)

    def assemble(
        self,
        bodies: Sequence[bytes],
        results: Sequence[bytes | None],
        statuses: Sequence[str],
        attempts: Sequence[int],
        errors: Sequence[str | None],
    ) -> list[tuple[Value, ...]]:
        """Rows of the sheet. A result that is not a JSON object, such as the page that a gateway answered with, has no
        columns."""
        inputs, outputs = self._read_inputs(bodies), self._results(results)
        endings = zip(statuses, attempts, errors, strict=True)
        return [row + result + ending for row, result, ending in zip(inputs, outputs, endings, strict=True)]

    def _results(self, results: Sequence[bytes | None]) -> list[tuple[Value, ...]]:
        objects = [_NO_RESULT if result is None else result for result in results]
        try:
            return list(self._read_results(objects))
        except _NO_OBJECT:
            return list(map(self._result, objects))

    def _result(self, result: bytes) -> tuple[Value, ...]:
        try:
            return next(self._read_results([result]))
        except _NO_OBJECT:
            return next(self._read_results([_NO_RESULT]))


def _add_free_name(name: str, prefix: str, taken: set[str]) -> str:
    """Name for a column, taken from now on: its own, or with the prefix, or with the first number that is free."""
    numbered = (f"{prefix}{name}_{number}" for number in count(2))
    free = next(candidate for candidate in chain((name, prefix + name), numbered) if candidate not in taken)
    taken.add(free)
    return free
