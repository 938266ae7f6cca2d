"""Worker: one `WorkerLoop` after another, until it is stopped.

A worker that cannot check in for too long must assume that other workers have taken its leases. It then cuts its calls
short, drops its results, and begins a new loop under a new identity.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from uuid import UUID
from weakref import WeakSet

import psycopg

from penstock.backoff import Backoff
from penstock.config import Config
from penstock.db.notify import WORK, NoticeListener
from penstock.db.pool import Pool
from penstock.dispatch.dispatcher import Dispatcher
from penstock.model import ClaimPermit, Halt, Item, Verdict
from penstock.observe import catalogue
from penstock.observe.logs import event
from penstock.observe.metrics import Sample, read_from
from penstock.pools import is_session_pool
from penstock.settle.buffer import Answers, SettleBuffer
from penstock.settle.samples import Samples
from penstock.worker.fuse import Fuse
from penstock.worker.loop import LostIdentityError, WorkerLoop

_log = logging.getLogger("penstock.worker")

CONNECTIONS_PER_WORKER = 2
"""Claiming and settling at once."""

_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 5.0


class Worker:
    """Works off one pool's lanes until stopped."""

    def __init__(
        self,
        config: Config,
        database: Pool,
        pool: str,
        dispatcher: Dispatcher,
        notices: NoticeListener | None = None,
        on_answers: Callable[[Answers], None] | None = None,
        only_job: UUID | None = None,
        samples: Samples | None = None,
        fuse: Fuse | None = None,
    ) -> None:
        """With `notices`, new work is begun at once; without, at the next poll. `on_answers` is called when answers
        that callers of sessions wait for have been written; it notifies callers at other processes. With `only_job`, it
        works for that job alone. `samples` are the process's: it counts the results of all its workers for charts.
        `fuse` halts routes of which every call fails."""
        self.halts: dict[str, Halt] = {}
        """Routes closed until a person acts, and why."""
        self.lost_identities = 0
        self._on_answers = on_answers
        self._config = config
        self._database = database
        self._pool = pool
        self._dispatcher = dispatcher
        self._notices = notices
        self._only_job = only_job
        self._samples = samples
        self._fuse = fuse
        self._stopping = asyncio.Event()
        if samples is not None and not is_session_pool(pool):
            samples.watch(self._count_calls)
        self._loop = self._next_loop()

    def _next_loop(self) -> WorkerLoop:
        stage = (self._config, self._database, self._pool, self._dispatcher)
        return WorkerLoop(*stage, self.halts, self._on_answers, self._has_notices, self._only_job, self._samples)

    def _count_calls(self) -> dict[UUID, tuple[int, int]]:
        """For each batch with calls in flight: how many its routes may have at a time, and how many it has."""
        counted: dict[UUID, tuple[int, int]] = {}
        for (batch_id, route), calls in Counter(
            (item.lease.batch_id, item.route) for item in self._dispatcher.list_in_flight()
        ).items():
            limit, in_flight = counted.get(batch_id, (0, 0))
            counted[batch_id] = (limit + self._dispatcher.limit(route), in_flight + calls)
        return counted

    def _has_notices(self) -> bool:
        return self._notices is not None and self._notices.listening.is_set()

    async def run(self) -> None:
        """Work until `stop`. Raises when the database stays away for longer than the retries last."""
        await self._dispatcher.start(self._receive)
        _running.add(self)
        try:
            with self._notices.subscribe(WORK, self._wake) if self._notices else contextlib.nullcontext():
                await self._run_loops()
        finally:
            _running.discard(self)
            await self._dispatcher.stop()

    async def _run_loops(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        while True:
            try:
                await self._loop.run()
            except LostIdentityError as error:
                self.lost_identities += 1
                catalogue.IDENTITIES_LOST.add()
                fields = event("worker_identity_lost", worker=self._loop.id, reason=error)
                _log.warning("worker %s is lost: %s; going on under a new identity", self._loop.id, error, extra=fields)
            except psycopg.OperationalError as error:
                # The first loop has to begin; later ones wait for the database as long as it takes.
                if not self.lost_identities:
                    raise
                _log.warning("no new identity yet: %s", error)
            else:
                return
            if await self._stopped_within(backoff.next_s()):
                return
            self._loop = self._next_loop()

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    def _wake(self, pool: str) -> None:
        if pool in (self._pool, ""):
            self._loop.wake()

    def _receive(self, item: Item, verdict: Verdict) -> None:
        self._loop.receive(item, verdict)
        if self._fuse is not None and (halt := self._fuse.note(item.route, verdict)) is not None:
            self._loop.halt(item.route, halt)

    def stop(self) -> None:
        """Claim nothing more, let calls in flight end, then leave. A second call cuts them short."""
        self._stopping.set()
        self._loop.stop()

    def issue_permit(self) -> ClaimPermit | None:
        """The right to claim for this worker in one statement, if it can call anything now. It must be returned."""
        return self._loop.issue_permit()

    def return_permit(self, permit: ClaimPermit, claimed: Sequence[Item] | None) -> None:
        """Call the items claimed under the permit. None: the statement failed, and may have claimed some or not."""
        if permit.worker_id == self._loop.id:  # else the identity was lost since, and its leases with it
            self._loop.return_permit(claimed)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def trouble(self) -> str:
        """Trouble of this worker right now, in a few words; empty if none."""
        return self._loop.buffer.trouble or self._loop.trouble

    @property
    def in_flight(self) -> int:
        """Calls that have begun and not ended."""
        return self._dispatcher.in_flight

    @property
    def buffer(self) -> SettleBuffer:
        return self._loop.buffer

    def read_gauges(self) -> Iterator[Sample]:
        labels = catalogue.pool_labels(self._pool)
        yield Sample(catalogue.IN_FLIGHT, labels, self._dispatcher.in_flight)
        yield Sample(catalogue.WAITING, labels, self._dispatcher.waiting)
        yield Sample(catalogue.CONCURRENCY, labels, self._dispatcher.concurrency)


_running: WeakSet[Worker] = WeakSet()


@read_from
def _read_workers() -> Iterator[Sample]:
    for worker in list(_running):
        yield from worker.read_gauges()
