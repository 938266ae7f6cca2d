"""The workers of a run: one in this process, or several processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from penstock.cli.target import Target
from penstock.config import Config
from penstock.db.pool import Pool
from penstock.dispatch.pool import Dispatcher
from penstock.errors import ExitCode, PenstockError
from penstock.worker import Worker

if TYPE_CHECKING:
    from penstock.providers import Provider

_log = logging.getLogger("penstock.fleet")

# Per worker. Finding the one request of a large claim that kills its workers takes as many deaths as halvings.
_RESTARTS = 20
_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 10.0
_LONG_LIFE_S = 60.0


def read_order() -> dict[str, Any]:
    """What a worker process is to do: the first line it is sent. Without one, whoever started it is gone."""
    told = sys.stdin.buffer.readline()
    if not told.endswith(b"\n"):
        sys.exit(0)
    order: dict[str, Any] = json.loads(told)
    return order


class Fleet(Protocol):
    """Workers that were started together and stop together. Leaving the context waits for their end."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def stopped(self) -> bool:
        """No worker is left, or the last one is leaving."""

    @property
    def trouble(self) -> str:
        """What the workers struggle with, for the display."""

    @property
    def in_flight(self) -> int | None:
        """Calls that have begun and not ended; None if only the worker processes know."""

    def stop(self) -> None:
        """Let calls in flight end, then leave."""

    def abort(self) -> None:
        """Cut calls in flight short; they are given back."""

    async def wait(self, seconds: float) -> None:
        """So long, or until the workers have ended."""


class Solo:
    """One worker in this process."""

    def __init__(self, config: Config, database: Pool, pool: str, dispatcher: Dispatcher) -> None:
        self._worker = Worker(config, database, pool, dispatcher)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._worker.run(), name="worker")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._task is not None:
            await self._task

    @property
    def stopped(self) -> bool:
        return self._worker.stopping or self._task is None or self._task.done()

    @property
    def trouble(self) -> str:
        return self._worker.trouble

    @property
    def in_flight(self) -> int | None:
        return self._worker.in_flight

    def stop(self) -> None:
        if not self._worker.stopping:
            self._worker.stop()

    def abort(self) -> None:
        self._worker.stop()
        self._worker.stop()

    async def wait(self, seconds: float) -> None:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)


class WorkerProcesses:
    """Processes of workers. Each gets its orders on standard input, and ends when that is closed, or this dies."""

    def __init__(self, module: str, orders: Sequence[Mapping[str, Any]]) -> None:
        self._module = module
        self._orders = [json.dumps(order).encode() for order in orders]
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._closing = asyncio.Event()
        self._restarts = 0

    async def __aenter__(self) -> Self:
        self._keepers = [asyncio.create_task(self._keep(order), name="crew") for order in self._orders]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        await asyncio.gather(*self._keepers)

    async def _keep(self, order: bytes) -> None:
        """Run one worker process; start another if it dies before its time."""
        while True:
            began = monotonic()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                # Out of reach of the terminal's Ctrl-C, which would kill a worker that is still starting.
                start_new_session=True,
            )
            self._processes.add(process)
            if process.stdin is not None:
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(order + b"\n")
                    await process.stdin.drain()
            if self._closing.is_set():
                self._close(process)
            code = await process.wait()
            self._processes.discard(process)
            if self._closing.is_set():
                return
            self._restarts += 1
            _log.warning("a worker process ended with code %d", code)
            await self._pause(code, monotonic() - began)
            if self._closing.is_set():
                return

    async def _pause(self, code: int, lasted_s: float) -> None:
        """What happens before a dead worker's successor starts."""

    @property
    def stopping(self) -> bool:
        return self._closing.is_set()

    @property
    def stopped(self) -> bool:
        return self.stopping or any(keeper.done() for keeper in self._keepers)

    @property
    def trouble(self) -> str:
        return f"{self._restarts} worker restarts" if self._restarts else ""

    @property
    def in_flight(self) -> int | None:
        return None

    def stop(self) -> None:
        self._closing.set()
        for process in self._processes:
            self._close(process)

    def abort(self) -> None:
        self._closing.set()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def wait(self, seconds: float) -> None:
        await asyncio.wait(self._keepers, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    @staticmethod
    def _close(process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None:
            process.stdin.close()


class Crew(WorkerProcesses):
    """The processes of a run. They are given up when they keep dying."""

    def __init__(self, config: Config, pool: str, target: Target, size: int) -> None:
        order = {**database_order(config), "pool": pool, "target": dataclasses.asdict(target)}
        super().__init__("penstock.cli.run_worker", [order] * size)

    async def _pause(self, code: int, lasted_s: float) -> None:  # noqa: ARG002 -- how long does not matter here
        if code == ExitCode.USAGE or self._restarts > _RESTARTS * len(self._orders):
            raise PenstockError(
                f"worker processes keep ending (last exit code {code})",
                hint="Run with --workers 1 -v to see why.",
            )


class Staff(WorkerProcesses):
    """The processes of a server. Whatever befalls them, others take their place, if they keep dying more slowly."""

    def __init__(
        self, config: Config, providers: Iterable[Provider], size: int, *, verbose: bool, desk: bool = False
    ) -> None:
        told = [provider.as_dict() for provider in providers]
        order = {**database_order(config), "providers": told, "processes": size, "desk": desk, "verbose": verbose}
        super().__init__("penstock.cli.serve_worker", [{**order, "index": index} for index in range(size)])
        self._pause_s = _FIRST_PAUSE_S

    async def _pause(self, code: int, lasted_s: float) -> None:  # noqa: ARG002 -- none is reason to give up
        if lasted_s > _LONG_LIFE_S:
            self._pause_s = _FIRST_PAUSE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await self._closing.wait()
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


def database_order(config: Config) -> dict[str, Any]:
    """The part of a worker process's orders that says where the data is and how to treat it."""
    return {
        "database_url": config.database_url,
        "data_dir": str(config.data_dir.absolute()),
        "settings": _settings(config),
    }


def _settings(config: Config) -> dict[str, float]:
    from penstock.config import knobs

    return {knob.name: getattr(getattr(config, knob.group), knob.name) for knob in knobs()}
