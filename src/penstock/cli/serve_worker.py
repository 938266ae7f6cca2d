"""A worker process of `penstock serve` or `penstock worker`, while the parent lives.

For each provider there are two workers, one for sessions and one for batches. They share what the provider takes at a
time, and sessions go first: somebody waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from penstock import config as configuration
from penstock.cli.database import reached
from penstock.cli.fleet import read_order
from penstock.cli.logs import log_to_stderr
from penstock.cli.main import report
from penstock.config import Config
from penstock.db.bell import WORK, Bell
from penstock.db.pool import open_pool
from penstock.desk import CONNECTIONS_PER_WORKER, patient
from penstock.dispatch.slots import Slots
from penstock.errors import PenstockError
from penstock.providers import Providers, parse
from penstock.work.streams import StreamWriter
from penstock.worker import Worker

_LOOK_OUT_S = 0.1


async def _work(order: dict[str, Any]) -> None:
    settings = [(name, str(value)) for name, value in order["settings"].items()]
    url, data_dir = order["database_url"], Path(order["data_dir"])
    config = configuration.load(environ={}, overrides=settings, database_url=url, data_dir=data_dir)
    providers = Providers(parse(order["providers"], "the providers"))
    # A hold of its own: should the parent be killed, the database stays until these workers have settled.
    with reached(config) as conninfo:
        await _serve(conninfo, config, providers, _Part(order["index"], order["processes"], order["desk"]))


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Which part of the providers' calls is this process's."""

    index: int
    processes: int
    desk: bool
    """The server's own process has a part too."""


async def _serve(conninfo: str, config: Config, providers: Providers, part: _Part) -> None:
    limits = config.database
    wanted = max(limits.pool_max, CONNECTIONS_PER_WORKER * (2 * len(providers) + 1))
    database = await open_pool(conninfo, dataclasses.replace(limits, pool_max=wanted), name="penstock worker")
    bell, streams = Bell(conninfo), StreamWriter(database)
    try:
        async with contextlib.AsyncExitStack() as stack:
            workers = []
            for provider in providers:
                share = provider.share(config.dispatch, part.index, part.processes, desk=part.desk)
                if not share:
                    continue
                processor = provider.processor(config.dispatch, config.retry, share, streams=streams)
                await stack.enter_async_context(processor)
                slots = Slots(share)
                workers += [
                    Worker(patient(config, providers), database, pool, processor.dispatcher(slots), bell)
                    for pool in (provider.session_pool, provider.pool)
                ]
            crew = _Crew(workers)
            crew.heed_the_parent()
            aides = [
                asyncio.create_task(bell.run(), name="bell"),
                asyncio.create_task(streams.run(), name="streams"),
                asyncio.create_task(_look_out(bell, providers), name="look-out"),
            ]
            try:
                await crew.run()
            finally:
                for task in aides:
                    task.cancel()
                await asyncio.gather(*aides, return_exceptions=True)
    finally:
        await database.close()


async def _look_out(bell: Bell, providers: Providers) -> None:
    """Where no notices come, look for sessions' requests more often than for other work: somebody waits."""
    while True:
        await asyncio.sleep(_LOOK_OUT_S)
        if not bell.listening.is_set():
            for provider in providers:
                bell.tell(WORK, provider.session_pool)


class _Crew:
    """Workers that begin and end together."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._told = asyncio.Event()

    async def run(self) -> None:
        """Until told to stop. One that fails takes the process with it, to be started anew as a whole."""
        tasks = [asyncio.create_task(worker.run(), name="worker") for worker in self._workers]
        tasks.append(asyncio.create_task(self._until_told(), name="told"))
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if left:
            self.stop()
            await asyncio.wait(left)
        for task in done:
            task.result()

    async def _until_told(self) -> None:
        await self._told.wait()

    def stop(self) -> None:
        self._told.set()
        for worker in self._workers:
            if not worker.stopping:
                worker.stop()

    def abort(self) -> None:
        self._told.set()
        for worker in self._workers:
            worker.stop()
            worker.stop()

    def heed_the_parent(self) -> None:
        """The end of standard input is the end of work; a SIGTERM, of calls in flight too."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        loop.add_signal_handler(signal.SIGTERM, self.abort)
        loop.add_reader(sys.stdin.fileno(), self._on_input, loop)

    def _on_input(self, loop: asyncio.AbstractEventLoop) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            self.stop()


def main() -> None:
    order = read_order()
    log_to_stderr(verbose=order["verbose"])
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(order))
    except PenstockError as error:
        report(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
