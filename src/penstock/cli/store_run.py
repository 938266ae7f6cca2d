"""Store a run's input and make its batch: whole or not at all."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from penstock.batches.create import create_batch, find_batch_by_key
from penstock.batches.runs import ASKED, CONTINUES, INPUT, INPUT_BYTES, ROWS, ROWS_DIGEST, Beginning, run_pool
from penstock.claim import liveness
from penstock.cli.plan import Plan
from penstock.cli.progress import Display
from penstock.cli.tables import OWNER, make_job
from penstock.config import Config
from penstock.db.pool import Pool
from penstock.errors import Interrupted
from penstock.intake import ingest, refusal, source, sweep
from penstock.model import new_id, public_id
from penstock.worker.identity import register_identity


@dataclass(frozen=True, slots=True)
class RunInput:
    """Input of a run, read to find out what it is."""

    key: str
    size: int
    after: Beginning | None = None
    """The beginning of the input that another run is over, where this one is over what comes after it."""


class RunStore:
    """Stores the input of one plan."""

    def __init__(
        self,
        plan: Plan,
        config: Config,
        conninfo: str,
        database: Pool,
        display: Display,
        should_stop: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._config = config
        self._conninfo = conninfo
        self._database = database
        self._display = display
        self._should_stop = should_stop

    async def read_digest(self) -> bytes:
        """Digest of the input's content."""
        rows = self._plan.rows
        if rows is not None:
            return await asyncio.to_thread(lambda: rows.source.digest)
        return await asyncio.to_thread(source.digest_of, self._plan.input)

    async def store(self, found: RunInput) -> UUID:
        """Read the input into the database and make the batch. If interrupted, nothing of it is kept."""
        self._display.stage("storing")
        await self._sweep_abandoned()
        async with register_identity(self._database, "intake", self._config.liveness) as worker_id:
            try:
                file_id, table = await asyncio.to_thread(self._ingest, worker_id, found)
            except refusal.IntakeInterrupted as error:
                raise Interrupted(
                    "interrupted while storing: nothing was kept", hint="Run the command again."
                ) from error
            return await self._create(file_id, table, found)

    def _ingest(self, worker_id: UUID, found: RunInput) -> tuple[UUID, ingest.StoredTable | None]:
        """Store the input; returns its file, and what is known of a table."""
        path, rows = self._plan.input, self._plan.rows
        skip = (0, 0) if found.after is None else (found.after.run.input_bytes, found.after.lines)
        size = found.size - skip[0] if rows is None else rows.source.size
        common: dict[str, Any] = {
            "owner": OWNER,
            "worker_id": worker_id,
            "limits": self._config.intake,
            "on_progress": lambda read: self._display.amount("storing", read, size, "bytes"),
            "should_stop": self._should_stop,
        }
        if rows is None:
            filename = os.fsencode(path.name).decode("utf-8", "replace")
            for_function = self._plan.target.processor is not None
            stored = ingest.ingest_file(
                self._conninfo, path, filename=filename, for_function=for_function, skip=skip, **common
            )
            return stored.file.id, None
        table = ingest.ingest_table(
            self._conninfo,
            rows.source,
            route=str(rows.target.route),
            spec=rows.spec,
            table_limits=self._config.tables,
            first_rows=rows.limit,
            skip_rows=0 if found.after is None else found.after.lines,
            through=rows.check,
            **common,
        )
        return table.file.file.id, table

    async def _sweep_abandoned(self) -> None:
        async with self._database.connection() as connection:
            gone = await liveness.list_exited_workers(connection)
        await asyncio.to_thread(_sweep, self._conninfo, self._config.liveness.heartbeat_grace_s, gone)

    async def _create(self, file_id: UUID, table: ingest.StoredTable | None, found: RunInput) -> UUID:
        plan, batch_id = self._plan, new_id()
        window_s = None if plan.deadline is None else plan.deadline.total_seconds()
        async with self._database.connection() as connection:
            try:
                async with connection.transaction():
                    await create_batch(
                        connection,
                        batch_id=batch_id,
                        file_id=file_id,
                        owner=OWNER,
                        pool=run_pool(batch_id),
                        key=found.key,
                        target=str(plan.target),
                        route=plan.target.route,
                        metadata=self._metadata(found, table),
                        window_s=window_s,
                        is_job=plan.rows is not None,
                        result_files=plan.rows is None,
                    )
                    if plan.rows is not None and table is not None:
                        # A job counts its own rows from 1: where they are not the table's first, its type says so.
                        after = "" if found.after is None else f" from row {found.after.lines + 1:,}"
                        await make_job(connection, batch_id, plan.rows, plan.input.stem + after, table)
            except psycopg.errors.UniqueViolation:
                known = await find_batch_by_key(connection, OWNER, found.key)
                if known is None:
                    raise
                self._display.say(f"the same command made {public_id(self._kind, known.id)} meanwhile: joining it")
                return known.id
        self._display.say(f"stored as {public_id(self._kind, batch_id)}")
        return batch_id

    @property
    def _kind(self) -> str:
        return "batch" if self._plan.rows is None else "job"

    def _metadata(self, found: RunInput, table: ingest.StoredTable | None) -> dict[str, str]:
        told = {ASKED: self._plan.asked, INPUT: path_text(self._plan.input), INPUT_BYTES: str(found.size)}
        before = 0
        if found.after is not None:
            told[CONTINUES] = public_id(self._kind, found.after.run.id)
            before = found.after.lines
        if table is not None:
            told |= {ROWS: str(before + table.file.file.lines), ROWS_DIGEST: table.digest}
        return told


def path_text(path: Path) -> str:
    """A path, from the root, as text that the database can hold."""
    return os.fsencode(path.resolve()).decode("utf-8", "replace")


def _sweep(conninfo: str, grace_s: float, gone: list[UUID]) -> None:
    """Remove the rows that killed intakes left behind."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        if sweep.sweep_abandoned(connection, grace_s=grace_s, dead_workers=gone):
            sweep.purge_failed(connection)
