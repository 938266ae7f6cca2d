"""Calls that several dispatchers may have at a time together, in an order of rank.

Whoever comes first takes what is free. Those behind it get what it leaves: a slot is theirs only while none before them
has an item ready for it.
"""

from __future__ import annotations

from typing import Protocol


class Sharer(Protocol):
    """One of those who share."""

    @property
    def startable(self) -> int:
        """Items that could be called now."""

    def wake(self) -> None:
        """There may be room: start what can be started."""


class Slots:
    """So many calls at a time. For the event loop's thread alone."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity
        self._sharers: list[Sharer] = []

    def join(self, sharer: Sharer) -> None:
        """Take the place behind those who have joined before."""
        self._sharers.append(sharer)

    def room(self, asker: Sharer) -> int:
        """How many calls may be begun by this one now."""
        room = self.free
        for sharer in self._sharers:
            if sharer is asker or room <= 0:
                break
            room -= sharer.startable
        return max(0, room)

    def take(self) -> None:
        self.free -= 1

    def give(self) -> None:
        """A call is over."""
        self.free += 1
        self.nudge()

    def nudge(self) -> None:
        """Something has changed that may leave room."""
        if self.free > 0:
            for sharer in self._sharers:
                sharer.wake()
