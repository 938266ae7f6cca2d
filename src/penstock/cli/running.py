"""Run from file to file: store, work off, export. Interrupted anywhere, the same plan goes on from there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import uvloop

from penstock.batches.create import KnownBatch, create_batch, find_batch_by_key, release_key
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, read_status
from penstock.batches.steer import cancel_batch, resume_batch
from penstock.claim import claim as claims
from penstock.claim import gates, liveness
from penstock.cli.paths import check_paths
from penstock.cli.progress import Display, duration
from penstock.cli.summary import print_summary
from penstock.cli.tables import OWNER, RowsPlan, make_job
from penstock.config import Config
from penstock.db.pool import Connection, Pool, open_pool
from penstock.db.start import explain_database_errors, migrate_database, start_database
from penstock.dispatch.target import Target
from penstock.errors import ExitCode, PenstockError, report
from penstock.export.jsonl import Exported, export_files
from penstock.export.sheet_file import export_sheet, sheet_stem
from penstock.intake import ingest, refusal, source, sweep
from penstock.limits.sharing import ProviderLimits
from penstock.model import BatchState, batch_public_id
from penstock.observe.logs import log_to
from penstock.observe.traces import start_traces
from penstock.tasks import handle_signals
from penstock.worker.identity import register_identity
from penstock.worker.processes import InProcessWorker, RunWorkers, Workers

_LOOK_EVERY_S = 0.2
_ANSWER_WITHIN_S = 5.0
# The first signal lets calls end, the second cuts them short, and the third leaves at once.
_PATIENCE = 2
_GO_ON = "What was stored is safe: once the database works again, the same command goes on."


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one `penstock run`: its input, output, target and options."""

    input: Path
    output: Path
    target: Target
    workers: int = 1
    deadline: timedelta | None = None
    rows: RowsPlan | None = None
    """What is done with each row, where the input is a table."""
    start_anew: bool = False
    as_json: bool = False
    verbose: bool = False

    @property
    def key(self) -> str:
        """Key by which a run is found again, the same for the same command: from input, output and target. A sheet's
        format is no part of it: the rows are not worked off again for another."""
        name = self.output.name if self.rows is None else sheet_stem(self.output.name)
        output = self.output.parent.resolve() / name
        parts: list[Any] = [str(self.input.resolve()), str(output), str(self.target)]
        if self.rows is not None:
            parts.append([self.target.definition, msgspec.to_builtins(self.rows.spec), self.rows.limit])
            parts += [str(path.resolve()) for path in self.rows.source.paths[1:]]
        return "run:" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _Interrupted(PenstockError):  # noqa: N818 -- a person's wish
    exit_code = ExitCode.INTERRUPTED


def execute(plan: Plan, config: Config) -> ExitCode:
    """Carry the plan out; errors are reported, not raised."""
    try:
        inputs = [plan.input] if plan.rows is None else plan.rows.source.paths
        check_paths(inputs, plan.output, folders=plan.rows is not None)
        with explain_database_errors(_GO_ON), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Run(plan, config).execute())
    except PenstockError as error:
        report(error, as_json=plan.as_json)
        return error.exit_code


