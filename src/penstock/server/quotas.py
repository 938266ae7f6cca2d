"""Limits of the owners that call this server: remembered for a moment, and the requests that each may make a minute.

Requests are counted over all servers, by the minutes of the database's clock. A server takes them in steps of a
twentieth of the limit: it asks the database once a step, and not at all for an owner that has used up its minute.
"""

from __future__ import annotations

import asyncio
from math import ceil
from time import monotonic

from penstock.config import QuotaLimits
from penstock.db.pool import Pool, borrowed
from penstock.quotas.quotas import Quota, QuotaExceeded, quota_in_force, read_own_quota, take_requests

_STEPS = 20
"""Steps in which a minute's requests are taken."""
_MAX_REMEMBERED = 10_000


class OwnerQuotas:
    """Limits in force, by owner. Answers of the database are remembered for `cache_s`."""

    def __init__(self, database: Pool, default: QuotaLimits, cache_s: float) -> None:
        self._database = database
        self._default = default
        self._cache_s = cache_s
        self._known: dict[str, _Known] = {}

    async def read(self, owner: str) -> Quota:
        """The limits of an owner."""
        known = self._of(owner)
        if monotonic() >= known.fresh_until:
            async with known.asking:  # one question, however many callers wait for its answer
                if monotonic() >= known.fresh_until:
                    asked_at = monotonic()
                    async with borrowed(self._database) as connection:
                        own = await read_own_quota(connection, owner)
                    known.quota = quota_in_force(own, self._default)
                    known.fresh_until = asked_at + self._cache_s
        return known.quota

    async def admit(self, owner: str) -> None:
        """Count a request of an owner, or raise QuotaExceeded."""
        most = (await self.read(owner)).requests_per_minute
        if not most:
            return
        known = self._of(owner)
        if not known.take():
            async with known.asking:
                if not known.take():
                    await self._take_step(known, owner, most)
        if known.refused:
            raise QuotaExceeded(
                "requests_per_minute",
                f"You have made {most:,} requests this minute, which is the limit (requests_per_minute).",
                hint="Wait for the time that Retry-After tells, and send fewer.",
                retry_after_s=max(1, ceil(known.minute_until - monotonic())),
            )

    async def _take_step(self, known: _Known, owner: str, most: int) -> None:
        step, asked_at = max(1, most // _STEPS), monotonic()
        async with borrowed(self._database) as connection:
            before, left_s = await take_requests(connection, owner, step)
        known.minute_until = asked_at + left_s
        granted = min(step, most - before)
        known.refused = granted <= 0
        known.left = granted - 1

    def _of(self, owner: str) -> _Known:
        if owner not in self._known:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            self._known[owner] = _Known()
        return self._known[owner]


class _Known:
    """What a server knows of an owner."""

    __slots__ = ("asking", "fresh_until", "left", "minute_until", "quota", "refused")

    def __init__(self) -> None:
        self.quota = Quota()
        self.fresh_until = float("-inf")
        self.asking = asyncio.Lock()
        self.minute_until = float("-inf")
        self.left = 0
        self.refused = False
        """All requests of the minute are taken."""

    def take(self) -> bool:
        """Take a request of this minute, or know that none is left; False if the database has to be asked."""
        if monotonic() >= self.minute_until:
            self.refused = False
            return False
        if self.left > 0:
            self.left -= 1
            return True
        return self.refused
