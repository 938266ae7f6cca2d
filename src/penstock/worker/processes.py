"""Workers of a command: one in its own process, or several processes, restarted when they die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterable, Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from uuid import UUID

import msgspec

from penstock.config import Config, knobs
from penstock.db.pool import Pool
from penstock.db.start import GO_ON
from penstock.dispatch.dispatcher import Dispatcher
from penstock.dispatch.target import Target
from penstock.errors import ExitCode, PenstockError
from penstock.observe import catalogue
from penstock.observe.metrics import ProcessMetrics
from penstock.settle.samples import Samples
from penstock.worker.fuse import Fuse
from penstock.worker.snapshots import SnapshotPipe
from penstock.worker.worker import Worker

if TYPE_CHECKING:
    from penstock.dispatch.providers import Provider

_log = logging.getLogger("penstock.worker")

# Per worker. Finding the one request of a large claim that kills its workers takes a restart for each halving.
_RESTARTS = 20
_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 10.0
_LONG_LIFE_S = 60.0
_STDERR = 2
DATABASE_FAILED = 75
"""Exit code of a run's worker process that the database failed."""
# A worker process that has met fewer failures has not seen enough to halt anything.
_FAILURES_MIN = 10


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Order to a worker process: what to work on, and where the database is."""

    database_url: str | None
    data_dir: str
    settings: dict[str, Any]
    log_level: int


class RunOrder(Order, frozen=True, kw_only=True, tag="run"):
    """One worker on a run's pool."""

    pool: str
    target: Target
    verbose: bool
    stop_after: int = 0
    """Failures of one kind after which this process halts a route of which nothing has succeeded; 0: never."""


class ServerOrder(Order, frozen=True, kw_only=True):
    """Workers of a server."""

    longest_attempt_s: float
    """The longest time that any provider or processor of the server allows a call."""


class ServeOrder(ServerOrder, frozen=True, kw_only=True, tag="serve"):
    """Workers for each provider."""

    providers: list[dict[str, Any]]


class ProcessorOrder(ServerOrder, frozen=True, kw_only=True, tag="processors"):
    """A worker for each registered processor. They have processes of their own: a function that kills its process harms
    no provider's work."""

    processors: list[dict[str, Any]]
    only_job: UUID | None = None
    """The job they work for, where it is one alone."""


AnyOrder = RunOrder | ServeOrder | ProcessorOrder

_orders: msgspec.json.Decoder[AnyOrder] = msgspec.json.Decoder(AnyOrder)


def read_order() -> AnyOrder:
    """Read this worker process's order, the first line on standard input. Without one the parent is gone: exit."""
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        sys.exit(0)
    return _orders.decode(line)


