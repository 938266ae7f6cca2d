"""The results of a running batch in the order in which they were decided, from any place on.

A line's number in that order never changes. Errors that were run again keep their numbers and are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection, Pool, borrowed
from penstock.export.order import LINE_OVERHEAD_BYTES, read_results
from penstock.export.read import Which
from penstock.results import openai_line

_SQL = sql.load("penstock.export", "export.sql")

_ENTRIES = 500
_ORDINALS = 2_000

_RANGE = re.compile(r"\[(\d+),(\d+)\)")


@dataclass(frozen=True, slots=True)
class Place:
    """Before which line a reader stands: `index` lines after the start of journal entry (xact, id)."""

    xact: int = 0
    id: int = 0
    index: int = 0
    offset: int = 0
    """The line's number: how many are before it."""


@dataclass(frozen=True, slots=True)
class Page:
    """Lines in the order of their being decided. None at all: there are no more for now."""

    lines: list[bytes]
    offsets: list[int]
    """For each line, the offset to go on from after it."""
    place: Place


class _Entry(NamedTuple):
    xact: str
    id: int
    lane_id: int
    ordinals: str
    lines: int
    written_at: datetime


class _Stretch(NamedTuple):
    """Some ordinals of one entry that are to be read; `offset` is the number of the first."""

    entry: _Entry
    start: int
    stop: int
    offset: int


async def place_at(database: Pool, batch_id: UUID, which: Which, offset: int) -> Place:
    """Where to read on for lines from number `offset` on. Its cost grows with the offset; a Place's does not."""
    if offset <= 0:
        return Place()
    async with borrowed(database) as connection:
        cursor = await connection.execute(
            _SQL["find_in_journal"], {"batch": batch_id, "completed": which == "output", "offset": offset}
        )
        row = await cursor.fetchone()
    if row is None:  # not decided yet: so many are passed over as they come
        return Place(index=offset, offset=offset)
    xact, entry_id, before = row
    return Place(int(xact), entry_id, offset - before, offset)


async def journal_page(database: Pool, batch_id: UUID, which: Which, place: Place, max_bytes: int) -> Page:
    """The next lines from a place on: at least one if there is one, and about as many as `max_bytes` hold."""
    while True:
        async with borrowed(database) as connection:
            entries = await _entries(connection, batch_id, which, place)
            stretches, after = _stretches(entries, place)
            keys = await _keys(connection, which, stretches)
            page, cut = _cut(keys, max_bytes)
            results = await read_results(connection, [(stretch.entry.lane_id, ordinal) for stretch, ordinal in page])
        if cut:
            stretch, ordinal = page[-1]
            after = _place_after(stretch, ordinal)
        lines: list[bytes] = []
        offsets: list[int] = []
        for (stretch, ordinal), result in zip(page, results, strict=True):
            if result is not None:
                lines.append(openai_line(batch_id, result))
                offsets.append(stretch.offset + ordinal - stretch.start + 1)
        if lines or after == place:
            return Page(lines, offsets, after)
        place = after


async def _entries(connection: Connection, batch_id: UUID, which: Which, place: Place) -> list[_Entry]:
    cursor = await connection.execute(
        _SQL["read_journal"],
        {
            "batch": batch_id,
            "completed": which == "output",
            "xact": str(place.xact),
            "id": place.id,
            "rows": _ENTRIES,
            "ordinals": _ORDINALS + place.index,
        },
    )
    return [_Entry._make(row) for row in await cursor.fetchall()]


def _stretches(entries: Sequence[_Entry], place: Place) -> tuple[list[_Stretch], Place]:
    """What to read of these entries, and the place after it."""
    stretches: list[_Stretch] = []
    offset = place.offset
    skip, left = place.index, _ORDINALS
    after = place
    for entry in entries:
        if skip >= entry.lines > 0 or entry.lines == 0:
            skip -= entry.lines
            after = Place(int(entry.xact), entry.id, entry.lines + skip, offset)
            continue
        done = skip
        for start, stop in _without_first(_ranges(entry.ordinals), skip):
            stop = min(stop, start + left)
            stretches.append(_Stretch(entry, start, stop, offset))
            offset += stop - start
            left -= stop - start
            done += stop - start
            if left == 0:
                break
        after = Place(int(entry.xact), entry.id, done, offset)
        skip = 0
        if left == 0:
            break
    return stretches, after


def _ranges(text: str) -> Iterator[tuple[int, int]]:
    for start, stop in _RANGE.findall(text):
        yield int(start), int(stop)


def _without_first(ranges: Iterator[tuple[int, int]], skip: int) -> Iterator[tuple[int, int]]:
    for start, stop in ranges:
        if stop - start <= skip:
            skip -= stop - start
        else:
            yield start + skip, stop
            skip = 0


async def _keys(connection: Connection, which: Which, stretches: Sequence[_Stretch]) -> list[tuple[_Stretch, int, int]]:
    """(stretch, ordinal, size) of what can be read."""
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
            "rows": _ORDINALS,
        },
    )
    return [(stretches[n - 1], ordinal, size) for n, ordinal, size in await cursor.fetchall()]


def _cut(keys: Sequence[tuple[_Stretch, int, int]], max_bytes: int) -> tuple[list[tuple[_Stretch, int]], bool]:
    """As many as fit, at least one; and whether some did not."""
    page: list[tuple[_Stretch, int]] = []
    size = 0
    for stretch, ordinal, response in keys:
        size += response + LINE_OVERHEAD_BYTES
        if page and size > max_bytes:
            return page, True
        page.append((stretch, ordinal))
    return page, False


def _place_after(stretch: _Stretch, ordinal: int) -> Place:
    """The place after one line."""
    entry = stretch.entry
    before = sum(min(stop, ordinal + 1) - start for start, stop in _ranges(entry.ordinals) if start <= ordinal)
    return Place(int(entry.xact), entry.id, before, stretch.offset + ordinal - stretch.start + 1)
