"""`penstock.map`: a function over rows, durable and resumable. Rows are stored as a run stores a file, worked off by a
run's worker, and read as its results are: nothing here is an engine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

from penstock.batches.create import create_batch, find_batch_by_key, hold_key, release_key
from penstock.batches.finish import finish_batch
from penstock.batches.read import Batch, read_status
from penstock.batches.run_again import retry_batch
from penstock.batches.runs import run_pool
from penstock.batches.steer import cancel_batch, resume_batch
from penstock.claim import gates
from penstock.config import Config
from penstock.db.pool import Pool, borrowed, open_pool
from penstock.db.start import explain_database_errors, migrate_database, start_database
from penstock.dispatch.loading import check_takes_one
from penstock.dispatch.target import Target
from penstock.errors import PenstockError, UsageError
from penstock.export.follow import read_journal_results
from penstock.export.order import read_lane_ids, read_results
from penstock.export.result_lines import OutcomeRow
from penstock.intake.ingest import ingest_values
from penstock.library.loop_thread import LoopThread
from penstock.library.options import load_config
from penstock.library.result import Result, make_result
from penstock.library.values import encode_rows
from penstock.model import BatchState, new_id
from penstock.worker.fuse import NOTHING_SUCCEEDED
from penstock.worker.identity import register_identity
from penstock.worker.processes import InProcessWorker, RunWorkers, Workers

OWNER = "local"
_PAGE_ROWS = 500
_PAGE_BYTES = 4 << 20
_LOOK_EVERY_S = 0.05
_GO_ON = "What was stored is safe: once the database works again, the same name goes on."


def map(  # noqa: A001 -- it is one, and is called as `penstock.map`
    function: Callable[..., Any],
    rows: Any,
    *,
    name: str,
    ordered: bool = True,
    concurrency: int | None = None,
    workers: int = 1,
    retry_failed: bool = False,
    new: bool = False,
    data_dir: str | Path | None = None,
    database_url: str | None = None,
    settings: Mapping[str, object] | None = None,
) -> Map:
    """Call `function` on every row, and give the results: `for result in penstock.map(...)`, or `async for`.

    `rows` are JSON values, from any iterable, or the rows of a pandas or polars frame. They are stored before the first
    call. Whatever happens then, the same `name` goes on where it stopped: no row that has a result is called again.

    `function` gets the row, may be async, and returns a JSON value or raises `Retry`, `Fail`, `NotFound` or `Skip`; any
    other exception is tried again. A class is made once per process, its `setup()` called before the first row and its
    `close()` after the last. A function that is marked by `chunk` gets lists of rows.

    Results come in the rows' order, or with `ordered=False` as they are decided. `concurrency` bounds the calls at a
    time (64 threads or coroutines), `workers` are processes; several need a function that can be imported.
    `retry_failed` runs rows again that have failed, `new` all of them. The data is in `data_dir` (`./.penstock`), or in
    the PostgreSQL at `database_url`; `settings` are those of the configuration, such as `attempt_timeout_s`.

    Where nothing has ever succeeded, `stop_after_failures` (30) failures of one kind end the iteration with a
    `PenstockError` that says what they were. The same name goes on, with those rows too; 0 lets every row fail.
    """
    if not callable(function):
        raise UsageError(f"{function!r:.100} is no function", hint="Give the function itself, such as map(work, ...).")
    if not name or not name.isprintable() or len(name) > _MAX_NAME_CHARS:
        raise UsageError(_name_fault(name), hint=f"A name is a text of 1 to {_MAX_NAME_CHARS} characters.")
    check_takes_one("penstock.map", getattr(function, "__name__", type(function).__name__), function, "row")
    config = load_config(data_dir, database_url, settings, concurrency=concurrency)
    return Map(_Plan(function, rows, name, ordered, workers, retry_failed, new), config)


_MAX_NAME_CHARS = 200


def _name_fault(name: str) -> str:
    if not name:
        return "the name is empty"
    if len(name) > _MAX_NAME_CHARS:
        return f"the name has {len(name):,} characters"
    return f"the name {name!r} has characters that cannot be printed"


@dataclass(frozen=True, slots=True)
class _Plan:
    function: Callable[..., Any]
    rows: Any
    name: str
    ordered: bool
    workers: int
    retry_failed: bool
    new: bool

    @property
    def key(self) -> str:
        """Key by which the map is found again: its name alone."""
        return f"map:{self.name}"

    @property
    def route(self) -> str:
        module, name = getattr(self.function, "__module__", None), getattr(self.function, "__qualname__", None)
        return f"{module}:{name}" if module and name else type(self.function).__name__

    def target(self) -> Target:
        """The function, as worker processes are told it."""
        module, _, name = self.route.partition(":")
        if module == "__main__" or "<" in name:
            raise UsageError(
                f"workers={self.workers}: other processes cannot import {name} of {module}",
                hint="Put the function into a module of its own, at its top level; or leave workers out.",
            )
        return Target(processor=self.route, values=True)


class Map:
    """Rows of a map on their way to their results. Iterating it works them off: the first iteration begins, every other
    one gives the results again. Leaving the loop early stops after the calls in flight; the same name goes on."""

    def __init__(self, plan: _Plan, config: Config) -> None:
        self._plan = plan
        self._config = config

    def __iter__(self) -> Iterator[Result]:
        with LoopThread() as loop, contextlib.ExitStack() as stack:
            run = stack.enter_context(loop.entered(_open_run(self._plan, self._config)))
            # In this thread: what the rows come from, a cursor perhaps, may belong to it.
            with loop.entered(run.hold()):
                batch_id = loop.call(run.find)
                if batch_id is None:
                    with loop.entered(run.identity()) as worker_id:
                        file_id = run.store(worker_id)
                    batch_id = None if file_id is None else loop.call(run.create, file_id)
                elif not run.holds_same_rows():
                    raise run.other_rows()
            if batch_id is None:
                return
            pages = run.pages(batch_id)
            stack.callback(loop.call, pages.aclose)
            while (page := loop.call(anext, pages, None)) is not None:
                yield from page

    async def __aiter__(self) -> AsyncIterator[Result]:
        async with _open_run(self._plan, self._config) as run:
            async with run.hold():
                batch_id = await run.find()
                if batch_id is None:
                    async with run.identity() as worker_id:
                        file_id = await asyncio.to_thread(run.store, worker_id)
                    batch_id = None if file_id is None else await run.create(file_id)
                elif not await asyncio.to_thread(run.holds_same_rows):
                    raise run.other_rows()
            if batch_id is None:
                return
            async with contextlib.aclosing(run.pages(batch_id)) as pages:
                async for page in pages:
                    for result in page:
                        yield result


@contextlib.asynccontextmanager
async def _open_run(plan: _Plan, config: Config) -> AsyncIterator[_Run]:
    with contextlib.ExitStack() as held, explain_database_errors(_GO_ON):
        conninfo = await asyncio.to_thread(held.enter_context, start_database(config))
        await asyncio.to_thread(migrate_database, conninfo)
        async with await open_pool(conninfo, config.database, name="penstock map") as database:
            yield _Run(plan, config, conninfo, database)


class _Run:
    """One iteration over a map."""

    def __init__(self, plan: _Plan, config: Config, conninfo: str, database: Pool) -> None:
        self._plan = plan
        self._config = config
        self._conninfo = conninfo
        self._database = database
        self._known_digest: bytes | None = None

    # -- the batch of this name

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold the name: one process at a time finds or stores its rows."""
        async with hold_key(self._conninfo, self._plan.key, _LOOK_EVERY_S):
            yield

    async def find(self) -> UUID | None:
        async with borrowed(self._database) as connection:
            known = await find_batch_by_key(connection, OWNER, self._plan.key)
            if known is None:
                return None
            if self._plan.new:
                await cancel_batch(connection, known.id)
                await finish_batch(connection, known.id)
                await release_key(connection, known.id)
                return None
            self._known_digest = known.digest
            halted = await gates.list_closed(connection, known.pool)
            hopeless = any(gate.code == NOTHING_SUCCEEDED for gate in halted)
            if self._plan.retry_failed or hopeless:
                await retry_batch(connection, known.id, OWNER, limits=self._config.retry)
            elif not known.state.terminal:
                await resume_batch(connection, known.id)
            # Iterating it again says that the cause of the pause is gone.
            await gates.reopen(connection, known.pool)
            return known.id

    def holds_same_rows(self) -> bool:
        digest = hashlib.sha256()
        for row in encode_rows(self._plan.rows):
            digest.update(row + b"\n")
        return digest.digest() == self._known_digest

    def other_rows(self) -> UsageError:
        return UsageError(
            f"the map '{self._plan.name}' was begun with other rows",
            hint="Give other rows another name; or start over with new=True.",
        )

    # -- store

    @contextlib.asynccontextmanager
    async def identity(self) -> AsyncIterator[UUID]:
        async with register_identity(self._database, "intake", self._config.liveness) as worker_id:
            yield worker_id

    def store(self, worker_id: UUID) -> UUID | None:
        """Store the rows, all or none; None if there are none."""
        stored = ingest_values(
            self._conninfo,
            encode_rows(self._plan.rows),
            name=self._plan.name,
            owner=OWNER,
            worker_id=worker_id,
            limits=self._config.intake,
        )
        return None if stored is None else stored.file.id

    async def create(self, file_id: UUID) -> UUID:
        batch_id = new_id()
        async with borrowed(self._database) as connection:
            try:
                await create_batch(
                    connection,
                    batch_id=batch_id,
                    file_id=file_id,
                    owner=OWNER,
                    pool=run_pool(batch_id),
                    key=self._plan.key,
                    target=self._plan.route,
                    route=self._plan.route,
                    metadata={"map": self._plan.name},
                    result_files=True,
                )
            except psycopg.errors.UniqueViolation:
                known = await find_batch_by_key(connection, OWNER, self._plan.key)
                if known is None:
                    raise
                return known.id
        return batch_id

    # -- work, and results

    async def pages(self, batch_id: UUID) -> AsyncGenerator[list[Result], None]:
        """The results by pages, while the rows are worked off."""
        batch = await self._read(batch_id)
        if batch.state.terminal:
            async for page in self._read_pages(batch, None):
                yield page
            return
        async with self._open_workers(batch) as workers, workers:
            async for page in self._read_pages(batch, workers):
                yield page

    @contextlib.asynccontextmanager
    async def _open_workers(self, batch: Batch) -> AsyncIterator[Workers]:
        plan, config, pool = self._plan, self._config, batch.pool
        # What has succeeded once is not stopped for its failures.
        stop_after = 0 if batch.counts.completed else config.retry.stop_after_failures
        if plan.workers > 1:
            yield RunWorkers(config, pool, plan.target(), plan.workers, stop_after=stop_after)
            return
        from penstock.dispatch.python import PythonProcessor

        async with PythonProcessor(plan.function, config.dispatch, config.retry, values=True) as processor:
            yield InProcessWorker(config, self._database, pool, processor.dispatcher(), stop_after=stop_after)

    async def _read(self, batch_id: UUID) -> Batch:
        async with borrowed(self._database) as connection:
            return await read_status(connection, batch_id)

    def _read_pages(self, batch: Batch, workers: Workers | None) -> AsyncIterator[list[Result]]:
        return self._in_order(batch, workers) if self._plan.ordered else self._as_they_come(batch, workers)

    async def _goes_on(self, batch: Batch, workers: Workers | None) -> bool:
        """Wait a moment. False if no more results will come."""
        if workers is None:
            return False
        await workers.wait(_LOOK_EVERY_S)
        async with borrowed(self._database) as connection:
            now = await read_status(connection, batch.id)
            halted = [gate for gate in await gates.list_closed(connection, batch.pool) if gate.halted_at is not None]
        state = now.state
        if halted and not state.terminal and now.counts.in_flight == 0:
            raise PenstockError(
                f"the map '{self._plan.name}' was paused: {halted[0].message}",
                hint="Mend the cause, then iterate it again: the same name goes on, with the rows that failed, too.",
            )
        if state is BatchState.PAUSED:
            raise PenstockError(
                f"the map '{self._plan.name}' was paused", hint="Iterate it again, or `penstock resume`, to go on."
            )
        if workers.stopped and not state.terminal:
            raise PenstockError(f"the workers of the map '{self._plan.name}' ended", hint="The log says why.")
        return not state.terminal

    async def _in_order(self, batch: Batch, workers: Workers | None) -> AsyncIterator[list[Result]]:
        async with borrowed(self._database) as connection:
            (lane,) = await read_lane_ids(connection, batch.id)
        at, total, rows, more = 0, batch.counts.total, _PAGE_ROWS, True
        while at < total:
            async with borrowed(self._database) as connection:
                found = await read_results(connection, [(lane, n) for n in range(at, min(at + rows, total))])
            # A row that runs again has its old failure until the new result replaces it.
            page = [make_result(row) for row in _until_missing(found, completed_only=more and batch.reruns > 0)]
            if page:
                at, rows = at + len(page), _PAGE_ROWS
                yield page
            elif more:
                more = await self._goes_on(batch, workers)
                rows = 1 if more else _PAGE_ROWS  # answers behind the one that is waited for are not read in vain
            else:
                yield [Result(at, "cancelled", "cancelled", "it was never run")]
                at += 1

    async def _as_they_come(self, batch: Batch, workers: Workers | None) -> AsyncIterator[list[Result]]:
        offsets, more = {"output": 0, "errors": 0}, True
        while True:
            page: list[Result] = []
            for which, offset in list(offsets.items()):
                if which == "errors" and more and batch.reruns:
                    continue  # see _in_order
                found = await read_journal_results(self._database, batch.id, which, offset, _PAGE_BYTES)  # type: ignore[arg-type]
                offsets[which] = found.after
                page += [make_result(row) for row in found.rows]
            if page:
                yield page
            elif more:
                more = await self._goes_on(batch, workers)
            else:
                return


def _until_missing(found: list[OutcomeRow | None], *, completed_only: bool) -> Iterator[OutcomeRow]:
    for row in found:
        if row is None or (completed_only and row.state != "completed"):
            return
        yield row
