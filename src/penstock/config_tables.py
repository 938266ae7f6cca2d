"""Tables of a configuration file such as `[[providers]]`: their entries read, with errors that name the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from penstock.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=_Named)


class TableEntry:
    """One entry of a table. Its errors name the file, the entry and the field."""

    kind: ClassVar[str]
    """Name of the table."""
    fields: ClassVar[tuple[str, ...]]
    hint: ClassVar[str]

    def __init__(self, file: str, number: int, table: dict[str, Any]) -> None:
        self.file = file
        self.number = number
        self.table = table
        for name in table:
            if name not in self.fields:
                raise self.wrong(name, "unknown field", f"The fields are {', '.join(self.fields)}.")

    def wrong(self, name: str, what: str, hint: str | None = None) -> UsageError:
        entry = self.table.get("name")
        who = f"entry {self.number}" + (f" ({entry})" if isinstance(entry, str) else "")
        return UsageError(f"{self.file}: {self.kind}: {who}: {name}: {what}", hint=hint or self.hint)

    def text(self, name: str, *, required: bool = False) -> str:
        value = self.table.get(name, "")
        if not isinstance(value, str):
            raise self.wrong(name, "is not text")
        if required and not value.strip():
            raise self.wrong(name, "is missing")
        return value.strip()

    def whole_number(self, name: str, low: int, high: int) -> int | None:
        """A whole number in this range; None if it is not given."""
        value = self.table.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"{value!r} is not a whole number from {low} to {high:,}")
        return value

    def any_number(self, name: str, low: float, high: float) -> float | None:
        """A number in this range; None if it is not given."""
        value = self.table.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"{value!r} is not a number from {low:g} to {high:g}")
        return float(value)

    def name(self) -> str:
        name = self.text("name", required=True)
        if not _NAME.fullmatch(name):
            raise self.wrong("name", f"'{name}' is not a name", "Letters, digits, '_', '.' and '-', at most 63.")
        return name


def read_entries(
    kind: str, entries: Any, file: str, read: Callable[[str, int, dict[str, Any]], N], names_tell: str
) -> tuple[N, ...]:
    """Read all entries of a table. Names must differ; `names_tell` says what they tell apart."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{file}: {kind}: is not a list of tables", hint=f"Begin each with a line [[{kind}]].")
    found = tuple(read(file, number, entry) for number, entry in enumerate(entries, 1))
    names = [each.name for each in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UsageError(
                f"{file}: {kind}: entry {number + 1}: name: '{name}' is taken by entry {names.index(name) + 1}",
                hint=f"Names tell {names_tell} apart: choose another.",
            )
    return found
