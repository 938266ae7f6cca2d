"""Run from file to file: store, work off, export. Interrupted anywhere, the same plan goes on from there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TextIO
from uuid import UUID

import psycopg
import uvloop

from penstock.batches.create import hold_key
from penstock.batches.read import Batch
from penstock.batches.runs import INPUT, Beginning, list_runs_alike, run_pool
from penstock.claim import gates
from penstock.cli.figures import count_text
from penstock.cli.known_run import (
    end_chain,
    find_beginning,
    find_first_rows,
    find_run,
    has_work,
    missed,
    offer_continuation,
    public_name,
    read_chain,
    take_up,
)
from penstock.cli.paths import check_paths
from penstock.cli.plan import Plan
from penstock.cli.progress import Display
from penstock.cli.stdout import keep_stdout
from penstock.cli.store_run import RunInput, RunStore, path_text
from penstock.cli.summary import Failures, add_counts, print_summary, read_failures
from penstock.cli.tables import OWNER
from penstock.cli.work_run import RunWork
from penstock.client.disk import forget_old
from penstock.config import Config
from penstock.db.pool import Connection, Pool, open_pool
from penstock.db.start import GO_ON, explain_database_errors, migrate_database, start_database
from penstock.errors import ExitCode, Interrupted, PenstockError, report
from penstock.export.jsonl import Exported, export_files
from penstock.export.sheet_file import export_sheet
from penstock.model import public_id
from penstock.observe.logs import log_run
from penstock.observe.traces import start_traces
from penstock.tasks import handle_signals

_LOOK_EVERY_S = 0.2
# The first signal lets calls end, the second cuts them short, and the third leaves at once.
_PATIENCE = 2


def execute(plan: Plan, config: Config) -> ExitCode:
    """Carry the plan out; errors are reported, not raised."""
    try:
        check_paths(plan.inputs, None if plan.to_stdout else plan.output, folders=plan.rows is not None)
        with (
            keep_stdout(apart=plan.target.processor is not None) as out,
            explain_database_errors(GO_ON),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_Run(plan, config, out).execute())
    except PenstockError as error:
        report(error, as_json=plan.as_json)
        return error.exit_code


class _Run:
    def __init__(self, plan: Plan, config: Config, out: TextIO) -> None:
        self._plan = plan
        self._config = config
        self._out = out
        self._display = Display(quiet=plan.as_json)
        self._interrupted = asyncio.Event()
        self._signalled = 0
        self._work: RunWork | None = None
        self._started_at = monotonic()

    async def execute(self) -> ExitCode:
        # Signals are handled from here on: a cancelled task could leave the pool half-opened, and its closing stuck.
        with handle_signals(self._on_signal), self._display as display, contextlib.ExitStack() as held:
            display.stage("starting")
            conninfo = await asyncio.to_thread(held.enter_context, start_database(self._config))
            log_run(self._config.data_dir, self._config.observe.log_format, verbose=self._plan.verbose)
            start_traces("penstock run")
            await asyncio.to_thread(migrate_database, conninfo)
            async with (
                await open_pool(conninfo, self._config.database, name="penstock run") as database,
                self._console(conninfo),
            ):
                return await self._stages(conninfo, database)

    @contextlib.asynccontextmanager
    async def _console(self, conninfo: str) -> AsyncIterator[None]:
        """Serve the console while the run lasts, if it is asked for."""
        if not self._plan.console:
            yield
            return
        from penstock.cli.run_console import serve_console

        async with serve_console(self._config, conninfo) as address:
            told = f"console at {address}"
            if self._plan.as_json:
                print(told, file=sys.stderr, flush=True)  # the display is off
            else:
                self._display.say(told)
            yield

    async def _stages(self, conninfo: str, database: Pool) -> ExitCode:
        chain = await self._find_or_store(conninfo, database)
        self._work = RunWork(self._plan, self._config, database, self._display)
        if self._interrupted.is_set():
            self._work.stop()
        batches: list[Batch] = []
        for batch_id in chain:
            batches.append(await self._work.work_off(batch_id))
            if not batches[-1].state.terminal:
                return await self._say_unfinished(conninfo, database, batches)
        exported = await self._export(conninfo, batches)
        await forget_old(database, self._config)
        code = ExitCode.FAILED_ROWS if any(missed(batch) for batch in batches) else ExitCode.OK
        return await self._end(database, batches, exported, code)

    # -- the batches of this plan

    async def _find_or_store(self, conninfo: str, database: Pool) -> list[UUID]:
        """Ids of the batches whose results are the plan's, in order; the last one is made if it is not there yet."""
        store = RunStore(self._plan, self._config, conninfo, database, self._display, self._interrupted.is_set)
        size = sum(path.stat().st_size for path in self._plan.inputs if path.is_file())
        digest = await store.read_digest()
        key = self._plan.key(digest)
        async with self._hold_lock(conninfo, key):
            chain, grown = await self._find(database, digest, key)
            if not chain or grown is not None:
                await self._plan.target.check(self._config)
                chain.append(await store.store(RunInput(key, size, grown)))
        return chain

    @contextlib.asynccontextmanager
    async def _hold_lock(self, conninfo: str, key: str) -> AsyncIterator[None]:
        """Hold the plan's lock: one process at a time finds or makes the batch of a plan."""

        def should_wait(asked: bool) -> bool:
            if not asked:
                self._display.say("the same command is storing the file elsewhere: waiting to join it")
            return not self._interrupted.is_set()

        async with hold_key(conninfo, key, _LOOK_EVERY_S, should_wait):
            if self._interrupted.is_set():
                raise Interrupted("interrupted before anything was done", hint="Run the command again.")
            yield

    async def _find(self, database: Pool, digest: bytes, key: str) -> tuple[list[UUID], Beginning | None]:
        """Find the batches of an earlier run of this plan, and let them go on. Where that run was over the beginning of
        the input alone, it is told too."""
        plan = self._plan
        async with database.connection() as connection:
            known = await find_run(connection, plan, digest)
            found = None if known is not None else await self._find_beginning(connection)
            last = known.id if known is not None else found.run.id if found is not None else None
            if last is None:
                return [], None
            is_all = found is None or found.is_all
            chain = await read_chain(connection, last)
            if plan.start_anew:
                if is_all:
                    await end_chain(connection, chain)
                return [], None
            if found is not None and not is_all:
                if digest.hex() in found.run.key:  # of the same file, more rows than --limit let through
                    self._display.say(f"{public_name(chain[-1])} has the first {count_text(found.lines, 'row')} of it")
                elif not plan.continues:
                    raise offer_continuation(plan, chain)
            if any(has_work(plan, batch) for batch in chain):
                await plan.target.check(self._config)
            for batch in chain:
                own = is_all and batch is chain[-1]
                await take_up(connection, plan, self._config, batch, key if own else None, self._display.say)
        return [batch.id for batch in chain], None if is_all else found

    async def _find_beginning(self, connection: Connection) -> Beginning | None:
        """Find a run over the beginning of the input. Says so where the input has changed otherwise."""
        plan, alike = self._plan, await list_runs_alike(connection, OWNER, self._plan.asked)
        if plan.rows is None:
            grown = await asyncio.to_thread(find_beginning, plan.input, alike, self._interrupted.is_set)
        else:
            grown = await asyncio.to_thread(find_first_rows, plan.rows, self._config, alike, self._interrupted.is_set)
        before = next((run for run in alike if run.metadata.get(INPUT) == path_text(plan.input)), None)
        if grown is None and before is not None and not plan.start_anew:
            name = public_id("batch" if plan.rows is None else "job", before.id)
            self._display.say(f"{plan.input} has changed since {name}: a new run begins")
        return grown

    # -- signals

    def _on_signal(self) -> None:
        self._signalled += 1
        if self._signalled > _PATIENCE:
            # A call or a statement that does not end is left: the next run sees that this process is gone and takes
            # over.
            os._exit(ExitCode.INTERRUPTED)
        self._interrupted.set()
        under_way = self._work is not None and self._work.under_way
        if self._signalled > 1:
            self._display.say("stopping now (Ctrl-C once more leaves at once)")
        elif under_way:
            self._display.say("stopping: calls in flight finish first (Ctrl-C again cuts them short)")
        else:
            self._display.say("stopping")
        if self._work is not None:
            self._work.stop()

    # -- the end

    async def _export(self, conninfo: str, batches: Sequence[Batch]) -> Exported:
        """Write the results of all batches, one after the other, to the output."""
        self._display.stage("writing")
        if not self._plan.to_stdout:
            return await asyncio.to_thread(self._write, conninfo, batches, self._plan.output)
        # Standard output cannot be taken back: nothing is written to it before all is there.
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            name = "answers.jsonl" if self._plan.rows is None else "answers.csv"
            exported = await asyncio.to_thread(self._write, conninfo, batches, Path(folder) / name)
            self._out.flush()
            with exported.output.open("rb") as file:
                shutil.copyfileobj(file, self._out.buffer)
            self._out.buffer.flush()
        return Exported(self._plan.output, exported.output_lines, None, exported.error_lines)

    def _write(self, conninfo: str, batches: Sequence[Batch], output: Path) -> Exported:
        total = sum(batch.counts.total for batch in batches)

        def show(done: int) -> None:
            self._on_written(done, total)

        *earlier, batch = batches
        if self._plan.rows is not None:
            ids = [one.id for one in earlier]
            return export_sheet(conninfo, batch.id, output, earlier=ids, bom=self._plan.rows.bom, on_progress=show)
        before = [(one.id, one.state) for one in earlier]
        return export_files(conninfo, batch.id, batch.state, output, earlier=before, on_progress=show)

    def _on_written(self, done: int, total: int) -> None:
        if self._interrupted.is_set() and not self._plan.partial:
            raise Interrupted(
                "interrupted while writing: every result is stored, the output is as it was before",
                hint="Run the same command again to write it.",
            )
        self._display.amount("writing", done, total, "rows" if self._plan.rows else "lines")

    async def _say_unfinished(self, conninfo: str, database: Pool, batches: Sequence[Batch]) -> ExitCode:
        exported = await self._export(conninfo, batches) if self._plan.partial else None
        if self._interrupted.is_set():
            return await self._end(database, batches, exported, ExitCode.INTERRUPTED)
        async with database.connection() as connection:
            waits = await gates.list_closed(connection, run_pool(batches[-1].id))
        reasons = sorted({f"{gate.route}: {gate.message}" for gate in waits if gate.halted_at is not None})
        return await self._end(database, batches, exported, ExitCode.PAUSED, reasons)

    async def _end(
        self,
        database: Pool,
        batches: Sequence[Batch],
        exported: Exported | None,
        code: ExitCode,
        reasons: Sequence[str] = (),
    ) -> ExitCode:
        """Print the summary in the display's place, and return the exit code."""
        failures: list[Failures] = []
        counts = add_counts(batches)
        if counts.failed + counts.not_found:
            # What was done is told, whether the database can still say this or not.
            with contextlib.suppress(psycopg.Error):
                async with database.connection() as connection:
                    failures = await read_failures(connection, batches)
        self._display.__exit__(None, None, None)
        seconds = monotonic() - self._started_at
        print_summary(self._plan, batches, exported, seconds, code, self._out, reasons, failures)
        return code
