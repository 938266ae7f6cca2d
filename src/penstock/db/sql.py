"""Loader of the named statements of a stage's `.sql` file.

A statement starts at `-- name: its_name`, followed by comment lines that describe it. The name says
what it does and under which guard, so that a call reads like a sentence: `settle_if_leased`.

`@now` stands for the time by which a statement judges: the database's clock, or the parameter `now`, by which tests
let hours pass at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_HEADER = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_NOW = "coalesce(%(now)s::timestamptz, now())"


@dataclass(frozen=True, slots=True)
class Statement:
    name: str
    about: str
    text: bytes
    """Text sent to the server, comments stripped."""


class Statements:
    """The statements of one file, by name."""

    def __init__(self, place: str, statements: dict[str, Statement]) -> None:
        self._place = place
        self._statements = statements

    def __getitem__(self, name: str) -> bytes:
        return self._statements[name].text

    def __iter__(self) -> Iterator[Statement]:
        return iter(self._statements.values())


def parse(place: str, source: str) -> Statements:
    parts = _HEADER.split(source)
    statements: dict[str, Statement] = {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        if name in statements:
            raise ValueError(f"{place}: '{name}' is defined twice")
        lines = body.strip().splitlines()
        comments = [line.removeprefix("--").strip() for line in lines if line.startswith("--")]
        code = [line for line in lines if not line.lstrip().startswith("--")]
        if not comments:
            raise ValueError(f"{place}: '{name}' has no description")
        statements[name] = Statement(
            name, " ".join(comments), "\n".join(code).strip().rstrip(";").replace("@now", _NOW).encode()
        )
    return Statements(place, statements)


@cache
def load(package: str, filename: str) -> Statements:
    """The statements of `filename` inside `package`, read once per process."""
    return parse(f"{package}/{filename}", files(package).joinpath(filename).read_text("utf-8"))
