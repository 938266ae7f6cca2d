"""Results of a running batch in the order in which they were decided, from any number on.

Commits overtake each other: an entry of the journal may become visible behind one that a reader has passed, and would
be skipped. So a reader gives numbers to committed entries, behind all that have one, under a lock, and goes by these. A
line's number is counted from 0 and never changes. Results that were run again since keep theirs and are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection, Lender, borrowed, fetch_one
from penstock.export.order import LINE_OVERHEAD_BYTES, ranges_of, read_results
from penstock.export.read import Which
from penstock.export.result_lines import OutcomeRow, openai_line

_SQL = sql.load("penstock.export", "export.sql")

_ENTRIES = 500
_ORDINALS = 2_000


@dataclass(frozen=True, slots=True)
class Page:
    """Lines in the order in which they were decided. An empty page: there are no more for now."""

    lines: list[bytes]
    offsets: list[int]
    """For each line, the number of the one after it."""
    after: int
    """The number to read on from."""


@dataclass(frozen=True, slots=True)
class ResultsPage:
    """The same, as outcomes."""

    rows: list[OutcomeRow]
    offsets: list[int]
    after: int


class _JournalEntry(NamedTuple):
    lane_id: int
    ordinals: str
    before: int
    """The number of its first line."""
    written_at: datetime


class _Stretch(NamedTuple):
    """Ordinals of one journal entry that are to be read; `offset` is the number of the first."""

    entry: _JournalEntry
    start: int
    stop: int
    offset: int


async def number_lines(connection: Connection, batch_id: UUID, which: Which) -> int:
    """Give every recorded line its number. Returns how many lines have one."""
    batch = {"batch": batch_id}
    while True:
        unnumbered = await fetch_one(connection, _SQL["find_unnumbered"], batch)
        head = await fetch_one(connection, _SQL["read_journal_head"], batch)
        if head is None:
            await connection.execute(_SQL["begin_journal"], batch)
        elif unnumbered is not None:
            await _number(connection, batch)
        else:
            return int(head[0] if which == "output" else head[1])


async def _number(connection: Connection, batch: dict[str, Any]) -> None:
    async with connection.transaction():
        head = await fetch_one(connection, _SQL["hold_journal_head"], batch)
        if head is not None:
            outputs, errors = head
            before = {"outputs": outputs, "errors": errors, "limit": _ENTRIES}
            numbered = await fetch_one(connection, _SQL["number_journal"], {**batch, **before})
            if numbered is not None:
                outputs, errors = numbered
                await connection.execute(_SQL["move_journal_head"], {**batch, "outputs": outputs, "errors": errors})


async def read_journal_page(database: Lender, batch_id: UUID, which: Which, offset: int, max_bytes: int) -> Page:
    """Read the lines from a number on: at least one if there is one, and about as many as `max_bytes` hold."""
    page = await read_journal_results(database, batch_id, which, offset, max_bytes)
    return Page([openai_line(batch_id, row) for row in page.rows], page.offsets, page.after)


async def read_journal_results(
    database: Lender, batch_id: UUID, which: Which, offset: int, max_bytes: int
) -> ResultsPage:
    """Read the outcomes of these lines."""
    numbered = False
    while True:
        async with borrowed(database) as connection:
            entries = await _read_entries(connection, batch_id, which, offset)
            if not entries and not numbered:
                numbered = True
                if await number_lines(connection, batch_id, which) > offset:
                    entries = await _read_entries(connection, batch_id, which, offset)
            stretches, after = _choose_stretches(entries, offset)
            keys = await _read_keys(connection, which, stretches)
            page, cut = _fit_page(keys, max_bytes)
            results = await read_results(connection, [(stretch.entry.lane_id, ordinal) for stretch, ordinal in page])
        if cut:
            stretch, ordinal = page[-1]
            after = stretch.offset + ordinal - stretch.start + 1
        rows: list[OutcomeRow] = []
        offsets: list[int] = []
        for (stretch, ordinal), result in zip(page, results, strict=True):
            if result is not None:
                rows.append(result)
                offsets.append(stretch.offset + ordinal - stretch.start + 1)
        if rows or after == offset:
            return ResultsPage(rows, offsets, after)
        offset, numbered = after, False


async def _read_entries(connection: Connection, batch_id: UUID, which: Which, offset: int) -> list[_JournalEntry]:
    statement = _SQL["read_journal_outputs" if which == "output" else "read_journal_errors"]
    parameters = {"batch": batch_id, "offset": offset, "rows": _ENTRIES, "lines": _ORDINALS}
    cursor = await connection.execute(statement, parameters)
    return [_JournalEntry._make(row) for row in await cursor.fetchall()]


def _choose_stretches(entries: Sequence[_JournalEntry], offset: int) -> tuple[list[_Stretch], int]:
    """Stretches of these entries to read, from the line with this number on, and the number after the last of them."""
    stretches: list[_Stretch] = []
    left = _ORDINALS
    for entry in entries:
        for start, stop in _without_first(iter(ranges_of(entry.ordinals)), offset - entry.before):
            stop = min(stop, start + left)
            stretches.append(_Stretch(entry, start, stop, offset))
            offset += stop - start
            left -= stop - start
            if left == 0:
                return stretches, offset
    return stretches, offset


def _without_first(ranges: Iterator[tuple[int, int]], skip: int) -> Iterator[tuple[int, int]]:
    for start, stop in ranges:
        if stop - start <= skip:
            skip -= stop - start
        else:
            yield start + skip, stop
            skip = 0


async def _read_keys(
    connection: Connection, which: Which, stretches: Sequence[_Stretch]
) -> list[tuple[_Stretch, int, int]]:
    """(stretch, ordinal, size) of the outcomes that can be read."""
    if not stretches:
        return []
    cursor = await connection.execute(
        _SQL["read_keys_written"],
        {
            "lanes": Int8Array([stretch.entry.lane_id for stretch in stretches]),
            "starts": Int4Array([stretch.start for stretch in stretches]),
            "stops": Int4Array([stretch.stop for stretch in stretches]),
            "times": [stretch.entry.written_at for stretch in stretches],
            "completed": which == "output",
        },
    )
    return [(stretches[n - 1], ordinal, size) for n, ordinal, size in await cursor.fetchall()]


def _fit_page(keys: Sequence[tuple[_Stretch, int, int]], max_bytes: int) -> tuple[list[tuple[_Stretch, int]], bool]:
    """Keys that fit, at least one; and whether some did not."""
    page: list[tuple[_Stretch, int]] = []
    size = 0
    for stretch, ordinal, response in keys:
        size += response + LINE_OVERHEAD_BYTES
        if page and size > max_bytes:
            return page, True
        page.append((stretch, ordinal))
    return page, False