class _Run:
    def __init__(self, plan: Plan, config: Config) -> None:
        self._plan = plan
        self._config = config
        self._display = Display(quiet=plan.as_json)
        self._interrupted = asyncio.Event()
        self._signalled = 0
        self._workers: Workers | None = None
        self._started_at = monotonic()

    async def execute(self) -> ExitCode:
        # Signals are handled from here on: a cancelled task could leave the pool half-opened, and its closing stuck.
        with handle_signals(self._on_signal), self._display as display, contextlib.ExitStack() as held:
            display.stage("starting")
            conninfo = await asyncio.to_thread(held.enter_context, start_database(self._config))
            _log_to(self._config, verbose=self._plan.verbose)
            start_traces("penstock run")
            await asyncio.to_thread(migrate_database, conninfo)
            async with await open_pool(conninfo, self._config.database, name="penstock run") as database:
                return await self._stages(conninfo, database)

    async def _stages(self, conninfo: str, database: Pool) -> ExitCode:
        async with self._hold_plan_lock(conninfo):
            batch_id = await self._find(database)
            if batch_id is None:
                await self._plan.target.check(self._config)
                batch_id = await self._store(conninfo, database)
        batch = await self._work(database, batch_id)
        if not batch.state.terminal:
            return await self._say_unfinished(database, batch)
        exported = await self._export(conninfo, batch)
        counts = batch.counts
        failed = counts.failed + counts.not_found + counts.cancelled + counts.expired
        return self._end(batch, exported, ExitCode.FAILED_ROWS if failed else ExitCode.OK)

    # -- the batch this plan already made

    @contextlib.asynccontextmanager
    async def _hold_plan_lock(self, conninfo: str) -> AsyncIterator[None]:
        """Hold the plan's lock: one process at a time finds or makes the batch of a plan, so that a file is not stored
        twice.

        The lock is gone with its transaction, however that ends. Where a server cuts an idle transaction short,
        the batch's unique key still stands.
        """
        connection = await psycopg.AsyncConnection.connect(conninfo)
        try:
            waited = False
            while not (self._interrupted.is_set() or await _try_lock(connection, self._plan.key)):
                if not waited:
                    self._display.say("the same command is storing the file elsewhere: waiting to join it")
                waited = True
                await asyncio.sleep(_LOOK_EVERY_S)
            if self._interrupted.is_set():
                raise _Interrupted("interrupted before anything was done", hint="Run the command again.")
            yield
        finally:
            await connection.close()

    async def _find(self, database: Pool) -> UUID | None:
        async with database.connection() as connection:
            known = await find_batch_by_key(connection, OWNER, self._plan.key)
            if known is None:
                return None
            name = batch_public_id(known.id)
            if self._plan.start_anew:
                await cancel_batch(connection, known.id)
                await finish_batch(connection, known.id)
                await release_key(connection, known.id)
                return None
            if not await self._is_unchanged(known):
                self._display.say(f"{self._plan.input} has changed since {name}: starting a new batch")
                await release_key(connection, known.id)
                return None
            if known.state.terminal:
                self._display.say(f"{name} is {known.state}: writing its results again (--new starts over)")
            else:
                self._display.say(f"going on with {name}")
                await self._plan.target.check(self._config)
                # Running the command again says that the cause of the pause is gone.
                await gates.reopen(connection, known.pool, wait_max_s=self._config.retry.retry_after_max_s)
                await resume_batch(connection, known.id)
        return known.id

    async def _is_unchanged(self, known: KnownBatch) -> bool:
        rows = self._plan.rows
        if known.metadata == self._origin():
            return True
        if rows is not None:
            return await asyncio.to_thread(lambda: rows.source.digest) == known.digest
        return await asyncio.to_thread(source.digest_of, self._plan.input) == known.digest

    def _origin(self) -> dict[str, str]:
        """Attributes of the input by which a later run sees that it has not changed."""
        if self._plan.rows is not None:
            return self._plan.rows.source.origin
        about = self._plan.input.stat()
        return {"size": str(about.st_size), "mtime_ns": str(about.st_mtime_ns)}

    # -- store

    async def _store(self, conninfo: str, database: Pool) -> UUID:
        """Read the file into the database and make the batch. If interrupted, nothing of it is kept."""
        self._display.stage("storing")
        origin = self._origin()
        await self._sweep_abandoned(conninfo, database)
        async with register_identity(database, "intake", self._config.liveness) as worker_id:
            try:
                file_id, table = await asyncio.to_thread(self._ingest, conninfo, worker_id)
            except refusal.IntakeInterrupted as error:
                raise _Interrupted(
                    "interrupted while storing: nothing was kept", hint="Run the command again."
                ) from error
            return await self._create(database, file_id, table, origin)

    def _ingest(self, conninfo: str, worker_id: UUID) -> tuple[UUID, ingest.StoredTable | None]:
        """Store the input; returns its file, and what is known of a table."""
        path, rows = self._plan.input, self._plan.rows
        size = path.stat().st_size if rows is None else rows.source.size
        common: dict[str, Any] = {
            "owner": OWNER,
            "worker_id": worker_id,
            "limits": self._config.intake,
            "on_progress": lambda read: self._display.amount("storing", read, size, "bytes"),
            "should_stop": self._interrupted.is_set,
        }
        if rows is None:
            filename = os.fsencode(path.name).decode("utf-8", "replace")
            return ingest.ingest_file(conninfo, path, filename=filename, **common).file.id, None
        table = ingest.ingest_table(
            conninfo,
            rows.source,
            route=str(rows.target.route),
            spec=rows.spec,
            table_limits=self._config.tables,
            first_rows=rows.limit,
            through=rows.check,
            **common,
        )
        return table.file.file.id, table

    async def _sweep_abandoned(self, conninfo: str, database: Pool) -> None:
        async with database.connection() as connection:
            gone = await liveness.list_exited_workers(connection)
        await asyncio.to_thread(_sweep, conninfo, self._config.liveness.heartbeat_grace_s, gone)

    async def _create(
        self, database: Pool, file_id: UUID, table: ingest.StoredTable | None, origin: dict[str, str]
    ) -> UUID:
        batch_id, window = uuid4(), self._plan.deadline
        async with database.connection() as connection:
            deadline = await _database_time(connection) + window if window else None
            try:
                async with connection.transaction():
                    await create_batch(
                        connection,
                        batch_id=batch_id,
                        file_id=file_id,
                        owner=OWNER,
                        pool=f"run:{batch_id.hex}",
                        key=self._plan.key,
                        target=str(self._plan.target),
                        route=self._plan.target.route,
                        metadata=origin,
                        deadline=deadline,
                    )
                    if self._plan.rows is not None and table is not None:
                        await make_job(connection, batch_id, self._plan.rows, self._plan.input.stem, table)
            except psycopg.errors.UniqueViolation:
                known = await find_batch_by_key(connection, OWNER, self._plan.key)
                if known is None:
                    raise
                self._display.say(f"the same command made {batch_public_id(known.id)} meanwhile: joining it")
                return known.id
        self._display.say(f"stored as {batch_public_id(batch_id)}")
        return batch_id

    # -- work

    async def _work(self, database: Pool, batch_id: UUID) -> Batch:
        async with database.connection() as connection:
            batch = await read_status(connection, batch_id)
        if batch.state.terminal or self._interrupted.is_set():
            return batch
        self._display.stage("calling")
        pool = f"run:{batch_id.hex}"
        limits = ProviderLimits(self._config, database)
        throttle = limits.of_run(self._plan.target, pool) if self._plan.workers == 1 else None
        async with limits.running(), self._plan.target.dispatcher(self._config, throttle) as dispatcher:
            workers: Workers
            if self._plan.workers == 1:
                workers = InProcessWorker(self._config, database, pool, dispatcher)
            else:
                workers = RunWorkers(self._config, pool, self._plan.target, self._plan.workers)
            self._workers = workers
            async with workers:
                await self._watch(database, batch_id, pool, workers)
            self._workers = None
        return await self._conclude(database, batch_id)

    async def _conclude(self, database: Pool, batch_id: UUID) -> Batch:
        """Finish the batch if everything is settled, and read its status. Waits for a database that is away."""
        give_up_at = monotonic() + self._config.settle.settle_retry_s
        while True:
            try:
                async with database.connection() as connection:
                    await finish_batch(connection, batch_id)
                    return await read_status(connection, batch_id)
            except psycopg.OperationalError:
                if monotonic() > give_up_at or self._signalled > 1:
                    raise
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _watch(self, database: Pool, batch_id: UUID, pool: str, workers: Workers) -> None:
        """Show progress until the batch has ended, or no route can go on without a person."""
        batch: Batch | None = None
        while not workers.stopped:
            note = workers.trouble
            try:
                async with asyncio.timeout(_ANSWER_WITHIN_S), database.connection() as connection:
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
                note = note or _waiting(waits)
            if batch is not None:
                self._display.counts(batch.counts, workers.in_flight, note)
            if self._interrupted.is_set():
                workers.stop()
            await workers.wait(_LOOK_EVERY_S)

    def _on_signal(self) -> None:
        self._signalled += 1
        if self._signalled > _PATIENCE:
            # A call or a statement that does not end is left: the next run sees that this process is gone and takes
            # over.
            os._exit(ExitCode.INTERRUPTED)
        if self._signalled > 1:
            self._display.say("stopping now (Ctrl-C once more leaves at once)")
            if self._workers is not None:
                self._workers.abort()
            return
        self._interrupted.set()
        if self._workers is None:
            self._display.say("stopping")
        else:
            self._display.say("stopping: calls in flight finish first (Ctrl-C again cuts them short)")
            self._workers.stop()

    # -- the end

    async def _export(self, conninfo: str, batch: Batch) -> Exported:
        self._display.stage("writing")

        def show(done: int) -> None:
            self._on_written(done, batch.counts.total)

        output = self._plan.output
        if self._plan.rows is not None:
            bom = self._plan.rows.bom
            return await asyncio.to_thread(export_sheet, conninfo, batch.id, output, bom=bom, on_progress=show)
        return await asyncio.to_thread(export_files, conninfo, batch.id, batch.state, output, on_progress=show)

    def _on_written(self, done: int, total: int) -> None:
        if self._interrupted.is_set():
            raise _Interrupted(
                "interrupted while writing: every result is stored, the output is as it was before",
                hint="Run the same command again to write it.",
            )
        self._display.amount("writing", done, total, "rows" if self._plan.rows else "lines")

    async def _say_unfinished(self, database: Pool, batch: Batch) -> ExitCode:
        if self._interrupted.is_set():
            return self._end(batch, None, ExitCode.INTERRUPTED)
        async with database.connection() as connection:
            waits = await gates.list_closed(connection, f"run:{batch.id.hex}")
        reasons = sorted({f"{gate.route}: {gate.message}" for gate in waits if gate.halted_at is not None})
        return self._end(batch, None, ExitCode.PAUSED, reasons)

    def _end(
        self, batch: Batch, exported: Exported | None, code: ExitCode, reasons: list[str] | None = None
    ) -> ExitCode:
        """Print the summary in the display's place, and return the exit code."""
        self._display.__exit__(None, None, None)
        seconds, unit = monotonic() - self._started_at, "request" if self._plan.rows is None else "row"
        print_summary(batch, exported, seconds, code, as_json=self._plan.as_json, reasons=reasons, unit=unit)
        return code


