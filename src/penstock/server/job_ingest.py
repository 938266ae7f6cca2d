"""Ingest of jobs: rows are read from the stored bytes and added to their growing batch, up to 2,000 a transaction.

A row can be claimed as soon as its transaction commits. The rows are a pure function of the bytes, so an ingest that
died goes on by reading them again and skipping those that are stored.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import psycopg
from psycopg_pool import PoolTimeout

from penstock.adapt.intake_batch import IntakeBatchSize, MeasuredBatch
from penstock.api.upload_threads import UploadWork
from penstock.batches.growth import NotGrowing, hold_growing, move_totals, seal_batch
from penstock.batches.jobs import Ingest, count_rows, end_ingest, take_ingest
from penstock.batches.steer import cancel_batch, hold_batch
from penstock.blobs.blobs import Place, run_steps, store_images
from penstock.config import Config
from penstock.db.pool import Connection, Pool, borrowed
from penstock.intake.copying import copy_rows
from penstock.intake.job_upload import open_upload
from penstock.intake.refusal import IntakeRefused
from penstock.intake.rows import pack_table_rows, table_lane
from penstock.intake.stored_bytes import PieceReader
from penstock.intake.tables.table import (
    BLOCK_BYTES,
    BLOCK_ROWS,
    Table,
    TableRow,
    TableSpec,
    image_uses,
    next_block,
)
from penstock.model import ROWS
from penstock.tasks import cancel_and_wait

_log = logging.getLogger("penstock.ingest")


_AT_ONCE = 8
"""Jobs whose rows a server reads at a time: a small one does not wait for a large one to end. An owner has as many as
it leaves free."""


class _TakenOverError(Exception):
    """Another reads the job now: this process was taken for dead."""


class _Reading(NamedTuple):
    """A job whose rows are being read."""

    owner: str
    work: UploadWork
    task: asyncio.Task[None]


class JobIngest:
    """Reads the rows of jobs, some jobs at a time."""

    def __init__(self, config: Config, conninfo: str, database: Pool) -> None:
        self._config = config
        self._conninfo = conninfo
        self._database = database
        self._reading: dict[UUID, _Reading] = {}
        self.on_room: Callable[[], None] = lambda: None
        """Called when a job has been read: there is room for another."""
        # These rows are held in memory, not streamed: their batches stay smaller.
        limits = dataclasses.replace(
            config.intake,
            intake_max_rows=min(config.intake.intake_max_rows, BLOCK_ROWS),
            intake_max_batch_bytes=min(config.intake.intake_max_batch_bytes, BLOCK_BYTES),
        )
        self._batch_size = IntakeBatchSize(limits)
        """For all jobs: they share the pool and the database."""

    async def step(self, worker_id: UUID) -> bool:
        """Begin to read the rows of one more job, if there is room for it. True if there may be another."""
        free = _AT_ONCE - len(self._reading)
        owners = Counter(each.owner for each in self._reading.values())
        if not free:
            return False
        async with borrowed(self._database) as connection:
            grace_s = self._config.liveness.heartbeat_grace_s
            full = [owner for owner, jobs in owners.items() if jobs >= free]
            ingest = await take_ingest(connection, worker_id, grace_s, self._reading, full)
        if ingest is None:
            return False
        work = UploadWork(ingest.owner)
        task = asyncio.create_task(self._try_to_read(ingest, worker_id, work))
        self._reading[ingest.batch_id] = _Reading(ingest.owner, work, task)
        task.add_done_callback(lambda _: self._make_room(ingest.batch_id))
        return True

    def _make_room(self, batch_id: UUID) -> None:
        del self._reading[batch_id]
        self.on_room()

    async def close(self) -> None:
        """Read nothing more. Another server goes on with what was begun."""
        reading = list(self._reading.values())
        for each in reading:
            each.work.stop()
        await cancel_and_wait([each.task for each in reading])

    async def _try_to_read(self, ingest: Ingest, worker_id: UUID, work: UploadWork) -> None:
        """Read a job's rows to their end. After a fault the next step takes the job again."""
        try:
            await self._read(ingest, worker_id, work)
        except _TakenOverError as ended:
            _log.info("ingest of %s ends: %s", ingest.batch_id, ended)
        except (psycopg.Error, PoolTimeout, OSError) as error:
            self._batch_size.observe_error()
            rest_s = self._batch_size.rest_s
            _log.warning("ingest of %s: trying again in %.1f s: %s", ingest.batch_id, rest_s, type(error).__name__)
            await asyncio.sleep(rest_s)
        except Exception as error:
            _log.error("ingest of %s: failed: %s", ingest.batch_id, type(error).__name__)

    async def _read(self, ingest: Ingest, worker_id: UUID, work: UploadWork) -> None:
        stored = ingest.rows
        with ExitStack() as stack:
            try:
                table = await work.run(partial(self._open, ingest, stack))
                rows = islice(table.rows(), ingest.spec.get("limit"))
                await work.run(partial(_skip, rows, stored))
                size = self._batch_size
                while block := await work.run(partial(next_block, rows, size.rows, size.bytes)):
                    await self._store(ingest, worker_id, table, stored, block)
                    stored += len(block)
            except IntakeRefused as refused:
                # Everything was read once before the job was made: a limit was lowered since.
                await self._end(ingest, worker_id, stored, ingest.columns, refused.advice)
                return
            except NotGrowing as ended:
                # Cancelled, expired or deleted: not sealed, or it could pass for a job that was done with all its rows.
                _log.info("ingest of %s ends: %s", ingest.batch_id, ended)
                async with borrowed(self._database) as connection, connection.transaction():
                    await hold_batch(connection, ingest.batch_id)
                    where = (ingest.batch_id, worker_id, stored, table.columns)
                    await end_ingest(connection, *where, broken_off=True)
                return
            await self._end(ingest, worker_id, stored, table.columns, None)

    def _open(self, ingest: Ingest, stack: ExitStack) -> Table:
        pieces = stack.enter_context(PieceReader(self._conninfo, ingest.source_id))
        spec = msgspec.convert(ingest.spec.get("columns", {}), TableSpec)
        upload = (pieces.read, ingest.bytes, ingest.filename, ingest.parts)
        return stack.enter_context(open_upload(*upload, spec, self._config.tables, self._config.intake))

    async def _store(self, ingest: Ingest, worker_id: UUID, table: Table, before: int, block: list[TableRow]) -> None:
        asked_at = monotonic()
        async with borrowed(self._database.of(ingest.owner)) as connection:
            began_at = monotonic()
            async with connection.transaction():
                await self._add_rows(connection, ingest, worker_id, table, before, block)
            seconds = monotonic() - began_at
        size = sum(row.size for row in block)
        self._batch_size.observe(MeasuredBatch(len(block), size, seconds, began_at - asked_at))

    async def _add_rows(
        self,
        connection: Connection,
        ingest: Ingest,
        worker_id: UUID,
        table: Table,
        before: int,
        block: list[TableRow],
    ) -> None:
        growing = await hold_growing(connection, ingest.batch_id)
        images = any(row.blob is not None for row in block)
        reading = (ingest.batch_id, worker_id, before, len(block), table.columns)
        if not await count_rows(connection, *reading, images=images):
            raise _TakenOverError("another reads it")
        place = (str(ingest.spec["route"]), ROWS)
        source_lane, filled = growing.lanes.setdefault(place, (len(growing.lanes), 0))
        packed = pack_table_rows(table_lane(growing.source_id, source_lane, filled), growing.total, block)
        await copy_rows(connection, packed)
        if images:
            lane = Place(growing.source_id, source_lane)
            await run_steps(connection, store_images(ingest.owner, lane, image_uses(block, filled)))
        width = ingest.spec.get("maxConcurrency")
        # The file's bytes are those of the upload: the rows add none.
        await move_totals(connection, ingest.batch_id, growing, {place: len(block)}, 0, width=width)

    async def _end(self, ingest: Ingest, worker_id: UUID, rows: int, columns: Any, problem: str | None) -> None:
        async with borrowed(self._database) as connection, connection.transaction():
            await hold_batch(connection, ingest.batch_id)  # before the job, as all who add rows do
            if not await end_ingest(connection, ingest.batch_id, worker_id, rows, columns, problem):
                return
            if problem is not None:
                await cancel_batch(connection, ingest.batch_id)
            await seal_batch(connection, ingest.batch_id)


def _skip(rows: Iterator[TableRow], count: int) -> None:
    while count > 0 and (block := next_block(rows, min(count, BLOCK_ROWS))):
        count -= len(block)
