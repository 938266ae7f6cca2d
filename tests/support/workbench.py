"""Worker processes on one batch, and what must be true of it in the end, whatever happened to them.

    with workbench(tmp_path, database, lines=40) as bench:
        upstream = bench.upstream("prompt")
        first = bench.worker("first", upstream, conninfo=proxy.proxied(database))
        ...
        bench.worker("second", upstream)
        bench.until_completed()
        bench.check()

A worker process is `penstock.worker.Worker` and nothing around it: SIGTERM stops it, a second SIGTERM cuts its calls
short. It logs to its process's log, and ends it with a line of JSON about itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from penstock import config_sources
from penstock.db.pool import open_pool
from penstock.dispatch.target import Target
from penstock.mock.behaviour import Behaviour, Latency
from penstock.worker.worker import Worker
from tests.support.cli import ask, check_agreement
from tests.support.db import with_connection
from tests.support.engine import make_batch
from tests.support.history import digest_of, read_history
from tests.support.processes import Process, Processes
from tests.support.upstream import UpstreamProcess, start_upstream
from tests.support.wait import wait_until

DEADLINE_S = 60.0
POOL = "test"
# Not the insert into leases: a reclaim has one too.
CLAIM = r"\blane_takes\b"
SETTLE = r"INTO penstock\.outcomes"
CONCURRENCY = 8
SETTINGS: dict[str, object] = {
    "concurrency": CONCURRENCY,
    "claim_poll_s": 0.02,
    "settle_interval_s": 0.01,
    "settle_max_rows": 8,
    "settle_capacity_rows": 16,
}
HELD = Behaviour(hang_rate=1.0)
"""Holds every call and never answers."""

_ROOT = Path(__file__).parents[2]
_BODY = b'{"model":"small","messages":[{"role":"user","content":"hello"}]}'


def taking(seconds: float) -> Behaviour:
    return Behaviour(latency=Latency(seconds, seconds))


class Bench:
    """One batch in one database, upstreams that note what they answer, and workers as processes."""

    def __init__(self, directory: Path, conninfo: str, lines: int, processes: Processes) -> None:
        self.conninfo = conninfo
        self.lines = lines
        self.upstreams: list[UpstreamProcess] = []
        self._processes = processes
        self._notes = directory / "history"
        self.batch_id = self._make_batch()

    def _make_batch(self) -> UUID:
        return with_connection(
            self.conninfo, lambda connection: make_batch(connection, [self.lines], pool=POOL, body=_BODY)
        )

    def upstream(self, name: str, behaviour: Behaviour | None = None) -> UpstreamProcess:
        upstream = start_upstream(self._processes, self._notes, behaviour, name=name)
        self.upstreams.append(upstream)
        return upstream

    def worker(
        self,
        name: str,
        upstream: UpstreamProcess,
        settings: Mapping[str, object] | None = None,
        *,
        conninfo: str | None = None,
    ) -> Process:
        order = {
            "name": name,
            "conninfo": conninfo or self.conninfo,
            "base_url": upstream.base_url,
            "settings": {**SETTINGS, **(settings or {})},
        }
        command = [sys.executable, "-m", "tests.support.workbench", json.dumps(order)]
        return self._processes.start(name, command, cwd=_ROOT)

    # -- looking

    def ask(self, query: str) -> int:
        """The only number that a query answers."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            return ask(connection, query)

    def until(self, query: str, deadline_s: float = DEADLINE_S) -> None:
        """Until the query answers something other than 0, false or NULL."""

        def true() -> bool:
            return ask(connection, query) != 0

        true.__qualname__ = query
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            wait_until(true, deadline_s)

    def until_completed(self) -> None:
        self.until("SELECT count(*) FROM penstock.batches WHERE state = 'completed'")

    def until_disconnected(self, worker: Process) -> None:
        """A statement that was sent before its client died is still carried out: until none is."""
        wait_until(lambda: worker.exit_code is not None, DEADLINE_S)
        self.until(f"SELECT (count(*) = 0)::int FROM pg_stat_activity WHERE application_name = '{worker.name}'")

    def worker_ids(self, worker: Process) -> set[UUID]:
        """The identities under which a process is registered now."""
        with psycopg.connect(self.conninfo) as connection:
            rows = connection.execute("SELECT id FROM penstock.workers WHERE pid = %s", [worker.pid]).fetchall()
        return {row[0] for row in rows}

    def outcomes(self, connection: psycopg.Connection | None = None) -> dict[str, bytes]:
        """The stored answers by Idempotency-Key; over a connection there is, if a new one may not come about."""
        if connection is None:
            with psycopg.connect(self.conninfo) as made:
                return self.outcomes(made)
        rows = connection.execute("SELECT line, response FROM penstock.outcomes").fetchall()
        return {f"{self.batch_id.hex}-{line}": response for line, response in rows}

    def calls(self) -> int:
        return sum(calls_of(upstream) for upstream in self.upstreams)

    def called(self, upstream: UpstreamProcess) -> set[str]:
        """The keys that an upstream was called with."""
        return {str(event.key) for event in self._dispatches("invoke") if event.process == upstream.process.name}

    def sent(self, upstream: UpstreamProcess | None = None) -> dict[str, set[str]]:
        """The digests of what was answered, by key: by one upstream or by any."""
        digests: dict[str, set[str]] = {}
        for event in self._dispatches("ok"):
            if event.value is not None and upstream in (None, self._named(event.process)):
                digests.setdefault(str(event.key), set()).add(event.value["digest"])
        return digests

    def _named(self, name: str) -> UpstreamProcess:
        return next(upstream for upstream in self.upstreams if upstream.process.name == name)

    def _dispatches(self, kind: str) -> list[Any]:
        return [event for event in read_history(self._notes) if event.f == "dispatch" and event.type == kind]

    # -- judging

    def unrecorded(self) -> int:
        """Calls made so far of which the database knows nothing."""
        wait_until(lambda: sum(in_flight(upstream) for upstream in self.upstreams) == 0, DEADLINE_S)
        return self.calls() - self.ask("SELECT count(*) FROM penstock.outcomes")

    def check(self) -> None:
        """Every line has exactly one outcome, its bytes are an answer that was sent for it, and counters agree."""
        with psycopg.connect(self.conninfo, autocommit=True) as connection:
            check_agreement(connection)
            assert ask(connection, "SELECT completed FROM penstock.batches") == self.lines
            assert ask(connection, "SELECT count(*) FROM penstock.leases") == 0
        stored = self.outcomes()
        assert len(stored) == self.lines
        sent = self.sent()
        for key, response in stored.items():
            assert digest_of(response) in sent[key], f"nobody answered that to {key}"


