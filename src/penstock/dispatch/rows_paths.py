"""Paths of a provider that HTTP jobs may ask for, as its operator lists them: `"GET /prices/"`, `"/search"`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from penstock.errors import UsageError

_PATTERN = re.compile(r"(?:(GET|POST|PUT|PATCH) )?(/[^\s?#{}\\\x00-\x1f]*)")
_BLOCK = re.compile(r"\{[{%#]")


@dataclass(frozen=True, slots=True)
class RowsPath:
    """Path, or all below it if it ends with `/`; for one method or for all."""

    method: str | None
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _PATTERN.fullmatch(text)
        if found is None:
            hint = "Write GET /prices/ for all below /prices/, /search for this path and every method."
            raise UsageError(f"'{text}' is not a path", hint=hint)
        return cls(found[1], found[2])

    def __str__(self) -> str:
        return self.path if self.method is None else f"{self.method} {self.path}"

    def allows(self, method: str, template: str) -> bool:
        """Whether every path that the template makes is allowed. What stands before its first block decides: columns
        are percent-encoded, and a path with `..` in it is never sent (`rows.definition.check_path`)."""
        if self.method not in (None, method):
            return False
        found = _BLOCK.search(template)
        literal = template if found is None else template[: found.start()]
        return literal.startswith(self.path) if self.path.endswith("/") else template == self.path