async def _try_lock(connection: psycopg.AsyncConnection, key: str) -> bool:
    await connection.rollback()
    cursor = await connection.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 0))", [key])
    return await cursor.fetchone() == (True,)


async def _database_time(connection: Connection) -> datetime:
    """Time of the database, on whose clock deadlines are."""
    row = await (await connection.execute("SELECT now()")).fetchone()
    if row is None:
        raise AssertionError("SELECT always answers one row")
    moment: datetime = row[0]
    return moment


def _waiting(waits: list[gates.Gate]) -> str:
    """Text about the routes that wait, their reasons and how long still."""
    if not waits:
        return ""
    gate = waits[0]
    if gate.not_before is None:
        return f"waiting: {gate.code}"
    left_s = (gate.not_before - datetime.now(UTC)).total_seconds()
    return f"waiting: {gate.code}" + (f" for {duration(left_s)}" if left_s >= 1 else "")


def _sweep(conninfo: str, grace_s: float, gone: list[UUID]) -> None:
    """Remove the rows that killed intakes left behind."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        if sweep.sweep_abandoned(connection, grace_s=grace_s, dead_workers=gone):
            sweep.purge_failed(connection)


def _log_to(config: Config, *, verbose: bool) -> None:
    handler: logging.Handler = logging.NullHandler()
    if verbose:
        handler = logging.StreamHandler(sys.stderr)
    else:
        # Opened now: a log that cannot be written must neither end the run nor disturb the display later.
        with contextlib.suppress(OSError):
            handler = logging.FileHandler(config.data_dir / "penstock.log")
    log_to(handler, logging.INFO if verbose else logging.WARNING, config.observe.log_format)
