"""Slots for calls that several dispatchers share, in an order of rank.

The first dispatcher takes any free slot. Each one behind it gets what those before it leave: a slot is free for it only
while none before it has an item ready.
"""

from __future__ import annotations

from typing import Protocol


class Sharer(Protocol):
    """Dispatcher that shares slots with others."""

    @property
    def startable(self) -> int:
        """Items that could be called now."""

    def wake(self) -> None:
        """Start as many calls as can be started: there may be room."""


class Slots:
    """Slots for `capacity` calls at a time. For the event loop's thread alone."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._sharers: list[Sharer] = []

    def join(self, sharer: Sharer) -> None:
        """Add a sharer, ranked behind those who have joined before."""
        self._sharers.append(sharer)

    def room(self, asker: Sharer) -> int:
        """Calls that this sharer may start now."""
        room = self.free
        for sharer in self._sharers:
            if sharer is asker or room <= 0:
                break
            room -= sharer.startable
        return max(0, room)

    def take(self) -> None:
        self.free -= 1

    def release(self) -> None:
        """Free the slot of a call that has ended."""
        self.free += 1
        self.nudge()

    def nudge(self) -> None:
        """Wake the sharers: a change may have left room."""
        if self.free > 0:
            for sharer in self._sharers:
                sharer.wake()
