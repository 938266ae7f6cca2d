"""Memory for requests and answers: one budget over all connections, shared between owners.

An owner may hold as much as it leaves free: half of the budget alone, a third beside another who does the same. So
there is room for a newcomer, however much the others hold, and nobody has to be told a share of its own.
"""

from __future__ import annotations

from collections import defaultdict

STRANGER = ""
"""Owner of what comes before a key is known."""


class MemoryUsedUpError(Exception):
    """The owner may hold no more just now."""


class MemoryBudget:
    """Bytes that the requests of a server may hold. Not thread-safe: for the event loop alone."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self._held: defaultdict[str, int] = defaultdict(int)

    def held_by(self, owner: str) -> int:
        return self._held.get(owner, 0)

    def change(self, owner: str, by_bytes: int) -> None:
        """Hold so many bytes more, or fewer. Raises MemoryUsedUpError if these are too many."""
        held, free = self._held[owner] + by_bytes, self.free_bytes - by_bytes
        if by_bytes > 0 and held > free:
            if held == by_bytes:
                del self._held[owner]
            raise MemoryUsedUpError
        self.free_bytes = free
        if held:
            self._held[owner] = held
        else:
            del self._held[owner]


class Hold:
    """Part of the budget that one request, or one connection, holds."""

    __slots__ = ("_budget", "held_bytes", "owner")

    def __init__(self, budget: MemoryBudget, owner: str = STRANGER) -> None:
        self._budget = budget
        self.owner = owner
        """Whose it is. It may change while nothing is held."""
        self.held_bytes = 0

    def resize(self, size: int) -> None:
        """Hold this many bytes from now on. Raises MemoryUsedUpError if they are too many; then nothing changes."""
        if size != self.held_bytes:
            self._budget.change(self.owner, size - self.held_bytes)
            self.held_bytes = size

    def grow(self, by_bytes: int) -> None:
        self.resize(self.held_bytes + by_bytes)

    def release(self) -> None:
        self.resize(0)
