"""Who is told how far a move is."""

from __future__ import annotations

from collections.abc import Callable


class Watch:
    """Counts rows that were moved, out of those that are known to be there."""

    def __init__(self, on_progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        self._on_progress = on_progress
        self.done = 0
        self.total = 0

    def expect(self, rows: int) -> None:
        self.total += rows

    def add(self, rows: int) -> None:
        self.done += rows
        self._on_progress(self.done, self.total)
