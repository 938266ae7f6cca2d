"""Watch over the keys of requests that last: a stream or a long poll ends when its key is revoked or expires."""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout

from penstock.api.guard import Guard
from penstock.api.keys import list_usable_keys
from penstock.db.pool import Pool, borrowed
from penstock.tasks import cancel_and_wait

_log = logging.getLogger("penstock.api")

_SHORTEST_S = 0.5


class KeyWatch:
    """Open requests by their keys. One query in half of `cache_s` asks for all keys that have a request open; the other
    half is what authentication remembers a key for. Together they are the time that a revoked key still works."""

    def __init__(self, database: Pool, cache_s: float) -> None:
        self._database = database
        self._every_s = max(_SHORTEST_S, cache_s / 2)
        self._open: dict[UUID, set[Guard]] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, key_id: UUID, guard: Guard) -> None:
        """Watch over a request until `end`."""
        self._open.setdefault(key_id, set()).add(guard)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="key watch")

    def end(self, key_id: UUID, guard: Guard) -> None:
        left = self._open[key_id]
        left.discard(guard)
        if not left:
            del self._open[key_id]

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait([self._task])

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if not self._open:
                continue
            try:
                await self._look()
            except (psycopg.Error, PoolTimeout, PoolClosed) as error:
                _log.warning("cannot look whether keys are still valid, trying again: %s", type(error).__name__)

    async def _look(self) -> None:
        asked = list(self._open)
        async with borrowed(self._database) as connection:
            usable = await list_usable_keys(connection, asked)
        for key_id in set(asked) - usable:
            for guard in tuple(self._open.get(key_id, ())):
                guard.shut()
