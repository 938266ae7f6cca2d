"""Result files of an ended batch, in input order, as a stream of blocks.

A connection is borrowed for each block and nothing is held between blocks, however slowly they are read. So no
snapshot covers the whole: the last step checks that the batch has not changed since the first, and that every outcome
was read. If not, the stream breaks off instead of ending as if it were whole.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

from penstock.config import MIB
from penstock.db import sql
from penstock.db.pool import Connection, Lender, borrowed
from penstock.errors import PenstockError
from penstock.export.order import InputOrder, Key, Lane, read_results
from penstock.export.result_lines import (
    NOT_RUN,
    anthropic_line,
    anthropic_not_run_line,
    openai_error_line,
    openai_line,
)
from penstock.model import BatchState

Which = Literal["output", "errors"]
Dialect = Literal["openai", "anthropic"]

_SQL = sql.load("penstock.export", "export.sql")

_BLOCK_BYTES = MIB
_BLOCK_ROWS = 2_000


class ResultsChangedError(PenstockError):
    """The batch was deleted, or some of it run again, while its results were being read."""


class _Ending(NamedTuple):
    state: str
    ended_at: datetime | None
    completed: int | None
    others: int | None


async def output_blocks(
    database: Lender, batch_id: UUID, which: Which, state: BatchState, dialect: Dialect
) -> AsyncGenerator[bytes, None]:
    """Blocks of lines of an ended batch's output or error file.

    A message batch has one file: `which` does not matter for it.
    """
    async with borrowed(database) as connection:
        begun = await _read_ending(connection, batch_id)
        lanes = await (await connection.execute(_SQL["list_lanes_with_inputs"], {"batch": batch_id})).fetchall()
    if begun is None or begun.state != state:
        raise _results_changed(batch_id)
    kind = "all" if dialect == "anthropic" else which
    readable = all(row[4] for row in lanes)
    order = InputOrder(
        [Lane(*row[:4]) for row in lanes],
        kind,
        without_missing=state not in NOT_RUN or kind == "output" or not readable,
    )
    outcomes = 0
    while True:
        async with borrowed(database) as connection:
            keys = await order.take(connection, _BLOCK_ROWS, _BLOCK_BYTES)
            lines = await read_lines(connection, batch_id, state, dialect, keys)
        if not keys:
            break
        outcomes += sum(key.custom_id is None for key in keys)
        yield b"".join(line for _, line in lines)
    async with borrowed(database) as connection:
        now = await _read_ending(connection, batch_id)
    both = (begun.completed or 0) + (begun.others or 0)
    expected = {"output": begun.completed, "errors": begun.others}.get(kind, both)
    if now != begun or outcomes != expected:
        raise _results_changed(batch_id)


async def read_lines(
    connection: Connection, batch_id: UUID, state: BatchState, dialect: Dialect, keys: Sequence[Key]
) -> list[tuple[bool, bytes]]:
    """Result lines of some keys, and whether each is of a completed request. Raises if an outcome is gone."""
    run = [(key.lane_id, key.ordinal) for key in keys if key.custom_id is None]
    results = iter(await read_results(connection, run))
    lines: list[tuple[bool, bytes]] = []
    for key in keys:
        if key.custom_id is not None:
            if dialect == "openai":
                lines.append((False, openai_error_line(batch_id, key.line, key.custom_id, *NOT_RUN[state])))
            else:
                lines.append((False, anthropic_not_run_line(key.custom_id, state)))
            continue
        result = next(results)
        if result is None:
            raise _results_changed(batch_id)
        line = openai_line(batch_id, result) if dialect == "openai" else anthropic_line(result)
        lines.append((result.state == "completed", line))
    return lines


async def _read_ending(connection: Connection, batch_id: UUID) -> _Ending | None:
    row: tuple[Any, ...] | None = await (await connection.execute(_SQL["read_ended"], {"batch": batch_id})).fetchone()
    return _Ending._make(row) if row else None


def _results_changed(batch_id: UUID) -> ResultsChangedError:
    return ResultsChangedError(
        f"the results of batch {batch_id} changed while they were being read",
        hint="It was deleted, or some of it was run again. Read them again.",
    )
