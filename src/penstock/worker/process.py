"""Worker process of `penstock run`, `serve` or `worker`. It reads its order from
standard input and stops at the end of it, so also when the parent dies.

For a server there are two workers per provider, one for sessions and one for batches. They share the provider's
concurrent calls, and sessions go first: a caller waits for each of their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psycopg
import uvloop

from penstock import config_sources
from penstock.config import Config
from penstock.db.notify import WORK, NoticeListener
from penstock.db.pool import Pool, open_pool
from penstock.db.start import start_database
from penstock.dispatch import processors
from penstock.dispatch.providers import Providers, parse, with_longest_timeout
from penstock.dispatch.rows.call import provider_dispatcher
from penstock.errors import PenstockError, report
from penstock.limits.sharing import ProviderLimits
from penstock.observe.catalogue import name_models
from penstock.observe.logs import log_run, log_to_stderr
from penstock.observe.traces import start_traces
from penstock.sessions.streams import StreamWriter
from penstock.settle.samples import Samples
from penstock.tasks import cancel_and_wait, leave_signals_to_forks
from penstock.worker.fuse import Fuse
from penstock.worker.processes import DATABASE_FAILED, AnyOrder, ProcessorOrder, RunOrder, ServeOrder, read_order
from penstock.worker.snapshots import send_snapshots
from penstock.worker.worker import CONNECTIONS_PER_WORKER, Worker

_log = logging.getLogger("penstock.worker")

_POLL_SESSIONS_S = 0.1


async def _work(order: AnyOrder, snapshots_to: int | None) -> None:
    settings = [(name, str(value)) for name, value in order.settings.items()]
    data_dir = Path(order.data_dir)
    config = config_sources.load(environ={}, overrides=settings, database_url=order.database_url, data_dir=data_dir)
    # Its own reference to the embedded server: if the parent is killed, that runs until these workers have settled.
    with start_database(config) as conninfo:
        match order:
            case RunOrder():
                workers = _run_workers(order, config, conninfo)
            case ServeOrder():
                workers = _server_workers(order, config, conninfo)
            case ProcessorOrder():
                workers = _processor_workers(order, config, conninfo)
        async with send_snapshots(snapshots_to), workers as group:
            group.obey_parent()
            await group.run()


async def _open_pool(config: Config, conninfo: str, connections: int) -> Pool:
    limits = dataclasses.replace(config.database, pool_max=max(config.database.pool_max, connections))
    return await open_pool(conninfo, limits, name="penstock worker")


@contextlib.asynccontextmanager
async def _run_workers(order: RunOrder, config: Config, conninfo: str) -> AsyncIterator[_WorkerGroup]:
    async with await _open_pool(config, conninfo, 1) as database, Samples(database, config.samples) as samples:
        limits = ProviderLimits(config, database)
        throttle = limits.of_run(order.target, order.pool)
        async with limits.running(), order.target.dispatcher(config, throttle) as dispatcher:
            fuse = Fuse(order.stop_after) if order.stop_after else None
            yield _WorkerGroup([Worker(config, database, order.pool, dispatcher, samples=samples, fuse=fuse)])


@contextlib.asynccontextmanager
async def _server_workers(order: ServeOrder, config: Config, conninfo: str) -> AsyncIterator[_WorkerGroup]:
    providers = Providers(parse(order.providers, "the providers"))
    name_models((model for model, _ in providers.models), config.metrics.metrics_max_models)
    judging = with_longest_timeout(config, order.longest_attempt_s)
    async with (
        await _open_pool(config, conninfo, CONNECTIONS_PER_WORKER * (2 * len(providers) + 1)) as database,
        Samples(database, config.samples) as samples,
        contextlib.AsyncExitStack() as stack,
    ):
        notices, streams = NoticeListener(conninfo), StreamWriter(database)
        limits = ProviderLimits(config, database)
        workers = []
        for provider in providers:
            throttle = limits.of_provider(provider)
            processor = provider.processor(config.dispatch, config.retry, throttle=throttle, streams=streams)
            await stack.enter_async_context(processor)
            workers += [
                Worker(judging, database, pool, provider_dispatcher(processor), notices, samples=samples)
                for pool in (provider.session_pool, provider.pool)
            ]
        await stack.enter_async_context(limits.running())
        tasks = [
            asyncio.create_task(notices.run(), name="notices"),
            asyncio.create_task(streams.run(), name="streams"),
            asyncio.create_task(_poll_sessions(notices, providers), name="poll sessions"),
        ]
        try:
            yield _WorkerGroup(workers)
        finally:
            await cancel_and_wait(tasks)


@contextlib.asynccontextmanager
async def _processor_workers(order: ProcessorOrder, config: Config, conninfo: str) -> AsyncIterator[_WorkerGroup]:
    known = processors.parse(order.processors, "the processors")
    name_models((one.name for one in known), config.metrics.metrics_max_models)
    judging = with_longest_timeout(config, order.longest_attempt_s)
    async with (
        await _open_pool(config, conninfo, CONNECTIONS_PER_WORKER * (len(known) + 1)) as database,
        Samples(database, config.samples) as samples,
        contextlib.AsyncExitStack() as stack,
    ):
        notices = NoticeListener(conninfo)
        workers = []
        for one in known:
            processor = await stack.enter_async_context(one.processor(config.dispatch, config.retry))
            stage = (judging, database, one.pool, processor.dispatcher())
            workers.append(Worker(*stage, notices, only_job=order.only_job, samples=samples))
        task = asyncio.create_task(notices.run(), name="notices")
        try:
            yield _WorkerGroup(workers)
        finally:
            await cancel_and_wait([task])


async def _poll_sessions(notices: NoticeListener, providers: Providers) -> None:
    """Poll sessions more often than other work while no notices arrive: a caller waits for each request."""
    while True:
        await asyncio.sleep(_POLL_SESSIONS_S)
        if not notices.listening.is_set():
            for provider in providers:
                notices.tell(WORK, provider.session_pool)


class _WorkerGroup:
    """Workers that start and stop together."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Work until stopped. A worker that fails ends the process, which is then restarted as a whole."""
        tasks = [asyncio.create_task(worker.run(), name="worker") for worker in self._workers]
        tasks.append(asyncio.create_task(self._until_stopped(), name="stop"))
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if left:
            self.stop()
            await asyncio.wait(left)
        for task in done:
            task.result()

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    def stop(self) -> None:
        """Let calls in flight end, then leave."""
        self._stopping.set()
        for worker in self._workers:
            if not worker.stopping:
                worker.stop()

    def abort(self) -> None:
        """Cut calls in flight short; they are given back."""
        self._stopping.set()
        for worker in self._workers:
            worker.stop()
            worker.stop()

    def obey_parent(self) -> None:
        """Stop at the end of standard input; at a SIGTERM, cut calls in flight short too. An interrupt is ignored: the
        parent decides what it means."""
        loop = asyncio.get_running_loop()
        leave_signals_to_forks()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        loop.add_signal_handler(signal.SIGTERM, self.abort)
        loop.add_reader(sys.stdin.fileno(), self._on_input, loop)

    def _on_input(self, loop: asyncio.AbstractEventLoop) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            self.stop()


def main() -> None:
    order = read_order()
    if isinstance(order, RunOrder):
        log_run(Path(order.data_dir), order.settings["log_format"], verbose=order.verbose)
    else:
        log_to_stderr(order.log_level, order.settings["log_format"])
    start_traces("penstock worker")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(order, int(sys.argv[1]) if len(sys.argv) > 1 else None))
    except PenstockError as error:
        report(error)
        sys.exit(error.exit_code)
    except psycopg.Error as error:
        if not isinstance(order, RunOrder):
            raise
        _log.warning("the database failed", exc_info=error)
        report(PenstockError(f"the database failed: {str(error).strip().splitlines()[0]}"))
        sys.exit(DATABASE_FAILED)


if __name__ == "__main__":
    main()
