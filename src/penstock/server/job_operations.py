"""Operations on jobs: those that this server does, a chunk of each in turn."""

from __future__ import annotations

import logging
from time import monotonic
from uuid import UUID

from penstock.backoff import Backoff
from penstock.batches.reprocess import Doing, Step, do_step, take
from penstock.config import Config
from penstock.db.pool import Connection, Pool, borrowed

_log = logging.getLogger("penstock.operations")

# While as many rows of each job are in flight as may be: the pause until the next look for room.
_FIRST_LOOK_S = 0.02
_LAST_LOOK_S = 0.5
_AT_ONCE = 16
_AFTER_ERROR_S = 5.0
_FIRST = UUID(int=0)


class JobOperations:
    """Operations that this server has taken, under one identity.

    One for which there is no room is given back, and taken again after all others: however many wait, those that can go
    on do.
    """

    def __init__(self, config: Config, database: Pool) -> None:
        self._grace_s = config.liveness.heartbeat_grace_s
        self._database = database
        self._worker_id: UUID | None = None
        self._doing: list[Doing] = []
        self._taken_to = _FIRST
        self._failed: dict[UUID, float] = {}
        """Operations whose last chunk failed, with the time from which they are tried again."""
        self._looks = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)

    async def step(self, worker_id: UUID) -> bool:
        """Do a chunk of each operation. True if there is more to do."""
        if worker_id != self._worker_id:
            # What the old identity had is taken like that of any dead server.
            self._worker_id, self._doing = worker_id, []
        steps: list[Step] = []
        async with borrowed(self._database) as connection:
            await self._take(connection, worker_id)
            for doing in list(self._doing):
                step = await self._try(connection, doing, worker_id)
                if step is not None:
                    steps.append(step)
                if step is not Step.MOVED:
                    self._doing.remove(doing)
        if Step.MOVED in steps:
            self._looks.reset()
        elif Step.NO_ROOM in steps:
            await self._looks.wait()
        return bool(steps)

    async def _take(self, connection: Connection, worker_id: UUID) -> None:
        """Take operations from where the last take ended, once around at most."""
        self._failed = {failed: until for failed, until in self._failed.items() if until > monotonic()}
        while len(self._doing) < _AT_ONCE:
            besides = [*(doing.id for doing in self._doing), *self._failed]
            found = await take(connection, worker_id, self._grace_s, after=self._taken_to, besides=besides)
            if found is not None:
                self._doing.append(found)
                self._taken_to = found.id
            elif self._taken_to == _FIRST:
                return
            else:
                self._taken_to = _FIRST

    async def _try(self, connection: Connection, doing: Doing, worker_id: UUID) -> Step | None:
        """Do a chunk; None if it failed. Then the operation is tried again later, and the others go on."""
        try:
            return await do_step(connection, doing, worker_id)
        except Exception as error:
            if connection.closed:
                raise
            _log.error("operation %s: trying again: %s", doing.id, type(error).__name__)
            self._failed[doing.id] = monotonic() + _AFTER_ERROR_S
            return None
