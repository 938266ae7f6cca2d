"""Work of a rendering: how it is counted, and values that count what is read of them.

The engine's fuel counts steps, and one step may copy or search a whole text. So what depends on the length of a value
is counted here, against one bound for all templates of a row: a character that is read is 1, an element 128.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.config import KIB, MIB

MAX_WORK = 4 * MIB
"""Work that the templates of one row may take: some 40 ms, in which the worker does nothing else."""
LONG_CHARS = 4 * KIB
"""A longer text is neither read nor compared in loops: a step there may be one of thousands."""
SEARCHED_CHARS = 512
"""A longer text is not searched (`in`) in loops: with the right needle that takes 5 ns a character."""
_ELEMENT = 128


class RenderError(Exception):
    """A template that cannot be rendered with this row; the text can be shown as it is."""


class Meter:
    """Work of one row's templates."""

    __slots__ = ("done", "longest", "max_work", "problem")

    def __init__(self, max_work: int = MAX_WORK) -> None:
        self.done = 0
        self.max_work = max_work
        self.longest: int | None = None
        """Characters that an element may have in the loops of the template that is rendered now."""
        self.problem: str | None = None
        """What went wrong: the engine passes over some errors of values."""

    def add(self, work: int) -> None:
        """Count work. Raises RenderError if it is too much."""
        self.done += work
        if self.done > self.max_work:
            self.fail(f"it takes more than {self.max_work:,} steps over texts and lists: use long values less often")

    def fail(self, problem: str) -> None:
        self.problem = self.problem or problem
        raise RenderError(self.problem)

    def check(self) -> None:
        if self.problem is not None:
            raise RenderError(self.problem)

    def read(self, value: Any) -> Any:
        """An element as templates see it, counted."""
        self.add(_ELEMENT + (len(value) if isinstance(value, str) else 0))
        if self.longest is not None and isinstance(value, str) and len(value) > self.longest:
            self.fail(f"a text of more than {self.longest:,} characters is in a template whose loops compare")
        return counted(value, self)


class _Counted:
    """Read-only value. It has no public members: templates could use them."""

    __slots__ = ("_meter", "_raw")

    def __init__(self, raw: Any, meter: Meter) -> None:
        self._raw = raw
        self._meter = meter

    def __len__(self) -> int:
        return len(self._raw)

    def __eq__(self, other: object) -> bool:
        self._meter.fail("lists and objects cannot be compared")
        return False

    def __hash__(self) -> int:
        return id(self)


class CountedList(_Counted):
    __slots__ = ()

    def __getitem__(self, at: int) -> Any:
        return self._meter.read(self._raw[at])


class CountedMapping(_Counted):
    __slots__ = ()

    def __getitem__(self, name: Any) -> Any:
        return self._meter.read(self._raw[name])

    def __iter__(self) -> Iterator[Any]:
        for name in self._raw:
            self._meter.add(_ELEMENT + len(name))
            yield name


# This is how the engine tells what they are. The classes themselves would bring methods.
Sequence.register(CountedList)
Mapping.register(CountedMapping)


def counted(value: Any, meter: Meter) -> Any:
    """The value as templates see it."""
    if isinstance(value, Mapping):
        return CountedMapping(value, meter)
    return CountedList(value, meter) if isinstance(value, list | tuple) else value


def raw_value(value: Any) -> Any:
    """What such a value stands for."""
    if isinstance(value, _Counted):
        return value._raw
    raise NotImplementedError(type(value).__name__)
