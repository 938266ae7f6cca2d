"""Kickoffs: a job worked off for a slice of time, in answer to a request.

A server without worker processes works itself: with one worker in each pool, whatever the number of requests. Those for
the same job share it; one for another job of the pool waits for its turn. Rows are claimed as by any worker, so that a
job's own limit holds over all of them. Where there are worker processes, they are woken, and do the work. Whether there
is anything left to do is looked up once for all who wait for a job, over its owner's connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from time import monotonic
from uuid import UUID

from penstock.claim.claim_job import JobWork, read_work
from penstock.claim.liveness import is_any_registered
from penstock.config import Config
from penstock.db.notify import WORK, notify
from penstock.db.pool import Lender, Pool, borrowed, open_pool
from penstock.dispatch.processors import ProcessorConfig
from penstock.dispatch.providers import Provider, Providers, longest_attempt_s, with_longest_timeout
from penstock.dispatch.rows.call import provider_dispatcher
from penstock.errors import PenstockError
from penstock.limits.sharing import ProviderLimits
from penstock.tasks import ignore_result
from penstock.worker.processes import InProcessWorker, LastingWorkers, ProcessorOrder, Workers, common_order
from penstock.worker.worker import CONNECTIONS_PER_WORKER

_LOOK_EVERY_S = 0.05
_LOOKS_PER_S = 200
"""Of all jobs that are waited for: with more of them, each is looked at less often."""
# A process that runs Python functions has to start before its slice begins.
_START_S = 20.0


class NotServed(PenstockError):  # noqa: N818 - what it is
    """No provider or processor of this server works the job's rows off."""


