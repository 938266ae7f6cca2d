"""Result files of a batch: JSONL in the Batch API's shape, in input order, streamed from one snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psycopg

from penstock.db import arrays, sql
from penstock.export.draft import Draft, explain_write_errors
from penstock.export.order import InputOrder, Lane
from penstock.export.read import read_lines
from penstock.export.result_lines import NOT_RUN
from penstock.model import BatchState

_SQL = sql.load("penstock.export", "export.sql")

_PAGE_BYTES = 8 * 1024 * 1024
_PAGE_ROWS = 2_000


@dataclass(frozen=True, slots=True)
class Exported:
    """Result files that were written, and their lines."""

    output: Path
    output_lines: int
    errors: Path | None
    error_lines: int


def errors_path(output: Path) -> Path:
    """Path of the error file of `output`: `answers.jsonl` has `answers.errors.jsonl` beside it."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def export_files(
    conninfo: str,
    batch_id: UUID,
    state: BatchState,
    output: Path,
    *,
    earlier: Sequence[tuple[UUID, BatchState]] = (),
    on_progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write a batch's output and error files beside their final names, then rename: whole or not at all. The results of
    `earlier` batches come before its own."""
    errors = errors_path(output)
    with explain_write_errors(output), ExitStack() as stack:
        good = stack.enter_context(Draft(output))
        bad = stack.enter_context(Draft(errors))
        asyncio.run(_write_lines(conninfo, [*earlier, (batch_id, state)], good, bad, on_progress))
        bad.publish(if_empty="remove")
        good.publish(if_empty="keep")
    return Exported(output, good.lines, errors if bad.lines else None, bad.lines)


async def _write_lines(
    conninfo: str,
    batches: Sequence[tuple[UUID, BatchState]],
    good: Draft,
    bad: Draft,
    on_progress: Callable[[int], None],
) -> None:
    async with await psycopg.AsyncConnection.connect(conninfo) as connection:
        arrays.register(connection)
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await connection.set_read_only(True)
        count = 0
        for batch_id, state in batches:
            lanes = await (await connection.execute(_SQL["list_lanes"], {"batch": batch_id})).fetchall()
            order = InputOrder([Lane(*row) for row in lanes], "all", without_missing=state not in NOT_RUN)
            while keys := await order.take(connection, _PAGE_ROWS, _PAGE_BYTES):
                for completed, line in await read_lines(connection, batch_id, state, "openai", keys):
                    (good if completed else bad).write(line)
                count += len(keys)
                on_progress(count)
