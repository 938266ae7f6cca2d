"""A fake upstream that keeps a history: when each call came, under which key, and what it was answered.

It is `penstock mock` with a notebook, in a process of its own. Answers are unlike any other, even to the same
request, so that a history can tell whose answer was stored. An answer is noted before its first byte leaves: there is
none that was sent and not noted. So is the end of a call whose caller hung up. Calls without an Idempotency-Key
(probes, statistics) are not noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from urllib.request import urlopen

import msgspec

from penstock.mock.behaviour import Behaviour
from penstock.mock.server import Connection, MockUpstream
from penstock.mock.service import Answer, Call, Service
from penstock.mock.wire import Request
from tests.support.history import HistoryWriter, digest_of
from tests.support.processes import Process, Processes
from tests.support.wait import wait_until

_START_DEADLINE_S = 20.0
_ROOT = Path(__file__).parents[2]


class _Named(msgspec.Struct):
    """Where a body may say which line it is."""

    metadata: dict[str, object] | None = None
    user: str | None = None


def line_of(body: bytes) -> str | None:
    """The line's id: `metadata.custom_id` or `user` of the body."""
    try:
        named = msgspec.json.decode(body, type=_Named)
    except msgspec.DecodeError:
        return None
    custom_id = (named.metadata or {}).get("custom_id")
    return custom_id if isinstance(custom_id, str) else named.user


@dataclass(slots=True)
class _Noted:
    """One call that is being noted."""

    history: HistoryWriter
    key: str
    number: int

    def end(self) -> None:
        """Nobody is left to be answered."""
        self.history.record("fail", "dispatch", self.key, {"n": self.number})

    def sign(self, answer: Answer) -> Answer:
        """Make the answer one of its kind, and note it."""
        body = b'{"dispatch":"%s %d",%s' % (self.history.process.encode(), self.number, answer.body.lstrip()[1:])
        value = {"n": self.number, "digest": digest_of(body), "status": int(answer.status)}
        self.history.record("ok", "dispatch", self.key, value)
        return replace(answer, body=body)


@dataclass(slots=True)
class _NotedCall(Call):
    noted: _Noted

    def answer(self) -> Answer:
        # Not super(): dataclasses with slots are made anew, and lose it.
        return self.noted.sign(Call.answer(self))


class _NotingService(Service):
    def __init__(self, behaviour: Behaviour, history: HistoryWriter) -> None:
        super().__init__(behaviour)
        self._history = history
        self._numbers = count(1)

    def handle(self, request: Request) -> Answer | Call:
        key = request.headers.get(b"idempotency-key")
        if key is None or request.method != "POST":
            return super().handle(request)
        noted = _Noted(self._history, key.decode("latin-1"), next(self._numbers))
        value: dict[str, object] = {"n": noted.number}
        if (line := line_of(request.body)) is not None:
            value["line"] = line
        self._history.record("invoke", "dispatch", noted.key, value)
        outcome = super().handle(request)
        if isinstance(outcome, Answer):
            return noted.sign(outcome)
        if outcome.streams:
            raise NotImplementedError("streamed answers are not noted")
        return _NotedCall(**{name: getattr(outcome, name) for name in Call.__slots__}, noted=noted)


class NotingUpstream(MockUpstream):
    """The upstream in this process: `async with NotingUpstream(Behaviour(...), history) as upstream`."""

    def __init__(self, behaviour: Behaviour, history: HistoryWriter, *, port: int = 0) -> None:
        super().__init__(behaviour, port=port)
        self.service = _NotingService(behaviour, history)

    def remove(self, connection: Connection) -> None:
        if isinstance(connection._call, _NotedCall):
            connection._call.noted.end()
        super().remove(connection)


@dataclass(frozen=True, slots=True)
class UpstreamProcess:
    process: Process
    port: int

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stats(self) -> dict[str, object]:
        with urlopen(f"http://127.0.0.1:{self.port}/mock/stats", timeout=10) as answer:
            stats: dict[str, object] = json.load(answer)
        return stats


def start_upstream(
    processes: Processes, history: Path, behaviour: Behaviour | None = None, *, name: str = "upstream", port: int = 0
) -> UpstreamProcess:
    """Serve until killed. `history` is the directory of histories; with the port of one that ended, take its place."""
    chosen = msgspec.json.encode(behaviour or Behaviour()).decode()
    command = [sys.executable, "-m", "tests.support.upstream", chosen, str(history), name, str(port)]
    log = processes.directory / f"{name}.log"
    seen = log.stat().st_size if log.exists() else 0
    process = processes.start(name, command, cwd=_ROOT)

    def announced() -> bool:
        assert process.alive, f"{name} ended with {process.exit_code}\n{process.tail()}"
        return log.read_bytes()[seen:].endswith(b"\n")

    wait_until(announced, _START_DEADLINE_S)
    return UpstreamProcess(process, int(log.read_bytes()[seen:]))


@contextlib.contextmanager
def upstream_serving(
    directory: Path, behaviour: Behaviour | None = None, *, name: str = "upstream"
) -> Iterator[UpstreamProcess]:
    """One upstream for the length of the block, its history and log in `directory`."""
    with Processes(directory) as processes:
        yield start_upstream(processes, directory, behaviour, name=name)


async def _serve(behaviour: Behaviour, directory: Path, name: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with HistoryWriter(directory, name) as history:
        async with NotingUpstream(behaviour, history, port=port) as upstream:
            print(upstream.port, flush=True)
            await stop.wait()


def main(arguments: list[str]) -> None:
    behaviour, directory, name, port = arguments
    asyncio.run(_serve(msgspec.json.decode(behaviour, type=Behaviour), Path(directory), name, int(port)))


if __name__ == "__main__":
    main(sys.argv[1:])
