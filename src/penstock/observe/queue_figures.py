"""Figures of the whole installation, read from the database: what waits, what is leased, who works, what is closed.

To add some: declare the gauge in `catalogue.py`, write a statement in `queue_figures.sql`, and add it to `_READERS`
with a function that makes samples of one of its rows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout, TooManyRequests

from penstock.config import Config
from penstock.db import sql
from penstock.db.pool import Connection, Pool, borrowed
from penstock.observe import catalogue
from penstock.observe.metrics import Sample
from penstock.tasks import ignore_result

_log = logging.getLogger("penstock.metrics")
_SQL = sql.load("penstock.observe", "queue_figures.sql")

_MAX_ROWS = 100_000
# A page without these figures is better than none: Prometheus gives a scrape ten seconds.
_PATIENCE_S = 5.0


def _queue_samples(pool: str, route: str, state: str, items: int, leases: int) -> Iterator[Sample]:
    labels = catalogue.pool_labels(pool)
    yield Sample(catalogue.QUEUE_ITEMS, (*labels, catalogue.model_label(route), state), items)
    if state == "leased":
        yield Sample(catalogue.LEASES, labels, leases)


def _worker_samples(pool: str, state: str, count: int) -> Iterator[Sample]:
    yield Sample(catalogue.WORKERS, (*catalogue.pool_labels(pool), state), count)


def _gate_samples(pool: str, state: str, count: int) -> Iterator[Sample]:
    yield Sample(catalogue.GATES, (*catalogue.pool_labels(pool), state), count)


def _limit_samples(
    provider: str, model: str, calls: float, floor: float, ceiling: float, per_s: float | None
) -> Iterator[Sample]:
    labels = (provider, catalogue.model_label(model))
    for bound, limit in (("now", calls), ("floor", floor), ("ceiling", ceiling)):
        yield Sample(catalogue.LIMIT, (*labels, bound), limit)
    if per_s is not None:
        yield Sample(catalogue.RATE_LIMIT, labels, per_s)


_READERS: tuple[tuple[str, Callable[..., Iterator[Sample]]], ...] = (
    ("list_queue", _queue_samples),
    ("list_registered", _worker_samples),
    ("list_gates", _gate_samples),
    ("list_limits", _limit_samples),
)


async def read_figures(connection: Connection, grace_s: float) -> list[Sample]:
    """Read the figures now."""
    parameters: dict[str, Any] = {"rows": _MAX_ROWS, "grace_s": grace_s, "now": None}
    samples: list[Sample] = []
    for statement, make in _READERS:
        cursor = await connection.execute(_SQL[statement], parameters)
        samples += [sample for row in await cursor.fetchall() for sample in make(*row)]
    return samples


class QueueFigures:
    """Figures of the database, read at most once in `metrics_cache_s`, however many ask."""

    def __init__(self, config: Config, database: Pool) -> None:
        self._config = config
        self._database = database
        self._reading: asyncio.Task[list[Sample]] | None = None
        self._due_at = 0.0

    async def samples(self) -> list[Sample]:
        """The figures; only that they could not be read, if the database is away."""
        if self._reading is None or (self._reading.done() and monotonic() >= self._due_at):
            self._due_at = monotonic() + self._config.metrics.metrics_cache_s
            self._reading = asyncio.create_task(self._read(), name="queue figures")
            self._reading.add_done_callback(ignore_result)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return [*await asyncio.shield(self._reading), Sample(catalogue.DATABASE_UP, (), 1)]
        except (psycopg.Error, PoolTimeout, PoolClosed, TooManyRequests, TimeoutError) as error:
            _log.warning("the queue's figures cannot be read: %s", type(error).__name__)
            self._due_at = 0.0
            return [Sample(catalogue.DATABASE_UP, (), 0)]

    async def _read(self) -> list[Sample]:
        async with borrowed(self._database) as connection:
            began = monotonic()
            samples = await read_figures(connection, self._config.liveness.heartbeat_grace_s)
            samples.append(Sample(catalogue.QUEUE_READ, (), monotonic() - began))
        return samples

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
