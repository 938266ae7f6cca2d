"""`penstock serve` as its users run it: a process of its own on a free loopback port.

    with served(tmp_path, "--base-url", mock.base_url, database=database_18) as server:
        client = server.closing(openai.OpenAI(base_url=server.base_url, api_key="none"))

Without `database` the server brings its own PostgreSQL under `tmp_path`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psutil

from tests.support.cli import PENSTOCK
from tests.support.processes import Process, Processes
from tests.support.wait import wait_until

_Client = TypeVar("_Client", bound=AbstractContextManager[Any])

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 60.0

_ADDRESS = re.compile(r"^  address +(http://\S+)/v1$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


class Waiting:
    """A long poll under way."""

    def __init__(self, connection: HTTPConnection) -> None:
        self._connection = connection

    def answer(self) -> Answered:
        """What the server answers, once it does."""
        with self._connection.getresponse() as response:
            return Answered(response.status, _lower(response.headers), response.read())


class ServerProcess:
    """A running server."""

    def __init__(self, process: Process, log_from: int = 0) -> None:
        self.process = process
        self._log_from = log_from
        self.url = ""
        """http://127.0.0.1:PORT, with what `--root-path` put behind it."""
        self._clients = ExitStack()

    def closing(self, client: _Client) -> _Client:
        """A client of this server, which is closed with it. Left to itself it might leave its socket open."""
        self._clients.enter_context(client)
        return client

    def close_clients(self) -> None:
        self._clients.close()

    @property
    def base_url(self) -> str:
        """For OpenAI's clients; Anthropic's take `url`."""
        return f"{self.url}/v1"

    @property
    def port(self) -> int:
        return int(re.findall(r":(\d+)", self.url)[0])

    @property
    def log(self) -> str:
        """All it has printed and logged so far, its workers too."""
        return self.process.log.read_bytes()[self._log_from :].decode("utf-8", "backslashreplace")

    @property
    def worker_pids(self) -> list[int]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            try:
                if "penstock.worker.process" in child.cmdline():
                    found.append(child.pid)
            except psutil.NoSuchProcess:  # it has just ended
                continue
        return found

    @contextmanager
    def frozen_workers(self) -> Iterator[None]:
        """Its worker processes stand still for the length of the block: batches are served, and not worked on."""
        workers = [psutil.Process(pid) for pid in self.worker_pids]
        for worker in workers:
            worker.suspend()
        try:
            yield
        finally:
            for worker in workers:
                worker.resume()

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        timeout_s: float = 30.0,
    ) -> Answered:
        """One plain request: JSON from a value, or the bytes as they are."""
        sent = dict(headers or {})
        data = body
        if body is not None and not isinstance(body, bytes):
            data = json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        if key is not None:
            sent["authorization"] = f"Bearer {key}"
        request = Request(f"{self.url}{path}", data, sent, method=method)
        try:
            with urlopen(request, timeout=timeout_s) as answer:
                return Answered(answer.status, _lower(answer.headers), answer.read())
        except HTTPError as error:
            with error:
                return Answered(error.code, _lower(error.headers), error.read())

    @contextmanager
    def waiting(self, path: str, *, timeout_s: float = 90.0) -> Iterator[Waiting]:
        """A long poll that the server is seen to wait with. Leaving the block hangs up."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with closing(connection):
            # A handler that waits reads on, to learn whether its caller hangs up. What a caller expects of whoever
            # reads a request, it is told at that moment: the handler has the request, and has found what it waits for.
            connection.request("GET", path, headers={"expect": "100-continue"})
            told = b""
            while not told.endswith(b"\r\n\r\n"):
                byte = connection.sock.recv(1)
                assert byte, f"the server closed the connection after {told!r}"
                told += byte
            assert told.startswith(b"HTTP/1.1 100 "), told
            yield Waiting(connection)

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Until it has printed where it listens, and /readyz agrees."""
        wait_until(self._is_ready, deadline_s)

    @property
    def listens(self) -> bool:
        """Whether it has printed where."""
        if not self.url and (found := _ADDRESS.search(self.log)):
            self.url = found[1]
        return bool(self.url)

    def _is_ready(self) -> bool:
        if not self.process.alive:
            raise AssertionError(f"the server ended with {self.process.exit_code}\n{self.process.tail()}")
        if not self.listens:
            return False
        try:
            return self.ask("GET", "/readyz", timeout_s=5).status == 200
        except (URLError, OSError):
            return False

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        return self.process.wait(deadline_s)


@contextmanager
def served(
    directory: Path,
    *args: str | Path,
    database: str | None = None,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    name: str = "serve",
    program: Sequence[str] = PENSTOCK,
) -> Iterator[ServerProcess]:
    """A ready server. At the end of the block it is killed, if it still runs. `program` is what to call instead of the
    tree's own penstock."""
    # A server of that name may have written to the same file before.
    log = directory / f"{name}.log"
    log_from = log.stat().st_size if log.exists() else 0
    with Processes(directory) as processes:
        process = start_server(
            processes, directory, *args, database=database, workers=workers, env=env, name=name, program=program
        )
        server = ServerProcess(process, log_from)
        server.wait_ready()
        try:
            yield server
        finally:
            server.close_clients()


def start_server(
    processes: Processes,
    directory: Path,
    *args: str | Path,
    database: str | None = None,
    workers: int = 1,
    env: Mapping[str, str] | None = None,
    name: str = "serve",
    program: Sequence[str] = PENSTOCK,
) -> Process:
    """`penstock serve` under way: not ready yet, and perhaps never."""
    where: tuple[str | Path, ...] = ("--data-dir", directory / "data")
    if database is not None:
        where += ("--database-url", database)
    fixed = ("serve", "--host", "127.0.0.1", "--port", "0", "--workers", str(workers))
    command = [*program, *fixed, *map(str, where), *map(str, args)]
    return processes.start(name, command, env={"PYTHONUNBUFFERED": "1", **(env or {})})


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
