"""Places shared between owners: an owner may have as many as it leaves free, or a multiple of that.

Alone that is half of them, beside another who takes all it can get a third. So a newcomer finds one, whatever the
others do, and no share has to be stated. Whoever finds none waits, and places that come back go round the owners.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class Shares:
    """So many places. Not thread-safe: for the event loop alone; other threads may read `parts`."""

    def __init__(self, places: int, *, per_free: int = 1) -> None:
        """An owner may have so many places for each that is free. With four it has four fifths of them alone."""
        self._free = places
        self._per_free = per_free
        self._taken: Counter[str] = Counter()
        """Places by owner."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Those who wait for a place, by owner; the owner whose turn it is comes first."""

    async def take(self, owner: str, within_s: float | None = None) -> None:
        """Take a place, which has to be given back. Raises TimeoutError if none is to be had in that time."""
        if self.take_now(owner):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            async with asyncio.timeout(within_s):
                await turn
        except (asyncio.CancelledError, TimeoutError):
            if turn.done() and not turn.cancelled():
                self.give_back(owner)
            raise

    def take_now(self, owner: str) -> bool:
        """Take a place that has to be given back, if one is to be had at once."""
        if owner in self._waiting or not self._may_take(owner):
            return False
        self._taken[owner] += 1
        self._free -= 1
        return True

    def give_back(self, owner: str) -> None:
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
        self._free += 1
        if self._waiting:
            self._hand_out()

    def parts(self, owner: str) -> int:
        """Into how many equal parts something is split that owners share, and within an owner its places."""
        return max(1, len(self._taken)) * max(1, self._taken[owner])

    def _may_take(self, owner: str) -> bool:
        return self._taken[owner] < self._per_free * self._free

    def _hand_out(self) -> None:
        """Give free places to those who wait, one owner after the other."""
        moved = True
        while moved:
            moved = False
            for owner in list(self._waiting):
                turns = self._waiting[owner]
                while turns and turns[0].done():
                    turns.popleft()
                if turns and self._may_take(owner):
                    self._taken[owner] += 1
                    self._free -= 1
                    turns.popleft().set_result(None)
                    moved = True
                del self._waiting[owner]
                if turns:
                    self._waiting[owner] = turns  # at the end: others come first now
