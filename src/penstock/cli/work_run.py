"""Work a run's batch off, and show how far it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from time import monotonic
from uuid import UUID

import psycopg

from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, read_status
from penstock.batches.runs import run_pool
from penstock.claim import claim as claims
from penstock.claim import gates
from penstock.cli.plan import Plan
from penstock.cli.progress import Display, duration
from penstock.config import Config
from penstock.db.pool import Pool
from penstock.dispatch.throttle import Throttle
from penstock.limits.sharing import ProviderLimits
from penstock.model import BatchState
from penstock.worker.processes import InProcessWorker, RunWorkers, Workers

_LOOK_EVERY_S = 0.2
_ANSWER_WITHIN_S = 5.0


class RunWork:
    """Work of one plan: the workers of the batch that is being worked off, and how they are stopped."""

    def __init__(self, plan: Plan, config: Config, database: Pool, display: Display) -> None:
        self._plan = plan
        self._config = config
        self._database = database
        self._display = display
        self._workers: Workers | None = None
        self._throttle: Throttle | None = None
        self._signals = 0

    @property
    def under_way(self) -> bool:
        return self._workers is not None

    def stop(self) -> None:
        """Let calls in flight end. A second call cuts them short."""
        self._signals += 1
        if self._workers is None:
            return
        if self._signals > 1:
            self._workers.abort()
        else:
            self._workers.stop()

    async def work_off(self, batch_id: UUID) -> Batch:
        """Work a batch off until it ends, is stopped, or cannot go on without a person. Returns it as it is then."""
        async with self._database.connection() as connection:
            batch = await read_status(connection, batch_id)
        if batch.state.terminal or self._signals:
            return batch
        self._display.stage("calling")
        pool = run_pool(batch_id)
        # What has succeeded once is not stopped for its failures.
        stop_after = 0 if batch.counts.completed else self._config.retry.stop_after_failures
        async with self._open_workers(pool, stop_after) as workers:
            self._workers = workers
            async with workers:
                await self._watch(batch_id, pool, workers)
            self._workers = None
        return await self._conclude(batch_id)

    @contextlib.asynccontextmanager
    async def _open_workers(self, pool: str, stop_after: int) -> AsyncIterator[Workers]:
        plan, config = self._plan, self._config
        if not plan.in_process:
            yield RunWorkers(config, pool, plan.target, plan.workers, verbose=plan.verbose, stop_after=stop_after)
            return
        limits = ProviderLimits(config, self._database)
        self._throttle = limits.of_run(plan.target, pool)
        async with limits.running(), plan.target.dispatcher(config, self._throttle) as dispatcher:
            yield InProcessWorker(config, self._database, pool, dispatcher, stop_after=stop_after)

    async def _conclude(self, batch_id: UUID) -> Batch:
        """Finish the batch if everything is settled, and read its status. Waits for a database that is away."""
        give_up_at = monotonic() + self._config.settle.settle_retry_s
        while True:
            try:
                async with self._database.connection() as connection:
                    await finish_batch(connection, batch_id)
                    return await read_status(connection, batch_id)
            except psycopg.OperationalError:
                if monotonic() > give_up_at or self._signals > 1:
                    raise
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _watch(self, batch_id: UUID, pool: str, workers: Workers) -> None:
        """Show progress until the batch has ended, or no route can go on without a person."""
        batch: Batch | None = None
        while not workers.stopped:
            note = workers.trouble
            try:
                async with asyncio.timeout(_ANSWER_WITHIN_S), self._database.connection() as connection:
                    batch = await read_status(connection, batch_id)
                    waits = await gates.list_closed(connection, pool)
                    halted = {gate.route for gate in waits if gate.halted_at is not None}
                    work = await claims.list_routes_with_work(connection, pool) if halted else []
            except TimeoutError:
                note = "the database does not answer"
            except psycopg.OperationalError as error:
                note = f"the database is away: {str(error).strip().splitlines()[0]}"
            else:
                if batch.state.terminal:
                    return
                if batch.counts.in_flight == 0 and (
                    (halted and halted.issuperset(work)) or batch.state is BatchState.PAUSED
                ):
                    return
                note = note or _waiting(waits) or _pacing(self._throttle)
            if batch is not None:
                self._display.counts(batch.counts, workers.in_flight, note)
            if self._signals:
                workers.stop()
            await workers.wait(_LOOK_EVERY_S)


def _waiting(waits: list[gates.Gate]) -> str:
    """Text about the routes that wait, their reasons and how long still."""
    if not waits:
        return ""
    gate = waits[0]
    if gate.not_before is None:
        return f"waiting: {gate.code}"
    left_s = (gate.not_before - datetime.now(UTC)).total_seconds()
    return f"waiting: {gate.code}" + (f" for {duration(left_s)}" if left_s >= 1 else "")


def _pacing(throttle: Throttle | None) -> str:
    """Text about the rate that calls wait for. Only where this process calls: other workers do not tell it."""
    per_s = None if throttle is None else throttle.paced_per_s
    if per_s is None:
        return ""
    return f"paced at {per_s:.3g} calls/s" if per_s >= 1 else f"paced at {60 * per_s:.3g} calls/min"
