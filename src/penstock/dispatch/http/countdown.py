"""One time limit for many tasks."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any


class Countdown:
    """One time limit for many tasks with one timer: as all have the same limit, the first to start
    is the first to run out. A timer for each request would cost a tenth of the request."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._started: dict[asyncio.Task[Any], float] = {}
        self._expired: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, task: asyncio.Task[Any]) -> None:
        self._started.pop(task, None)
        self._started[task] = monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._check)

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Do not count any longer. If the time was up already, `claims` still finds out."""
        self._started.pop(task, None)

    def stop(self, task: asyncio.Task[Any]) -> None:
        self._started.pop(task, None)
        if task in self._expired:  # the client answered with something else than the cancellation
            self._expired.discard(task)
            task.uncancel()

    def claims(self, task: asyncio.Task[Any]) -> bool:
        """Whether a cancellation just caught in `task` came from here; if so it is undone."""
        if task not in self._expired:
            return False
        self._expired.discard(task)
        return task.uncancel() == 0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        now = monotonic()
        for task, started in list(self._started.items()):
            remaining_s = started + self.limit_s - now
            if remaining_s > 0:
                self._timer = asyncio.get_running_loop().call_later(remaining_s, self._check)
                return
            del self._started[task]
            self._expired.add(task)
            task.cancel()
