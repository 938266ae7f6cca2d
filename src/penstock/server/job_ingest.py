"""Ingest of jobs: rows are read from the stored bytes and added to their growing batch, some thousands a transaction.

A row can be claimed as soon as its transaction commits. The rows are a pure function of the bytes, so an ingest that
died goes on by reading them again and skipping those that are stored.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any
from uuid import UUID

import msgspec

from penstock.batches.growth import NotGrowing, hold_growing, move_totals, seal_batch
from penstock.batches.jobs import Ingest, count_rows, end_ingest, take_ingest
from penstock.batches.steer import cancel_batch, hold_batch
from penstock.config import Config
from penstock.db.pool import Pool, borrowed
from penstock.intake.copying import copy_rows
from penstock.intake.refusal import IntakeRefused
from penstock.intake.rows import Lane, pack_row, table_lane
from penstock.intake.stored_bytes import PieceReader, StoredBytes
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.table import Table, TableRow, TableSpec
from penstock.model import ROWS

_log = logging.getLogger("penstock.ingest")

_BLOCK_ROWS = 2_000
_BLOCK_BYTES = 4 * 1024 * 1024


class _TakenOverError(Exception):
    """Another process reads the job now: this one was taken for dead."""


class JobIngest:
    """Reads the rows of jobs, one job at a time."""

    def __init__(self, config: Config, conninfo: str, database: Pool) -> None:
        self._config = config
        self._conninfo = conninfo
        self._database = database

    async def step(self, worker_id: UUID) -> bool:
        """Read one job's rows to their end. True if there may be another."""
        async with borrowed(self._database) as connection:
            ingest = await take_ingest(connection, worker_id, self._config.liveness.heartbeat_grace_s)
        if ingest is None:
            return False
        try:
            await self._read(ingest, worker_id)
        except (NotGrowing, _TakenOverError) as ended:
            _log.info("ingest of %s ends: %s", ingest.batch_id, ended)
        return True

    async def _read(self, ingest: Ingest, worker_id: UUID) -> None:
        with ExitStack() as stack:
            try:
                table = await asyncio.to_thread(self._open, ingest, stack)
                rows = table.rows()
                await asyncio.to_thread(_skip, rows, ingest.rows)
                while block := await asyncio.to_thread(_next_block, rows):
                    await self._store(ingest, worker_id, table, block)
            except IntakeRefused as refused:
                # Everything was read once before the job was made: a limit was lowered since.
                await self._end(ingest, worker_id, ingest.columns, refused.message)
                return
            await self._end(ingest, worker_id, table.columns, None)

    def _open(self, ingest: Ingest, stack: ExitStack) -> Table:
        pieces = stack.enter_context(PieceReader(self._conninfo, ingest.source_id))
        file = io.BufferedReader(StoredBytes(pieces.read, ingest.bytes))
        spec = msgspec.convert(ingest.spec.get("columns", {}), TableSpec)
        return stack.enter_context(open_table(file, ingest.filename, spec, self._config.tables, self._config.intake))

    async def _store(self, ingest: Ingest, worker_id: UUID, table: Table, block: list[TableRow]) -> None:
        async with borrowed(self._database) as connection, connection.transaction():
            growing = await hold_growing(connection, ingest.batch_id)
            if not await count_rows(connection, ingest.batch_id, worker_id, len(block), table.columns):
                raise _TakenOverError("another process reads it")
            place = (str(ingest.spec["route"]), ROWS)
            source_lane, filled = growing.lanes.setdefault(place, (len(growing.lanes), 0))
            packed = _pack(table_lane(growing.source_id, source_lane, filled), growing.total, block)
            await copy_rows(connection, packed)
            size = sum(len(row.body) for row in block)
            width = ingest.spec.get("maxConcurrency")
            await move_totals(connection, ingest.batch_id, growing, {place: len(block)}, size, width=width)

    async def _end(self, ingest: Ingest, worker_id: UUID, columns: Any, problem: str | None) -> None:
        async with borrowed(self._database) as connection, connection.transaction():
            await hold_batch(connection, ingest.batch_id)  # before the job, as all who add rows do
            if not await end_ingest(connection, ingest.batch_id, worker_id, columns, problem):
                return
            if problem is not None:
                await cancel_batch(connection, ingest.batch_id)
            await seal_batch(connection, ingest.batch_id)


def _skip(rows: Iterator[TableRow], count: int) -> None:
    for _ in islice(rows, count):
        pass


def _next_block(rows: Iterator[TableRow]) -> list[TableRow]:
    block: list[TableRow] = []
    size = 0
    for row in islice(rows, _BLOCK_ROWS):
        block.append(row)
        size += len(row.body)
        if size >= _BLOCK_BYTES:
            break
    return block


def _pack(lane: Lane, lines_before: int, block: list[TableRow]) -> bytes:
    return b"".join(
        [
            pack_row(lane, lines_before + number, row.custom_id.encode(), row.summary.encode(), row.body)
            for number, row in enumerate(block, 1)
        ]
    )
