"""Halted routes, closed until a person acts: the reason is told to callers whose wait ends without an answer."""

from __future__ import annotations

import asyncio
from time import monotonic

from penstock.claim import gates
from penstock.db.pool import Pool, borrowed
from penstock.tasks import ignore_result

_FRESH_S = 1.0
# The caller has waited long enough already: while the database is away, it gets its answer without the reason.
_PATIENCE_S = 0.3


class Halts:
    """Halted routes by pool: one query for all who ask within a second."""

    def __init__(self, database: Pool) -> None:
        self._database = database
        self._looks: dict[str, tuple[float, asyncio.Task[dict[str, str]]]] = {}

    async def why(self, pool: str, route: str) -> str | None:
        """Error code that halted a route; None if it is not halted, or not known to be."""
        since, looking = self._looks.get(pool, (0.0, None))
        if looking is None or (looking.done() and monotonic() - since > _FRESH_S):
            looking = asyncio.create_task(self._look(pool), name="halts")
            looking.add_done_callback(ignore_result)
            self._looks[pool] = (monotonic(), looking)
        await asyncio.wait([looking], timeout=_PATIENCE_S)
        if not looking.done() or looking.cancelled() or looking.exception() is not None:
            return None
        return looking.result().get(route)

    async def _look(self, pool: str) -> dict[str, str]:
        async with borrowed(self._database) as connection:
            closed = await gates.list_closed(connection, pool)
        return {gate.route: gate.code for gate in closed if gate.halted_at is not None}
