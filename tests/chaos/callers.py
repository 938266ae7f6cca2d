"""The callers of a chaos run, a process of their own: many sessions, every request sent to the replicas in turn.

Half of the sessions send all their requests at once and block, one connection for each. The others queue theirs, each
when the one before has been confirmed, and then ask for the answers. Whoever is refused, cut off or kept waiting too
long comes again with the same Idempotency-Key, to the next replica. A few hang up and never come back. At a signal
every connection to one of the replicas is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from tests.support.history import HistoryWriter, digest_of
from tests.support.processes import Process, Processes
from tests.support.wait import wait_until

NAME = "callers"
CUT = signal.SIGUSR1
_ROOT = Path(__file__).parents[2]
# Longer than a replica lets anybody wait, and than one stands still.
_TIMEOUT_S = 25.0
_START_DEADLINE_S = 60.0
_PAUSE_S = 0.3
_LEAVE_MAX_S = 3.0
_ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Order:
    urls: list[str]
    history: str
    seed: int
    sessions: int
    requests: int
    left_share: float = 0.03


class _Answer(msgspec.Struct):
    status_code: int | None
    body: msgspec.Raw


class Told(msgspec.Struct):
    """A `session.request`, as far as it matters here."""

    id: str
    session: str
    sequence: int
    status: str
    response: _Answer | None

    @property
    def digest(self) -> str | None:
        return digest_of(bytes(self.response.body)) if self.response is not None else None


class _TurnedAwayError(Exception):
    """An answer that no caller should get."""


_told = msgspec.json.Decoder(Told)


class Callers:
    """All of them."""

    def __init__(self, order: Order, history: HistoryWriter, http: aiohttp.ClientSession) -> None:
        self._order = order
        self._history = history
        self._http = http
        self._urls: Iterator[str] = cycle(order.urls)
        self._next_cut: Iterator[str] = cycle(order.urls)
        self._open: dict[asyncio.Timeout, str] = {}
        """Calls under way, and whom to."""

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(CUT, self._cut)
        print("ready", flush=True)
        async with asyncio.TaskGroup() as talks:
            for number in range(1, self._order.sessions + 1):
                session = f"s{number}"
                talks.create_task(self._at_once(session) if number % 2 else self._queued(session))

    async def _at_once(self, session: str) -> None:
        async with asyncio.TaskGroup() as calls:
            for number in range(1, self._order.requests + 1):
                calls.create_task(self._call(session, number))

    async def _queued(self, session: str) -> None:
        waiting: list[tuple[str, str]] = []
        for number in range(1, self._order.requests + 1):
            line = self._begin(session, number)
            try:
                told = await self._send(session, line, {"prefer": "respond-async"})
            except _TurnedAwayError:
                self._history.record("fail", "ask", line)
                continue
            self._history.record("ok", "upload", line, {"first": told.sequence})
            waiting.append((line, told.id))
        for line, request_id in waiting:
            await self._answered(line, self._look(session, request_id))

    async def _call(self, session: str, number: int) -> None:
        line = self._begin(session, number)
        leaves_s = self._leaves_s(line)
        if leaves_s is not None:
            with contextlib.suppress(TimeoutError, _TurnedAwayError):
                await asyncio.wait_for(self._send(session, line, {}), leaves_s)
            self._history.record("info", "ask", line)
            return
        await self._answered(line, self._send(session, line, {}))

    def _begin(self, session: str, number: int) -> str:
        line = f"{session}.{number}"
        self._history.record("invoke", "upload", line, {"lines": [line], "session": session})
        self._history.record("invoke", "ask", line)
        return line

    async def _answered(self, line: str, waits: Coroutine[Any, Any, Told]) -> None:
        try:
            told = await waits
        except _TurnedAwayError:
            self._history.record("fail", "ask", line)
            return
        self._history.record("ok", "upload", line, {"first": told.sequence})
        value = {"state": told.status, "digest": told.digest, "session": told.session, "place": told.sequence}
        self._history.record("ok", "ask", line, value)

    def _leaves_s(self, line: str) -> float | None:
        """After how long this caller hangs up, if it does. From the seed alone."""
        dice = random.Random(f"{self._order.seed} {line}")
        return dice.random() * _LEAVE_MAX_S if dice.random() < self._order.left_share else None

    # -- talking to replicas

    @contextlib.asynccontextmanager
    async def _cuttable(self, scope: asyncio.Timeout, url: str) -> AsyncIterator[None]:
        self._open[scope] = url
        try:
            yield
        finally:
            del self._open[scope]

    def _cut(self) -> None:
        victim = next(self._next_cut)
        for scope, url in self._open.items():
            if url == victim and not scope.expired():
                scope.reschedule(0)

    async def _send(self, session: str, line: str, headers: dict[str, str]) -> Told:
        """Until it is answered; with `respond-async`, until it is stored."""
        body = {"model": "small", "user": line, "messages": [{"role": "user", "content": f"this is {line}"}]}
        content = msgspec.json.encode({"endpoint": "/v1/chat/completions", "body": body})
        sent = {"content-type": "application/json", "idempotency-key": line, **headers}
        while True:
            status, answer = await self._try("POST", f"/v1/sessions/{session}/requests", content, sent)
            if status in (200, 202):
                return _told.decode(answer)

    async def _look(self, session: str, request_id: str) -> Told:
        while True:
            status, answer = await self._try("GET", f"/v1/sessions/{session}/requests/{request_id}?wait=10")
            if status == 200 and (told := _told.decode(answer)).status in _ENDED:
                return told

    async def _try(
        self, method: str, path: str, content: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """One call to the next replica. What may pass is waited out a little."""
        url = next(self._urls)
        scope = asyncio.timeout(_TIMEOUT_S)
        try:
            async with (
                scope,
                self._cuttable(scope, url),
                self._http.request(method, url + path, data=content, headers=headers) as answer,
            ):
                body = await answer.read()
                if answer.status < 300:
                    return answer.status, body
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # Of a call that was cut the time was set back.
            late = isinstance(error, TimeoutError) and scope.when() != 0
            self._history.record("info", "no_answer" if late else "cut_off", type(error).__name__)
            await asyncio.sleep(random.uniform(0.5, 1) * _PAUSE_S)
            return 0, b""
        if answer.status not in (429, 503):
            self._history.record("info", "surprise", path, {"status": answer.status, "said": body[:500].decode()})
            raise _TurnedAwayError
        code = msgspec.json.decode(body)["error"]["code"]
        self._history.record("info", str(code), path)
        await asyncio.sleep(random.uniform(0.5, 1) * float(answer.headers.get("retry-after", 1)))
        return answer.status, body


def start_callers(processes: Processes, order: Order) -> Process:
    """They end when every caller that stayed has its answer."""
    callers = processes.start(NAME, [sys.executable, "-m", __name__, json.dumps(asdict(order))], cwd=_ROOT)

    def ready() -> bool:
        assert callers.alive, callers.tail()
        return callers.log.stat().st_size > 0

    wait_until(ready, _START_DEADLINE_S)
    return callers


async def _run(order: Order) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    with HistoryWriter(Path(order.history), NAME) as history:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await Callers(order, history, http).run()


def main(arguments: list[str]) -> None:
    order = Order(**json.loads(arguments[0]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(order))


if __name__ == "__main__":
    main(sys.argv[1:])
