"""A worker process of `penstock run --workers N`: its orders come on standard input, whose end is its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from penstock import config as configuration
from penstock.cli.database import reached
from penstock.cli.fleet import read_order
from penstock.cli.main import report
from penstock.cli.target import Target
from penstock.db.pool import open_pool
from penstock.errors import PenstockError
from penstock.worker import Worker


async def _work(order: dict[str, Any]) -> None:
    settings = [(name, str(value)) for name, value in order["settings"].items()]
    url, data_dir = order["database_url"], Path(order["data_dir"])
    config = configuration.load(environ={}, overrides=settings, database_url=url, data_dir=data_dir)
    # A hold of its own: should the parent be killed, the database stays until this worker has settled.
    with reached(config) as conninfo:
        await _serve(conninfo, config, Target(**order["target"]), order["pool"])


async def _serve(conninfo: str, config: configuration.Config, target: Target, pool: str) -> None:
    database = await open_pool(conninfo, config.database, name="penstock run worker")
    loop = asyncio.get_running_loop()
    try:
        async with target.dispatcher(config) as dispatcher:
            worker = Worker(config, database, pool, dispatcher)
            # Only the parent decides what an interrupt means.
            loop.add_signal_handler(signal.SIGINT, lambda: None)
            loop.add_signal_handler(signal.SIGTERM, _abort, worker)
            loop.add_reader(sys.stdin.fileno(), _on_input, loop, worker)
            await worker.run()
    finally:
        await database.close()


def _on_input(loop: asyncio.AbstractEventLoop, worker: Worker) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        if not worker.stopping:
            worker.stop()


def _abort(worker: Worker) -> None:
    worker.stop()
    worker.stop()


def main() -> None:
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(process)d %(name)s: %(message)s")
    order = read_order()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(order))
    except PenstockError as error:
        report(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
