"""Lanes of a batch that is being imported: which ordinals are answered, and which are to be run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Range = list[int]
"""A stretch of ordinals: its first, and the one after its last."""

NO_WAIT = -(2**63)
"""A time that has always passed: -infinity, as PostgreSQL sends it."""

_MAX_RANGES = 500
"""Ranges of one deferral: a claim that takes a part of it reads and writes them all."""


class Deferral(NamedTuple):
    """Ordinals of a lane that are to be run although they lie before its cursor."""

    lane: ImportLane
    ordinals: Sequence[Range]
    attempt: int
    due_at: int


@dataclass(slots=True, eq=False)
class ImportLane:
    """One lane: its ordinals are given out in line order."""

    id: int
    source_id: int
    source_lane: int
    route: str
    endpoint: str
    pool: str
    total: int | None
    """Lines of the file's lane; None if the lane holds requests whose lines are gone."""
    seen: int = 0
    completed: list[Range] = field(default_factory=list)
    others: list[Range] = field(default_factory=list)
    """Ordinals that were answered since the last segment was written."""
    _run: int | None = None
    """Where the requests begin that were never tried and have nothing but their like behind them."""
    _waiting: dict[tuple[int, int], list[Range]] = field(default_factory=dict)

    def settle(self, ordinal: int, *, completed: bool) -> None:
        self._close_run(ordinal)
        extend(self.completed if completed else self.others, ordinal)

    def wait(self, ordinal: int, attempt: int, due_at: int) -> None:
        """Have an ordinal run. Those at the end of the lane that were never tried are left beyond its cursor."""
        if attempt == 1 and due_at == NO_WAIT:
            if self._run is None:
                self._run = ordinal
            return
        self._close_run(ordinal)
        extend(self._waiting.setdefault((attempt, due_at), []), ordinal)

    @property
    def next(self) -> int:
        """The cursor."""
        return self.seen if self._run is None else self._run

    @property
    def decided(self) -> bool:
        return bool(self.completed or self.others)

    def take_deferrals(self) -> list[Deferral]:
        """What is to be deferred since the last call."""
        found = [
            Deferral(self, part, attempt, due_at)
            for (attempt, due_at), ranges in self._waiting.items()
            for part in _parts(ranges)
        ]
        self._waiting = {}
        return found

    def _close_run(self, ordinal: int) -> None:
        if self._run is not None:
            self._waiting.setdefault((1, NO_WAIT), []).append([self._run, ordinal])
            self._run = None


def extend(ranges: list[Range], ordinal: int) -> None:
    """Add an ordinal behind all that the ranges hold."""
    if ranges and ranges[-1][1] == ordinal:
        ranges[-1][1] = ordinal + 1
    else:
        ranges.append([ordinal, ordinal + 1])


def multirange(ranges: Iterable[Range]) -> str:
    """The int4multirange literal of ascending ranges."""
    return "{" + ",".join(f"[{start},{stop})" for start, stop in ranges) + "}"


def _parts(ranges: list[Range]) -> Iterable[list[Range]]:
    for at in range(0, len(ranges), _MAX_RANGES):
        yield ranges[at : at + _MAX_RANGES]