@contextmanager
def workbench(directory: Path, conninfo: str, *, lines: int) -> Iterator[Bench]:
    with Processes(directory / "processes") as processes:
        yield Bench(directory, conninfo, lines, processes)


def calls_of(upstream: UpstreamProcess) -> int:
    return int(str(upstream.stats()["calls"]))


def in_flight(upstream: UpstreamProcess) -> int:
    return int(str(upstream.stats()["in_flight"]))


def until_said(process: Process, words: str, times: int = 1) -> None:
    """Until a process has logged some words so many times."""

    def said() -> bool:
        return process.log.read_text().count(words) >= times

    said.__qualname__ = f"{process.name} said '{words}'"
    wait_until(said, DEADLINE_S)


def leave(worker: Process, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Stop a worker as a supervisor would; what it says about itself in the end."""
    worker.terminate()
    return farewell(worker, deadline_s)


def farewell(worker: Process, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    assert worker.wait(deadline_s) == 0, worker.tail()
    # A connection that was being made may still report its failure after the last word.
    (said,) = [json.loads(line) for line in worker.log.read_text().splitlines() if line.startswith("{")]
    assert isinstance(said, dict)
    return said


# -- the worker process


async def _work(order: Mapping[str, Any]) -> None:
    overrides = [(name, str(value)) for name, value in order["settings"].items()]
    config = config_sources.load(environ={}, overrides=overrides)
    database = await open_pool(order["conninfo"], config.database, name=order["name"])
    try:
        async with Target(base_url=order["base_url"]).dispatcher(config) as dispatcher:
            worker = Worker(config, database, POOL, dispatcher)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _stop, worker)
            await worker.run()
            print(json.dumps({"lost": worker.lost_identities, **asdict(worker.buffer.tally)}), flush=True)
    finally:
        await database.close()


def _stop(worker: Worker) -> None:
    logging.getLogger("workbench").info("told to stop")
    worker.stop()


def main(arguments: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(_work(json.loads(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
