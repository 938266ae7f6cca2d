"""Session workers, in the server's own process: a session's request is claimed by the commit that stores it.

A request that goes through a worker process is stored, notified, claimed, read, called, settled and notified again:
three commits one after the other, and two reads. Where the process that stores it can call it too, the claim is part of
the storing, and the answer is known where its caller waits. A request that finds no room here goes the longer way, and
so does one queued behind another: session workers also claim like any other worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import psycopg

from penstock.config import Config
from penstock.db.notify import NoticeListener
from penstock.db.pool import Pool, open_pool
from penstock.dispatch.providers import Provider, longest_attempt_s, with_longest_timeout
from penstock.errors import PenstockError
from penstock.limits.sharing import ProviderLimits
from penstock.model import ClaimPermit, Item
from penstock.sessions.streams import StreamWriter
from penstock.settle.buffer import Answers
from penstock.worker.worker import CONNECTIONS_PER_WORKER, Worker

_log = logging.getLogger("penstock.worker")

_PAUSE_S = 1.0


class SessionWorkers:
    """Session workers of one server: one for each provider."""

    def __init__(
        self,
        config: Config,
        conninfo: str,
        providers: Iterable[Provider],
        notices: NoticeListener,
        limits: ProviderLimits,
    ) -> None:
        self._config = config
        self._conninfo = conninfo
        self._notices = notices
        self._limits = limits
        self._providers = tuple(providers)
        self._workers: dict[str, Worker] = {}
        self._stopping = asyncio.Event()
        self._working: asyncio.Task[None] | None = None
        self.on_answers: Callable[[Answers], None] = lambda _: None
        """Called when answers that callers wait for have been recorded."""

    async def __aenter__(self) -> Self:
        if self._providers:
            connections = CONNECTIONS_PER_WORKER * (len(self._providers) + 1)
            limits = dataclasses.replace(self._config.database, pool_max=connections)
            database = await open_pool(self._conninfo, limits, name="penstock sessions")
            self._working = asyncio.create_task(self._work(database), name="session workers")
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
        """Run a worker, and another after each that fails."""
        config, throttle = self._config, self._limits.of_provider(provider)
        judging = with_longest_timeout(config, longest_attempt_s(config, self._providers))
        while not self._stopping.is_set():
            try:
                http = provider.processor(config.dispatch, config.retry, throttle=throttle, streams=streams)
                async with http as processor:
                    stage = (judging, database, provider.session_pool, processor.dispatcher())
                    worker = Worker(*stage, self._notices, lambda answers: self.on_answers(answers))
                    self._workers[provider.session_pool] = worker
                    await worker.run()
            except Exception as error:
                # Worker processes serve the sessions meanwhile, and the other providers' workers go on.
                said = str(error) if isinstance(error, psycopg.Error | PenstockError) else type(error).__name__
                _log.warning("the session worker of provider %s failed, beginning again: %s", provider.name, said)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await self._stopping.wait()
            finally:
                self._workers.pop(provider.session_pool, None)

    def issue_permits(self, pools: Collection[str]) -> dict[str, ClaimPermit]:
        """Permits to claim for the workers of these pools in one statement, of those that can call anything now."""
        permits: dict[str, ClaimPermit] = {}
        for pool in pools:
            worker = self._workers.get(pool)
            if worker is not None and (permit := worker.issue_permit()) is not None:
                permits[pool] = permit
        return permits

    def return_permits(self, permits: Mapping[str, ClaimPermit], claimed: Mapping[str, Sequence[Item]] | None) -> None:
        """Call the items claimed, by pool. None: the statement failed, and may have claimed some or not."""
        for pool, permit in permits.items():
            worker = self._workers.get(pool)
            if worker is not None:
                worker.return_permit(permit, None if claimed is None else claimed.get(pool, ()))

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
