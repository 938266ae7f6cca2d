"""Results as the library gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.export.result_lines import OutcomeRow


class RowFailed(PenstockError):  # noqa: N818 -- what happened to the row
    """A row without a value; raised by `Result.value`."""

    def __init__(self, result: Result) -> None:
        super().__init__(f"row {result.index} is {result.state}: {result.error_message}")
        self.result = result


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one row."""

    index: int
    """Place of the row among the rows, from 0."""
    state: str
    """`completed`, `failed`, `not_found`, `skipped`, or `cancelled` if it was never run."""
    error_code: str | None = None
    error_message: str | None = None
    _value: Any = None

    @property
    def ok(self) -> bool:
        """Whether the row has a value."""
        return self.state == "completed"

    @property
    def value(self) -> Any:
        """What the function returned, as JSON has it. Raises `RowFailed` if it returned nothing."""
        if not self.ok:
            raise RowFailed(self)
        return self._value


def make_result(row: OutcomeRow) -> Result:
    """The result of an outcome. Lines are counted from 1, rows from 0."""
    value = None if row.response is None else msgspec.json.decode(row.response)
    return Result(row.line - 1, row.state, row.error_code, row.error_message, value)
