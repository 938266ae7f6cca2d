"""Permit to claim for a worker outside its own claims: one at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class OnePermit:
    """At most one permit is issued, and none while the worker compares its leases with the database's: a lease claimed
    a moment ago under a permit would be taken for a forgotten one, whose answer was lost."""

    def __init__(self) -> None:
        self._withholding = asyncio.Lock()
        self._returned = asyncio.Event()
        self._returned.set()

    def issue(self) -> bool:
        """Issue the permit; false if it is out or withheld."""
        if self._withholding.locked() or not self._returned.is_set():
            return False
        self._returned.clear()
        return True

    def take_back(self) -> None:
        self._returned.set()

    @contextlib.asynccontextmanager
    async def withhold(self) -> AsyncIterator[None]:
        """Wait until the permit is back, and issue none while the context lasts."""
        async with self._withholding:
            await self._returned.wait()
            yield