class Kickoffs:
    """Slices of jobs that one server works off."""

    def __init__(
        self, config: Config, conninfo: str, database: Pool, providers: Providers, limits: ProviderLimits
    ) -> None:
        self._config = config
        self._conninfo = conninfo
        self._database = database
        self._limits = limits
        self._providers = {provider.pool: provider for provider in providers}
        self._processors = {processor.pool: processor for processor in config.processors}
        self._slices: dict[str, asyncio.Task[None]] = {}
        """By their pools: one at a time in each."""
        self._looks: dict[UUID, asyncio.Task[JobWork | None]] = {}
        """The next look at each job that is waited for."""
        self._stopping = asyncio.Event()
        self.has_worker_processes = False
        """They work the jobs off, and need only be woken."""

    async def work(self, batch_id: UUID, owner: str, seconds: float) -> JobWork | None:
        """Work an owner's job off for so many seconds, or until nothing is left to do; returns what is to do then.

        Calls that have begun by then are waited for: a call's time at most.
        """
        until, database = monotonic() + seconds, self._database.of(owner)
        work = await _read(database, batch_id)
        while (left_s := until - monotonic()) > 0 and not self._stopping.is_set():
            if work is not None and work.over:
                return work
            if work is None or not work.has_rows:  # none yet, or none put back yet
                work = await self._look(database, batch_id, left_s)
                continue
            if self.has_worker_processes:
                async with borrowed(database) as connection:
                    await notify(connection, WORK, work.pool)
                await self._wait(database, batch_id, left_s)
            else:
                await self._share(work.pool, database, batch_id, left_s)
            work = await _read(database, batch_id)
        return await _read(database, batch_id)

    def stop(self) -> None:
        """End every slice: calls in flight end, nothing more is begun."""
        self._stopping.set()

    async def close(self) -> None:
        self.stop()
        if running := [*self._slices.values(), *self._looks.values()]:
            await asyncio.wait(running)

    async def _share(self, pool: str, database: Lender, batch_id: UUID, seconds: float) -> None:
        """Begin the pool's next slice, or wait for the end of the one there is: it may be this job's."""
        running = self._slices.get(pool)
        if running is not None:
            await asyncio.wait([running], timeout=seconds)
            return
        working = self._slices[pool] = asyncio.create_task(self._run(pool, database, batch_id, seconds), name="kickoff")
        working.add_done_callback(ignore_result)
        # It goes on when its caller leaves: others may share it.
        await asyncio.shield(working)

    async def _run(self, pool: str, database: Lender, batch_id: UUID, seconds: float) -> None:
        try:
            async with self._workers(pool, batch_id) as workers:
                if isinstance(workers, LastingWorkers):
                    await self._until_started(workers)
                await self._wait(database, batch_id, seconds)
        finally:
            del self._slices[pool]

    @contextlib.asynccontextmanager
    async def _workers(self, pool: str, batch_id: UUID) -> AsyncIterator[Workers]:
        """A worker for one job. Leaving the context lets its calls in flight end."""
        if (provider := self._providers.get(pool)) is not None:
            async with self._provider_worker(provider, batch_id) as worker:
                yield worker
        elif (processor := self._processors.get(pool)) is not None:
            async with self._processor_worker(processor, batch_id) as processes:
                yield processes
        else:
            raise NotServed(
                f"this server has no provider or processor for {pool}", hint="Configure it, or ask another."
            )

    @contextlib.asynccontextmanager
    async def _provider_worker(self, provider: Provider, batch_id: UUID) -> AsyncIterator[Workers]:
        config = self._config
        limits = dataclasses.replace(config.database, pool_max=2 * CONNECTIONS_PER_WORKER)
        judging = with_longest_timeout(config, self._longest_s)
        throttle = self._limits.of_provider(provider)
        async with (
            await open_pool(self._conninfo, limits, name="penstock kickoff") as database,
            provider.processor(config.dispatch, config.retry, throttle=throttle) as http,
            InProcessWorker(judging, database, provider.pool, provider_dispatcher(http), batch_id) as worker,
        ):
            yield worker

    def _processor_worker(self, processor: ProcessorConfig, batch_id: UUID) -> LastingWorkers:
        """A process: a function that kills it, or blocks it, must not harm the server."""
        order = ProcessorOrder(
            **common_order(self._config, logging.WARNING),
            longest_attempt_s=self._longest_s,
            processors=[processor.as_dict()],
            only_job=batch_id,
        )
        return LastingWorkers([order])

    @property
    def _longest_s(self) -> float:
        return longest_attempt_s(self._config, self._providers.values())

    async def _until_started(self, processes: LastingWorkers) -> None:
        until = monotonic() + _START_S
        while not self._stopping.is_set():
            async with borrowed(self._database) as connection:
                if await is_any_registered(connection, processes.pids):
                    return
            if monotonic() > until:
                raise NotServed("the processor's process does not start", hint="The server's log says why.")
            await self._pause(_LOOK_EVERY_S)

    async def _wait(self, database: Lender, batch_id: UUID, seconds: float) -> None:
        """Wait so long, or until there is nothing left to do for the job."""
        until = monotonic() + seconds
        while (left_s := until - monotonic()) > 0 and not self._stopping.is_set():
            work = await self._look(database, batch_id, left_s)
            if work is None or work.over:
                return

    async def _look(self, database: Lender, batch_id: UUID, seconds: float) -> JobWork | None:
        """What the next look at a job finds, for all who wait for it; None also when the time is up before."""
        look = self._looks.get(batch_id)
        if look is None:
            look = self._looks[batch_id] = asyncio.create_task(self._look_soon(database, batch_id), name="kickoff look")
            look.add_done_callback(ignore_result)
        await asyncio.wait([look], timeout=seconds)
        return look.result() if look.done() else None

    async def _look_soon(self, database: Lender, batch_id: UUID) -> JobWork | None:
        try:
            await self._pause(max(_LOOK_EVERY_S, len(self._looks) / _LOOKS_PER_S))
            return await _read(database, batch_id)
        finally:
            del self._looks[batch_id]

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


async def _read(database: Lender, batch_id: UUID) -> JobWork | None:
    async with borrowed(database) as connection:
        return await read_work(connection, batch_id)
