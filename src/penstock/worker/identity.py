"""Identities: a process is registered and checks in, so that what it leaves half-done can be found and taken back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import PoolTimeout

from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db.pool import Pool, borrowed
from penstock.observe.logs import event
from penstock.worker.heartbeat import Heartbeat

_log = logging.getLogger("penstock.worker")

_PAUSE_S = 0.5


class Identity:
    """One worker id, from its registration until it leaves or is lost."""

    def __init__(
        self, database: Pool, pool: str, limits: LivenessLimits, *, on_beat: Callable[[], None] = lambda: None
    ) -> None:
        """`on_beat` is called in the event loop after every check-in, and when the identity was declared dead."""
        self.id: UUID = uuid4()
        self.registered = False
        self._database = database
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._on_beat = on_beat
        self.heartbeat = Heartbeat(str(database.conninfo), self.id, limits, on_beat=self._beat)

    def _beat(self) -> None:
        self._loop.call_soon_threadsafe(self._on_beat)

    async def register(self) -> None:
        """Announce this process, before its first claim, and begin to check in."""
        async with borrowed(self._database) as connection:
            self.heartbeat.count_from_now()
            await liveness.register(connection, self.id, self._pool)
        self.registered = True
        self.heartbeat.start()

    async def leave(self) -> None:
        """Stop checking in, and remove the registration. If that fails, other workers find this one silent."""
        self.heartbeat.stop()
        with contextlib.suppress(psycopg.Error, PoolTimeout):
            async with borrowed(self._database) as connection:
                await liveness.unregister(connection, self.id)


@contextlib.asynccontextmanager
async def register_identity(database: Pool, pool: str, limits: LivenessLimits) -> AsyncIterator[UUID]:
    """Register an identity for as long as the context lasts. It is not replaced if it is declared dead."""
    identity = Identity(database, pool, limits)
    await identity.register()
    try:
        yield identity.id
    finally:
        await identity.leave()


class LastingIdentity:
    """The identity of a server: replaced by a new one when it was declared dead."""

    def __init__(self, database: Pool, pool: str, limits: LivenessLimits) -> None:
        self._database = database
        self._pool = pool
        self._limits = limits
        self._beat = asyncio.Event()
        self._identity = self._new()
        self._task: asyncio.Task[None] | None = None
        self.on_change: Callable[[UUID], None] = lambda _: None

    def _new(self) -> Identity:
        return Identity(self._database, self._pool, self._limits, on_beat=self._beat.set)

    @property
    def id(self) -> UUID:
        return self._identity.id

    async def __aenter__(self) -> Self:
        await self._identity.register()
        self._task = asyncio.create_task(self._watch(), name="identity")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._identity.leave()

    async def _watch(self) -> None:
        while True:
            await self._beat.wait()
            self._beat.clear()
            if self._identity.heartbeat.declared_dead:
                fields = event("worker_identity_lost", worker=self.id, reason="it was declared dead")
                _log.warning("server %s was declared dead: going on under a new identity", self.id, extra=fields)
                await self._replace()

    async def _replace(self) -> None:
        while True:
            self._identity = self._new()
            try:
                await self._identity.register()
            except (psycopg.Error, PoolTimeout):
                await asyncio.sleep(_PAUSE_S)
                continue
            self.on_change(self.id)
            return
