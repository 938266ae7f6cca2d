"""Search for an input by its custom id.

Custom ids have no index: it would cost every intake more than the searches are worth. Most ids end with a number that
tells about where the line is, so that is looked at first; else lines are looked through, a stretch at a time.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, fetch_one
from penstock.export.merged import find_lanes

_SQL = sql.load("penstock.export", "grid.sql")

_STRETCH_LINES: Final = 2_000
_STRETCHES: Final = 100
_NEAR_LINES: Final = 100
_LAST_LINE: Final = 2**31 - 1
_NUMBER: Final = re.compile(r"(\d{1,9})\D*$")


class Search(NamedTuple):
    """What a search has come to."""

    line: int | None
    """The line that has the custom id, if it was found."""
    next: int | None
    """The line to go on from; None if it was found, or there are no more."""


async def find_custom_id(connection: Connection, batch_id: UUID, custom_id: str, from_line: int) -> Search:
    """Look for a custom id among the lines of a batch, from a line on."""
    if "\x00" in custom_id:
        return Search(None, None)
    number = _NUMBER.search(custom_id)
    if number is not None and from_line == 1:
        near = max(1, int(number[1]) - _NEAR_LINES)
        _, found = await _look(connection, batch_id, custom_id, near, near + 2 * _NEAR_LINES)
        if found is not None:
            return Search(found, None)
    for _ in range(_STRETCHES):
        stop = min(from_line + _STRETCH_LINES, _LAST_LINE)
        lanes_left, found = await _look(connection, batch_id, custom_id, from_line, stop)
        if found is not None or not lanes_left:
            return Search(found, None)
        from_line = stop
    return Search(None, from_line)


async def _look(
    connection: Connection, batch_id: UUID, custom_id: str, start: int, stop: int
) -> tuple[bool, int | None]:
    """Look at the lines from one to before another: whether there are lines from there on, and the line that was
    found."""
    found: int | None = None
    more = False
    for lane in await find_lanes(connection, batch_id, start - 1, stop - 1):
        more = more or lane.stop < lane.total
        if lane.start < lane.stop:
            where = {"source_id": lane.source_id, "source_lane": lane.source_lane, "custom_id": custom_id}
            row = await fetch_one(connection, _SQL["find_custom_id"], {**where, "start": lane.start, "stop": lane.stop})
            if row is not None and (found is None or row[1] < found):
                found = row[1]
    return more, found
