"""The workers of a run: one in this process, or several processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import sys
from types import TracebackType
from typing import Protocol, Self

from penstock.cli.target import Target
from penstock.config import Config
from penstock.db.pool import Pool
from penstock.dispatch.pool import Dispatcher
from penstock.errors import ExitCode, PenstockError
from penstock.worker import Worker

_log = logging.getLogger("penstock.fleet")

# Per worker. Finding the one request of a large claim that kills its workers takes as many deaths as halvings.
_RESTARTS = 20


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


class Crew:
    """Several worker processes. They end when this process closes their standard input, or dies."""

    def __init__(self, config: Config, pool: str, target: Target, size: int) -> None:
        self._order = json.dumps(
            {
                "database_url": config.database_url,
                "data_dir": str(config.data_dir.absolute()),
                "pool": pool,
                "target": dataclasses.asdict(target),
                "settings": _settings(config),
            }
        ).encode()
        self._size = size
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._stopping = False
        self._restarts = 0

    async def __aenter__(self) -> Self:
        self._keepers = [asyncio.create_task(self._keep(), name="crew") for _ in range(self._size)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        await asyncio.gather(*self._keepers)

    async def _keep(self) -> None:
        """Run one worker process; start another if it dies before its time."""
        while True:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "penstock.cli.run_worker",
                stdin=asyncio.subprocess.PIPE,
                # Out of reach of the terminal's Ctrl-C, which would kill a worker that is still starting.
                start_new_session=True,
            )
            self._processes.add(process)
            if process.stdin is not None:
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(self._order + b"\n")
                    await process.stdin.drain()
            self._close_if_stopping(process)
            code = await process.wait()
            self._processes.discard(process)
            if self.stopping:
                return
            self._restarts += 1
            _log.warning("a worker process ended with code %d", code)
            if code == ExitCode.USAGE or self._restarts > _RESTARTS * self._size:
                raise PenstockError(
                    f"worker processes keep ending (last exit code {code})",
                    hint="Run with --workers 1 -v to see why.",
                )

    @property
    def stopping(self) -> bool:
        return self._stopping

    def _close_if_stopping(self, process: asyncio.subprocess.Process) -> None:
        if self._stopping:
            self._close(process)

    @property
    def stopped(self) -> bool:
        return self._stopping or any(keeper.done() for keeper in self._keepers)

    @property
    def trouble(self) -> str:
        return f"{self._restarts} worker restarts" if self._restarts else ""

    @property
    def in_flight(self) -> int | None:
        return None

    def stop(self) -> None:
        self._stopping = True
        for process in self._processes:
            self._close(process)

    def abort(self) -> None:
        self._stopping = True
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def wait(self, seconds: float) -> None:
        await asyncio.wait(self._keepers, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    @staticmethod
    def _close(process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None:
            process.stdin.close()


def _settings(config: Config) -> dict[str, float]:
    from penstock.config import knobs

    return {knob.name: getattr(getattr(config, knob.group), knob.name) for knob in knobs()}
