"""The servers of a chaos run: the same `penstock serve` several times over one database, started again when they end.

Each keeps its port, and reaches the database through a proxy of its own. A replica is a server and its worker process;
faults hit both or one.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import psutil

from tests.support.history import HistoryWriter
from tests.support.postgres_proxy import PostgresProxy
from tests.support.processes import Processes
from tests.support.server import ServerProcess, start_server

_RESTART_PAUSE_S = 0.2
_SETTINGS: dict[str, object] = {
    "heartbeat_interval_s": 0.75,
    "heartbeat_grace_s": 3,
    "attempt_timeout_s": 2,
    "stuck_buffer_s": 1,
    "max_attempts": 20,
    "retry_base_s": 0.05,
    "retry_cap_s": 1,
    "connect_wait_s": 5,
    # A worker is lost many times here through no fault of its requests.
    "max_reclaims": 100,
}


@dataclass(slots=True)
class _Replica:
    name: str
    port: socket.socket
    """Bound and never listening: it keeps the port ours while there is no server."""
    database: PostgresProxy
    conninfo: str
    server: ServerProcess | None = None
    start_at: float = 0.0
    frozen: bool = False

    @property
    def up(self) -> bool:
        return self.server is not None and self.server.process.alive and not self.frozen

    def pids(self) -> list[int]:
        """Its worker processes."""
        return self.server.worker_pids if self.server is not None and self.server.process.alive else []


class Replicas:
    """Keeps every replica going. Faults and restarts come from different threads."""

    def __init__(
        self,
        processes: Processes,
        history: HistoryWriter,
        databases: Sequence[PostgresProxy],
        conninfo: str,
        base_url: str,
        settings: Mapping[str, object],
    ) -> None:
        self.starts = 0
        self.lost = 0
        """Servers that ended by themselves."""
        self._processes = processes
        self._history = history
        self._options = ["--base-url", base_url, "--quiet"]
        for name, value in {**_SETTINGS, **settings}.items():
            self._options += ["--set", f"{name}={value}"]
        self._replicas = [
            _Replica(f"replica-{number}", _bound(), database, database.proxied(conninfo))
            for number, database in enumerate(databases, 1)
        ]
        self._lock = threading.RLock()
        self._killed: set[int] = set()

    @property
    def urls(self) -> list[str]:
        """Where callers find them, whoever is there at the moment."""
        return [f"http://127.0.0.1:{replica.port.getsockname()[1]}" for replica in self._replicas]

    @property
    def all_listen(self) -> bool:
        self.tend()
        return all(replica.server is not None and replica.server.listens for replica in self._replicas)

    # -- keeping them going

    def tend(self) -> None:
        """Start who is not running."""
        with self._lock:
            for replica in self._replicas:
                self._tend(replica)

    def _tend(self, replica: _Replica) -> None:
        server = replica.server
        if server is not None and not server.process.alive:
            self.lost += server.process.pid not in self._killed
            replica.server = None
            replica.frozen = False
            replica.start_at = monotonic() + _RESTART_PAUSE_S
        if replica.server is None and monotonic() >= replica.start_at:
            self._start(replica)

    def _start(self, replica: _Replica) -> None:
        directory = self._processes.directory
        log = directory / f"{replica.name}.log"
        log_from = log.stat().st_size if log.exists() else 0
        process = start_server(
            self._processes,
            directory,
            *("--port", str(replica.port.getsockname()[1])),
            *self._options,
            database=replica.conninfo,
            name=replica.name,
        )
        replica.server = ServerProcess(process, log_from)
        self.starts += 1

    def where(self) -> str:
        """What each has said last, for a run that does not end."""
        return "\n".join(
            f"{replica.name}:\n{replica.server.process.tail()}" for replica in self._replicas if replica.server
        )

    def end(self) -> None:
        """Kill them all, workers too: these outlive their server for as long as their calls last."""
        with self._lock:
            for replica in self._replicas:
                self._kill_all(replica)
                replica.port.close()

    # -- faults

    def kill(self, number: int, *, server: bool = True, worker: bool = True) -> None:
        """`kill -9`. A worker whose server is gone drains and leaves; a server whose worker is gone starts another."""
        with self._lock:
            replica = self._someone(number)
            if replica is None or replica.server is None:
                return
            if server and worker:
                self._kill_all(replica)
            elif server:
                self._killed.add(replica.server.process.pid)
                replica.server.process.kill()
            else:
                self._history.record("info", "kill", f"{replica.name} worker")
                _signal(replica.pids(), signal.SIGKILL)

    def _kill_all(self, replica: _Replica) -> None:
        server = replica.server
        if server is None or not server.process.alive:
            return
        self._killed.add(server.process.pid)
        # While it stands still it starts no other worker.
        os.kill(server.process.pid, signal.SIGSTOP)
        _signal(server.worker_pids, signal.SIGKILL)
        server.process.kill()

    def freeze(self, number: int, seconds: float) -> None:
        """Server and worker stand still; a timer lets them go on."""
        with self._lock:
            replica = self._someone(number)
            if replica is None or replica.server is None:
                return
            replica.server.process.stop()
            _signal(replica.pids(), signal.SIGSTOP)
            replica.frozen = True
            timer = threading.Timer(seconds, self._thaw, [replica, replica.server])
            timer.daemon = True
            timer.start()

    def thaw(self) -> None:
        with self._lock:
            for replica in self._replicas:
                if replica.frozen and replica.server is not None:
                    self._thaw(replica, replica.server)

    def _thaw(self, replica: _Replica, server: ServerProcess) -> None:
        with self._lock:
            if replica.server is not server or not replica.frozen:
                return
            replica.frozen = False
            if server.process.alive:
                _signal(replica.pids(), signal.SIGCONT)
                server.process.cont()

    def database(self, number: int) -> PostgresProxy:
        """The way to the database of this replica, or of the next that is up."""
        replica = self._someone(number)
        return (replica or self._named(number)).database

    def heal(self) -> None:
        for replica in self._replicas:
            replica.database.heal()
        self.thaw()

    def _named(self, number: int) -> _Replica:
        return self._replicas[number % len(self._replicas)]

    def _someone(self, number: int) -> _Replica | None:
        """This replica, or the next that serves."""
        at = number % len(self._replicas)
        order = [*self._replicas[at:], *self._replicas[:at]]
        return next((r for r in order if r.up and r.server is not None and r.server.listens and r.pids()), None)


def _bound() -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    """To worker processes of our servers: found as their children a moment ago."""
    for pid in pids:
        try:
            psutil.Process(pid).send_signal(number)
        except psutil.NoSuchProcess:
            continue