class Workers(Protocol):
    """Workers that start and stop together. Leaving the context stops them and waits for their end."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def stopped(self) -> bool:
        """Whether no worker is left, or the last one is leaving."""

    @property
    def trouble(self) -> str:
        """Trouble of the workers, in a few words for the display; empty if none."""

    @property
    def in_flight(self) -> int | None:
        """Calls that have begun and not ended; None if only the worker processes know."""

    def stop(self) -> None:
        """Let calls in flight end, then leave."""

    def abort(self) -> None:
        """Cut calls in flight short; they are given back."""

    async def wait(self, seconds: float) -> None:
        """Wait so many seconds, or until the workers have ended."""


class InProcessWorker:
    """One worker in this process."""

    def __init__(
        self,
        config: Config,
        database: Pool,
        pool: str,
        dispatcher: Dispatcher,
        only_job: UUID | None = None,
        stop_after: int = 0,
    ) -> None:
        self._samples = Samples(database, config.samples)
        fuse = Fuse(stop_after) if stop_after else None
        self._worker = Worker(config, database, pool, dispatcher, only_job=only_job, samples=self._samples, fuse=fuse)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="worker")
        return self

    async def _run(self) -> None:
        async with self._samples:
            await self._worker.run()

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
    """Worker processes. Each gets its order on standard input, and stops when that is closed or this process dies. With
    `metrics`, each reports its figures there."""

    def __init__(self, orders: Sequence[Order], metrics: ProcessMetrics | None = None) -> None:
        self._orders = [msgspec.json.encode(order) for order in orders]
        self._metrics = metrics
        self._supervisors: list[asyncio.Task[None]] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._closing = asyncio.Event()
        self._restarts = 0

    async def __aenter__(self) -> Self:
        self._supervisors = [
            asyncio.create_task(self._supervise(order), name="worker process") for order in self._orders
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        await asyncio.gather(*self._supervisors)

    async def _supervise(self, order: bytes) -> None:
        """Run one worker process, and restart it whenever it dies before it was stopped."""
        while True:
            began = monotonic()
            pipe = SnapshotPipe(self._metrics) if self._metrics is not None else None
            process = await self._start(pipe)
            self._processes.add(process)
            if process.stdin is not None:
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(order + b"\n")
                    await process.stdin.drain()
            if self._closing.is_set():
                self._close(process)
            code = await process.wait()
            self._processes.discard(process)
            if pipe is not None:
                await pipe.end()
            if self._closing.is_set():
                return
            self._restarts += 1
            catalogue.PROCESS_RESTARTS.add()
            _log.warning("a worker process ended with code %d", code)
            await self._pause(code, monotonic() - began)
            if self._closing.is_set():
                return

    async def _start(self, pipe: SnapshotPipe | None) -> asyncio.subprocess.Process:
        descriptors = () if pipe is None else (pipe.descriptor,)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.worker.process", *map(str, descriptors)),
                stdin=asyncio.subprocess.PIPE,
                # What a function prints is no result: standard output may be where the answers go.
                stdout=_STDERR,
                # Out of reach of the terminal's Ctrl-C, which would kill a worker that is still starting.
                start_new_session=True,
                pass_fds=descriptors,
            )
        except BaseException:
            if pipe is not None:
                pipe.abandon()
            raise
        if pipe is not None:
            pipe.begin(process.pid)
        return process

    async def _pause(self, code: int, lasted_s: float) -> None:
        """Wait before a dead worker process is restarted, or raise to give up."""

    @property
    def pids(self) -> set[int]:
        return {process.pid for process in self._processes}

    @property
    def stopping(self) -> bool:
        return self._closing.is_set()

    @property
    def stopped(self) -> bool:
        return self.stopping or any(supervisor.done() for supervisor in self._supervisors)

    @property
    def trouble(self) -> str:
        return f"{self._restarts} worker restart{'s' if self._restarts > 1 else ''}" if self._restarts else ""

    @property
    def in_flight(self) -> int | None:
        """As the processes told, each second."""
        return None if self._metrics is None else round(self._metrics.sum_gauge(catalogue.IN_FLIGHT))

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
        await asyncio.wait(self._supervisors, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    @staticmethod
    def _close(process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None:
            process.stdin.close()


class RunWorkers(WorkerProcesses):
    """Worker processes of a run. The run gives up when they keep dying."""

    def __init__(
        self, config: Config, pool: str, target: Target, size: int, *, verbose: bool = False, stop_after: int = 0
    ) -> None:
        # Each process counts its own failures: together they stop after as many as one alone would.
        share = max(_FAILURES_MIN, stop_after // size) if stop_after else 0
        order = RunOrder(
            **common_order(config, logging.ERROR), pool=pool, target=target, verbose=verbose, stop_after=share
        )
        super().__init__([order] * size, ProcessMetrics())
        self._patience_s = config.settle.settle_retry_s

    async def _pause(self, code: int, lasted_s: float) -> None:
        if code == ExitCode.USAGE:
            raise PenstockError("a worker process could not begin", hint="It says why, above. Nothing was called.")
        too_often = self._restarts > _RESTARTS * len(self._orders)
        # One that could not begin while the database was away for a moment is restarted; one that has tried for as long
        # as it may is not, as the next would fare no better.
        if code == DATABASE_FAILED and (too_often or lasted_s >= self._patience_s):
            raise PenstockError("a worker process gave up on the database, and says why above", hint=GO_ON)
        if too_often:
            raise PenstockError(f"worker processes keep ending (last exit code {code})", hint="Run with -v to see why.")


class LastingWorkers(WorkerProcesses):
    """Worker processes that are always restarted, after longer pauses if they keep dying."""

    def __init__(self, orders: Sequence[Order], metrics: ProcessMetrics | None = None) -> None:
        super().__init__(orders, metrics)
        self._pause_s = _FIRST_PAUSE_S

    async def _pause(self, code: int, lasted_s: float) -> None:  # noqa: ARG002 -- none is reason to give up
        if lasted_s > _LONG_LIFE_S:
            self._pause_s = _FIRST_PAUSE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await self._closing.wait()
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


class ServerWorkers(LastingWorkers):
    """Worker processes of a server."""

    def __init__(
        self,
        config: Config,
        providers: Iterable[Provider],
        size: int,
        *,
        log_level: int,
        metrics: ProcessMetrics | None = None,
    ) -> None:
        from penstock.dispatch.providers import longest_attempt_s  # a run needs no providers

        providers = tuple(providers)
        common = {**common_order(config, log_level), "longest_attempt_s": longest_attempt_s(config, providers)}
        served = [provider.as_dict() for provider in providers]
        orders: list[Order] = [ServeOrder(**common, providers=served)] * size
        if config.processors:
            orders += [ProcessorOrder(**common, processors=[one.as_dict() for one in config.processors])] * size
        super().__init__(orders, metrics)


def common_order(config: Config, log_level: int) -> dict[str, Any]:
    """What every order has: the settings, and where the database is."""
    return {
        "database_url": config.database_url,
        "data_dir": str(config.data_dir.absolute()),
        "settings": {knob.name: getattr(getattr(config, knob.group), knob.name) for knob in knobs()},
        "log_level": log_level,
    }
