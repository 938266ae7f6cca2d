"""A job's sheet, from one snapshot: its rows in input order, each with its result and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from uuid import UUID

import psycopg

from penstock.db import arrays
from penstock.db.pool import Connection
from penstock.errors import PenstockError
from penstock.export.draft import Draft, explain_write_errors
from penstock.export.grid import JobColumns, Stretch, find_grid, list_live, read_columns, read_stretch
from penstock.export.jsonl import Exported
from penstock.export.sheets.columns import SheetColumns
from penstock.export.sheets.writer import SheetWriter, sheet_writer
from penstock.tasks import cancel_and_wait

FORMATS = ("csv", "xlsx", "jsonl")

_PAGE_ROWS = 2_000


class NoJob(PenstockError):  # noqa: N818 - what it is
    """Batch that is no job, or no batch any more: there is no sheet of it."""


def sheet_format(filename: str) -> tuple[str, bool] | None:
    """Format that a file's name asks for, and whether it is to be gzipped; None if it names no format of sheets."""
    name, dot, ending = filename.lower().rpartition(".")
    gzip = ending == "gz"
    if gzip:
        name, dot, ending = name.rpartition(".")
    return (ending, gzip) if dot and ending in FORMATS else None


def sheet_stem(filename: str) -> str:
    """Name of a sheet without the endings that say its format."""
    return filename if sheet_format(filename) is None else filename.removesuffix(".gz").rpartition(".")[0]


def export_sheet(
    conninfo: str,
    batch_id: UUID,
    output: Path,
    *,
    earlier: Sequence[UUID] = (),
    bom: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write a job's sheet beside its final name, then rename: whole or not at all. The rows of `earlier` jobs come
    before its own. `bom` is for CSV."""
    found = sheet_format(output.name)
    if found is None:
        raise ValueError(output.name)
    with explain_write_errors(output), Draft(output) as draft:
        asyncio.run(_write_sheet(conninfo, [*earlier, batch_id], draft, *found, bom, on_progress))
        draft.publish(if_empty="keep")
    return Exported(output, draft.lines, None, 0)


async def _write_sheet(
    conninfo: str,
    jobs: Sequence[UUID],
    draft: Draft,
    file_format: str,
    gzip: bool,
    bom: bool,
    on_progress: Callable[[int], None],
) -> None:
    async with await psycopg.AsyncConnection.connect(conninfo) as connection:
        arrays.register(connection)
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await connection.set_read_only(True)
        *earlier, last = jobs
        async for block, rows in sheet_blocks(connection, last, file_format, gzip=gzip, bom=bom, earlier=earlier):
            draft.write(block, rows)
            on_progress(draft.lines)


async def sheet_blocks(
    connection: Connection,
    batch_id: UUID,
    file_format: str,
    *,
    gzip: bool,
    bom: bool = False,
    earlier: Sequence[UUID] = (),
) -> AsyncGenerator[tuple[bytes, int], None]:
    """Blocks of a job's sheet and how many rows each has, read in the connection's transaction: one snapshot. The rows
    of `earlier` jobs come first. Raises NoJob, and UsageError if it cannot be written as such a file, before the first
    block."""
    jobs = [await _read_job(connection, one) for one in (*earlier, batch_id)]
    inputs = dict.fromkeys(name for job in jobs for name in job.input)
    results = dict.fromkeys(name for job in jobs for name in job.result)
    columns = SheetColumns(list(inputs), list(results))
    writer = sheet_writer(file_format, columns.header, gzip=gzip, title=jobs[0].job_type, bom=bom)
    yield writer.begin(), 0
    for one in (*earlier, batch_id):
        async with aclosing(_pages(connection, one)) as pages:
            async for page in pages:
                yield await asyncio.to_thread(_write_page, writer, columns, page), len(page.bodies)
    yield writer.end(), 0


async def _read_job(connection: Connection, batch_id: UUID) -> JobColumns:
    job = await read_columns(connection, batch_id)
    if job is None:
        raise NoJob(f"{batch_id} is no job", hint="Only jobs over tables and images have sheets.")
    return job


async def _pages(connection: Connection, batch_id: UUID) -> AsyncGenerator[Stretch, None]:
    """Pages of a job's rows; each is read while the one before it is written."""
    grid = await find_grid(connection, batch_id)
    if grid is None:
        return
    live = await list_live(connection, batch_id)

    def read_from(start: int) -> asyncio.Task[Stretch | None]:
        return asyncio.create_task(read_stretch(connection, grid, live, start, _PAGE_ROWS))

    reading = read_from(0)
    try:
        while page := await reading:
            reading = read_from(page.stop)
            yield page
    finally:
        await cancel_and_wait([reading])


def _write_page(writer: SheetWriter, columns: SheetColumns, page: Stretch) -> bytes:
    return writer.write(columns.assemble(page.bodies, page.results, page.statuses, page.attempts, page.errors))
