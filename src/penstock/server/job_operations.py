"""Operations on jobs: those that this server does, a chunk of each in turn."""

from __future__ import annotations

from uuid import UUID

from penstock.backoff import Backoff
from penstock.batches.reprocess import Doing, Step, do_step, take
from penstock.config import Config
from penstock.db.pool import Pool, borrowed

# While as many rows of each job are in flight as may be: the pause until the next look for room.
_FIRST_LOOK_S = 0.02
_LAST_LOOK_S = 0.5
_AT_ONCE = 16


class JobOperations:
    """Operations that this server has taken, under one identity."""

    def __init__(self, config: Config, database: Pool) -> None:
        self._grace_s = config.liveness.heartbeat_grace_s
        self._database = database
        self._worker_id: UUID | None = None
        self._doing: list[Doing] = []
        self._looks = Backoff(_FIRST_LOOK_S, _LAST_LOOK_S)

    async def step(self, worker_id: UUID) -> bool:
        """Do a chunk of each operation. True if there is more to do."""
        if worker_id != self._worker_id:
            # What the old identity had is taken like that of any dead server.
            self._worker_id, self._doing = worker_id, []
        steps: list[Step] = []
        async with borrowed(self._database) as connection:
            while len(self._doing) < _AT_ONCE and (found := await take(connection, worker_id, self._grace_s)):
                self._doing.append(found)
            for doing in list(self._doing):
                steps.append(await do_step(connection, doing, worker_id))
                if steps[-1] is Step.ENDED:
                    self._doing.remove(doing)
        if Step.MOVED in steps:
            self._looks.reset()
        elif self._doing:
            await self._looks.wait()
        return bool(self._doing)
