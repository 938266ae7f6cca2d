"""Check of a definition against the first rows of its table, while the table is stored."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.dispatch.rows.definition import Definition
from penstock.dispatch.rows.render import Image, render
from penstock.dispatch.rows.work import RenderError
from penstock.errors import UsageError

_TRIED_ROWS = 100


class NotRenderable(UsageError):  # noqa: N818 - a verdict on the definition
    """No request can be made of the rows, most often because a column that is asked for is not there."""


class _Row(Protocol):
    @property
    def body(self) -> bytes: ...

    @property
    def blob(self) -> object | None: ...


_R = TypeVar("_R", bound=_Row)


class _Body(msgspec.Struct):
    row: dict[str, Any]


_decode = msgspec.json.Decoder(_Body).decode


def check_rendering(definition: Definition, name: str, rows: Iterator[_R]) -> Iterator[_R]:
    """Pass on the rows of the table `name`. Raises NotRenderable if none of the first is one that a request can be made
    of; a row that lacks what others have fails alone, when it is its turn."""
    problem: str | None = None
    for row in islice(rows, _TRIED_ROWS):
        yield row
        found = _problem_of(definition, row)
        if found is None:
            break
        problem = problem or found
    else:
        if problem is not None:
            hint = "Name columns that are there; --dry-run of `penstock run` shows the first row's request."
            raise NotRenderable(f"{name}: row 1: {problem}", hint=hint)
    yield from rows


def _problem_of(definition: Definition, row: _Row) -> str | None:
    image = None if row.blob is None else Image("image/png", b"")  # which one it is, no template can tell
    try:
        render(definition, _decode(row.body).row, attempt=1, image=image)
    except RenderError as error:
        return str(error)
    return None
