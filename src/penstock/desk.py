"""Workers in the server's own process, for sessions: what a caller hands in is claimed by the commit that stores it.

A request on its way through a worker process is stored, rung, claimed, read, called, settled and rung again: three
commits one after the other, and two looks. Where the process that stores it can call it too, the claim is part of the
storing, and the answer is known where its caller waits. Whatever finds no room here goes the other way, and so does
what was queued behind something else: these workers claim like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Self

import psycopg

from penstock.config import Config
from penstock.db.bell import Bell
from penstock.db.pool import Pool, open_pool
from penstock.errors import PenstockError
from penstock.hand import Handing
from penstock.providers import Provider, Providers
from penstock.settle.buffer import Answers
from penstock.work.streams import StreamWriter
from penstock.worker import Worker

_log = logging.getLogger("penstock.worker")

_PAUSE_S = 1.0
# Claiming and settling at once.
CONNECTIONS_PER_WORKER = 2


def patient(config: Config, providers: Providers) -> Config:
    """The settings of workers for these providers: a lease counts as stuck by this time, whichever provider's it is."""
    longest_s = max(config.dispatch.attempt_timeout_s, providers.longest_attempt_s)
    return dataclasses.replace(config, dispatch=dataclasses.replace(config.dispatch, attempt_timeout_s=longest_s))


class Desk:
    """One worker for each provider whose calls this process has a share of."""

    def __init__(self, config: Config, conninfo: str, providers: Iterable[Provider], bell: Bell) -> None:
        self._config = config
        self._conninfo = conninfo
        self._bell = bell
        self._providers = tuple(provider for provider in providers if provider.desk_share(config.dispatch))
        self._workers: dict[str, Worker] = {}
        self._stopping = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self.on_answers: Callable[[Answers], None] = lambda _: None
        """Called when answers that somebody waits for have been recorded."""

    async def __aenter__(self) -> Self:
        if self._providers:
            connections = CONNECTIONS_PER_WORKER * (len(self._providers) + 1)
            limits = dataclasses.replace(self._config.database, pool_max=connections)
            database = await open_pool(self._conninfo, limits, name="penstock desk")
            self._working = asyncio.create_task(self._work(database), name="desk")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._working is not None:
            await self._working

    async def _work(self, database: Pool) -> None:
        streams = StreamWriter(database)
        writing = asyncio.create_task(streams.run(), name="streams")
        try:
            await asyncio.gather(*(self._keep(provider, database, streams) for provider in self._providers))
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            await database.close()

    async def _keep(self, provider: Provider, database: Pool, streams: StreamWriter) -> None:
        """A worker, and after one that failed another."""
        config, share = patient(self._config, Providers(self._providers)), provider.desk_share(self._config.dispatch)
        while not self._stopping.is_set():
            try:
                async with provider.processor(config.dispatch, config.retry, share, streams=streams) as processor:
                    stage = (config, database, provider.session_pool, processor.dispatcher())
                    worker = Worker(*stage, self._bell, lambda answers: self.on_answers(answers))
                    self._workers[provider.session_pool] = worker
                    await worker.run()
            except Exception as error:
                # Whatever it is, sessions are served by the worker processes meanwhile, and the other desks go on.
                said = str(error) if isinstance(error, psycopg.Error | PenstockError) else type(error).__name__
                _log.warning("the desk of provider %s failed, beginning again: %s", provider.name, said)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await self._stopping.wait()
            finally:
                self._workers.pop(provider.session_pool, None)

    def hand_in(self, pools: Collection[str]) -> Mapping[str, Handing]:
        """Before a statement that claims for these pools' workers what it stores: those that can take anything."""
        handings: dict[str, Handing] = {}
        for pool in pools:
            worker = self._workers.get(pool)
            if worker is not None and (handing := worker.hand_in()) is not None:
                handings[pool] = handing
        return handings

    def stop(self) -> None:
        """Let calls in flight end, then leave."""
        self._stopping.set()
        for worker in self._workers.values():
            if not worker.stopping:
                worker.stop()

    def abort(self) -> None:
        """Cut calls in flight short; they are given back."""
        self.stop()
        for worker in list(self._workers.values()):
            worker.stop()
