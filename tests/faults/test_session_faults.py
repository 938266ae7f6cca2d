"""A session nobody else writes to, whose worker dies or falls silent: others notice by themselves, and its caller, who
waits at a server that has no worker at all, gets the answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import psycopg
import pytest

from tests.support.recorder import recording
from tests.support.server import ServerProcess, served
from tests.support.session_api import asking, new_database, write_config

GRACE_S = 3.0
# A round of housekeeping and its jitter, and what a busy machine adds.
CYCLE_S = 1.25
SLACK_S = 15.0
SETTINGS = {"heartbeat_interval_s": 0.5, "heartbeat_grace_s": GRACE_S}
TEXT = "hold lonely"


@contextmanager
def stopped(server: ServerProcess) -> Iterator[list[int]]:
    """The server and its workers stand still, and start nobody new; the workers' pids."""
    server.process.stop()
    workers = server.worker_pids
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield workers
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        server.process.cont()


def holder_of(database: str) -> tuple[int, datetime]:
    """Pid and last check-in of the worker that has the only lease."""
    with psycopg.connect(database) as connection:
        [row] = connection.execute(
            "SELECT w.pid, w.heartbeat_at FROM penstock.leases l JOIN penstock.workers w ON w.id = l.worker_id"
        ).fetchall()
    return row[0], row[1]


@pytest.mark.parametrize("way", ["killed", "silent"])
def test_a_lost_workers_request_is_answered_by_another(tmp_path: Path, server_18: str, way: str) -> None:
    with ExitStack() as stack:
        upstream = stack.enter_context(recording())
        database = stack.enter_context(new_database(server_18))
        config = write_config(tmp_path, upstream, **SETTINGS)

        def serve(name: str, workers: int) -> ServerProcess:
            return stack.enter_context(
                served(tmp_path, "--config", config, database=database, workers=workers, name=name)
            )

        front, first = serve("front", 0), serve("first", 1)
        threads = stack.enter_context(ThreadPoolExecutor(1))
        caller = threads.submit(front.ask, "POST", "/v1/sessions/lonely/requests", asking(TEXT), timeout_s=120)
        upstream.wait_called(TEXT)
        serve("second", 1)

        with ExitStack() as fault:
            workers = fault.enter_context(stopped(first))
            pid, heartbeat_at = holder_of(database)
            assert pid in (first.process.pid, *workers)
            if way == "killed":
                fault.pop_all()
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
                first.process.kill()
            upstream.wait_called(TEXT, 2)
            upstream.release("lonely")
            told = caller.result().json
            with psycopg.connect(database) as connection:
                [(reclaimed_at,)] = connection.execute("SELECT reclaimed_at FROM penstock.reclaims").fetchall()

        assert (told["status"], told["sequence"], told["attempts"]) == ("completed", 1, 1)
        assert told["response"]["body"]["choices"][0]["message"]["content"] == f"echo {TEXT}"
        silent_s = (reclaimed_at - heartbeat_at).total_seconds()
        # Of a process that is gone from the same machine the kernel knows at once.
        assert (GRACE_S if way == "silent" else 0) <= silent_s <= GRACE_S + CYCLE_S + SLACK_S
        # Whoever was taken for dead wakes up with an answer too, and changes nothing.
        if way == "silent":
            assert front.ask("POST", "/v1/sessions/lonely/requests", asking("after")).json["sequence"] == 2
        assert front.ask("GET", f"/v1/sessions/lonely/requests/{told['id']}").json == told
        assert upstream.texts.count(TEXT) == 2
