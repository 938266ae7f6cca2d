"""Leases that come into being outside the worker's own claims: one permit at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class OnePermit:
    """At most one permit is out, and none while the worker compares its leases with the database's: a lease that was
    claimed a moment ago under a permit would be taken for one whose answer was lost."""

    def __init__(self) -> None:
        self._withholding = asyncio.Lock()
        self._returned = asyncio.Event()
        self._returned.set()

    def issue(self) -> bool:
        """Give the permit out, if it is here and not withheld."""
        if self._withholding.locked() or not self._returned.is_set():
            return False
        self._returned.clear()
        return True

    def take_back(self) -> None:
        self._returned.set()

    @contextlib.asynccontextmanager
    async def withheld(self) -> AsyncIterator[None]:
        """Wait until the permit is back, and keep it."""
        async with self._withholding:
            await self._returned.wait()
            yield
