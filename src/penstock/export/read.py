"""The result files of an ended batch, in input order, as a stream of blocks.

A connection is borrowed for each block and nothing is held between blocks, however slowly they are read. So no
snapshot covers the whole: in the end it is checked that the batch is still the one that was begun, and that all of it
was there. If not, the stream breaks off instead of ending as if it were whole.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple
from uuid import UUID

from penstock.config import MIB
from penstock.db import sql
from penstock.db.pool import Connection, Pool, borrowed
from penstock.errors import PenstockError
from penstock.export.order import InputOrder, Key, Lane, read_results
from penstock.model import BatchState
from penstock.results import NOT_RUN, Result, anthropic_line, anthropic_not_run_line, openai_error_line, openai_line

Which = Literal["output", "errors"]
Dialect = Literal["openai", "anthropic"]

_SQL = sql.load("penstock.export", "export.sql")

_BLOCK_BYTES = MIB
_BLOCK_ROWS = 2_000


class ResultsChangedError(PenstockError):
    """The batch was deleted, or some of it run again, while its results were being read."""


class _Ended(NamedTuple):
    state: str
    ended_at: datetime | None
    completed: int | None
    others: int | None


async def output_blocks(
    database: Pool, batch_id: UUID, which: Which, state: BatchState, dialect: Dialect
) -> AsyncGenerator[bytes, None]:
    """The lines of an ended batch's output or error file, some at a time.

    A message batch has one file: there, `which` does not matter.
    """
    async with borrowed(database) as connection:
        begun = await _ended(connection, batch_id)
        lanes = await (await connection.execute(_SQL["list_lanes_with_inputs"], {"batch": batch_id})).fetchall()
    if begun is None or begun.state != state:
        raise _changed(batch_id)
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
            run = [key for key in keys if key.custom_id is None]
            results = await read_results(connection, [(key.lane_id, key.ordinal) for key in run])
        if not keys:
            break
        if None in results:
            raise _changed(batch_id)
        outcomes += len(run)
        yield b"".join(_lines(batch_id, state, dialect, keys, results))
    async with borrowed(database) as connection:
        now = await _ended(connection, batch_id)
    expected = {"output": begun.completed, "errors": begun.others}.get(kind, _sum(begun))
    if now != begun or outcomes != expected:
        raise _changed(batch_id)


def _lines(
    batch_id: UUID, state: BatchState, dialect: Dialect, keys: Sequence[Key], results: Sequence[Result | None]
) -> list[bytes]:
    lines: list[bytes] = []
    found = iter(results)
    for key in keys:
        result = next(found) if key.custom_id is None else None
        if result is not None:
            lines.append(openai_line(batch_id, result) if dialect == "openai" else anthropic_line(result))
        elif key.custom_id is not None and dialect == "openai":
            lines.append(openai_error_line(batch_id, key.line, key.custom_id, *NOT_RUN[state]))
        elif key.custom_id is not None:
            lines.append(anthropic_not_run_line(key.custom_id, state))
    return lines


async def _ended(connection: Connection, batch_id: UUID) -> _Ended | None:
    row: tuple[Any, ...] | None = await (await connection.execute(_SQL["read_ended"], {"batch": batch_id})).fetchone()
    return _Ended._make(row) if row else None


def _sum(ended: _Ended) -> int:
    return (ended.completed or 0) + (ended.others or 0)


def _changed(batch_id: UUID) -> ResultsChangedError:
    return ResultsChangedError(
        f"the results of batch {batch_id} changed while they were being read",
        hint="It was deleted, or some of it was run again. Read them again.",
    )
