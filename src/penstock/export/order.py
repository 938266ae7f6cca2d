"""Outcomes of a batch's lanes put back into input order, a page at a time.

Keys are merged, not results: however many lanes a batch has and however large its answers are, a few numbers per lane
are held. The answers themselves are read when a page of them is known.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection
from penstock.export.result_lines import OutcomeRow

_SQL = sql.load("penstock.export", "export.sql")

_RANGE = re.compile(r"\[(\d+),(\d+)\)")

_KEYS_AHEAD = 2_000
_LEAST_AHEAD = 16
LINE_OVERHEAD_BYTES = 250
"""Bytes of a line beside its answer, roughly: pages of tiny answers must end too."""


class Key(NamedTuple):
    """Key of one result line. `custom_id` is given for lines without an outcome, and for those alone."""

    line: int
    lane_id: int
    ordinal: int
    size: int
    custom_id: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    id: int
    source_id: int
    source_lane: int
    total: int


@dataclass(slots=True)
class _Stream:
    """Keys of one lane: of its outcomes, or of the inputs that are `missing` an outcome."""

    lane: Lane
    missing: bool
    next: int = 0
    done: bool = False
    keys: deque[Key] = field(default_factory=deque)


class InputOrder:
    """Keys of a batch in input order. `which`: completed outcomes, others, or all of them."""

    def __init__(self, lanes: Sequence[Lane], which: str, *, without_missing: bool) -> None:
        self._which = which
        self._streams = [_Stream(lane, missing=False) for lane in lanes]
        if not without_missing:
            self._streams += [_Stream(lane, missing=True) for lane in lanes]
        self._ahead = max(_LEAST_AHEAD, _KEYS_AHEAD // max(1, len(self._streams)))
        self._heads: list[tuple[int, int]] = []
        """(line, stream) of the first key of every stream that has one."""
        self._starved = set(range(len(self._streams)))
        """Streams that may have more, but no key in memory: nothing can be taken before they have one."""

    async def take(self, connection: Connection, max_rows: int, max_bytes: int) -> list[Key]:
        """Take the next keys, at least one if there is one."""
        page: list[Key] = []
        size = 0
        while len(page) < max_rows and size < max_bytes:
            while self._starved:
                await self._refill(connection)
            if not self._heads:
                break
            _, number = heapq.heappop(self._heads)
            stream = self._streams[number]
            key = stream.keys.popleft()
            if stream.keys:
                heapq.heappush(self._heads, (stream.keys[0].line, number))
            elif not stream.done:
                self._starved.add(number)
            page.append(key)
            size += key.size + LINE_OVERHEAD_BYTES
        return page

    async def _refill(self, connection: Connection) -> None:
        """Read on in every stream that is short of keys: interleaved lanes run short together."""
        short = [s for s in self._streams if not s.done and len(s.keys) <= self._ahead // 2]
        await self._refill_outcomes(connection, [stream for stream in short if not stream.missing])
        await self._refill_missing(connection, [stream for stream in short if stream.missing])
        for number in list(self._starved):
            stream = self._streams[number]
            if stream.keys:
                heapq.heappush(self._heads, (stream.keys[0].line, number))
            if stream.keys or stream.done:
                self._starved.remove(number)

    async def _refill_outcomes(self, connection: Connection, streams: Sequence[_Stream]) -> None:
        if not streams:
            return
        if self._which == "errors":
            for stream in streams:
                await self._refill_not_completed(connection, stream)
            return
        cursor = await connection.execute(
            _SQL["read_keys"],
            {
                "lanes": Int8Array([stream.lane.id for stream in streams]),
                "starts": Int4Array([stream.next for stream in streams]),
                "rows": self._ahead,
            },
        )
        for n, ordinal, line, completed, size in await cursor.fetchall():
            if completed or self._which != "output":
                stream = streams[n - 1]
                stream.keys.append(Key(line, stream.lane.id, ordinal, size, None))
        for stream in streams:
            stream.next += self._ahead
            stream.done = stream.next >= stream.lane.total

    async def _refill_not_completed(self, connection: Connection, stream: _Stream) -> None:
        where = {"lane": stream.lane.id, "start": stream.next, "rows": self._ahead}
        keys = await (await connection.execute(_SQL["read_keys_not_completed"], where)).fetchall()
        for ordinal, line, size in keys:
            stream.keys.append(Key(line, stream.lane.id, ordinal, size, None))
            stream.next = ordinal + 1
        stream.done = len(keys) < self._ahead

    async def _refill_missing(self, connection: Connection, streams: Sequence[_Stream]) -> None:
        if not streams:
            return
        cursor = await connection.execute(
            _SQL["list_decided"],
            {
                "lanes": Int8Array([stream.lane.id for stream in streams]),
                "starts": Int4Array([stream.next for stream in streams]),
                "rows": self._ahead,
            },
        )
        decided: dict[int, str] = dict(await cursor.fetchall())
        missing: list[tuple[_Stream, int]] = []
        for n, stream in enumerate(streams, 1):
            stop = min(stream.next + self._ahead, stream.lane.total)
            missing += [(stream, ordinal) for ordinal in outside(decided.get(n, ""), stream.next, stop)]
            stream.next = stop
            stream.done = stop == stream.lane.total
        places = [(stream.lane.source_id, stream.lane.source_lane, ordinal) for stream, ordinal in missing]
        for (stream, ordinal), found in zip(missing, await read_inputs(connection, places), strict=True):
            if found is not None:
                line, custom_id = found
                stream.keys.append(Key(line, stream.lane.id, ordinal, 0, custom_id))


async def read_lane_ids(connection: Connection, batch_id: UUID) -> list[int]:
    """The lanes of a batch, in the order in which they were made."""
    rows = await (await connection.execute(_SQL["list_lanes"], {"batch": batch_id})).fetchall()
    return [row[0] for row in rows]


def ranges_of(text: str) -> list[tuple[int, int]]:
    """The ordinal ranges of an int4multirange, ascending."""
    return [(int(start), int(stop)) for start, stop in _RANGE.findall(text)]


def outside(text: str, start: int, stop: int) -> list[int]:
    """The ordinals from `start` up to `stop` that a multirange does not hold."""
    ordinals: list[int] = []
    for begin, end in [*ranges_of(text), (stop, stop)]:
        ordinals.extend(range(start, begin))
        start = max(start, end)
    return ordinals


async def read_inputs(connection: Connection, places: Sequence[tuple[int, int, int]]) -> list[tuple[int, str] | None]:
    """(line, custom id) of the inputs at some (source, source lane, ordinal), in that order; None for a missing one."""
    inputs: list[tuple[int, str] | None] = [None] * len(places)
    if places:
        cursor = await connection.execute(_SQL["read_inputs_at"], input_columns(places))
        for n, line, custom_id in await cursor.fetchall():
            inputs[n - 1] = line, custom_id
    return inputs


def input_columns(places: Sequence[tuple[int, int, int]]) -> dict[str, object]:
    return {
        "sources": Int8Array([source_id for source_id, _, _ in places]),
        "source_lanes": Int4Array([source_lane for _, source_lane, _ in places]),
        "ordinals": Int4Array([ordinal for _, _, ordinal in places]),
    }


def outcome_columns(places: Sequence[tuple[int, int]]) -> dict[str, object]:
    return {
        "lanes": Int8Array([lane_id for lane_id, _ in places]),
        "ordinals": Int4Array([ordinal for _, ordinal in places]),
    }


async def read_results(connection: Connection, places: Sequence[tuple[int, int]]) -> list[OutcomeRow | None]:
    """The outcomes at some (lane, ordinal), in that order; None for one that is gone. Ordinals that follow each other
    in their lane are read in one go."""
    stretches: list[tuple[int, int, int]] = []
    last: dict[int, int] = {}
    for lane_id, ordinal in places:
        number = last.get(lane_id)
        if number is not None and stretches[number][2] == ordinal:
            stretches[number] = lane_id, stretches[number][1], ordinal + 1
        else:
            last[lane_id] = len(stretches)
            stretches.append((lane_id, ordinal, ordinal + 1))
    if not stretches:
        return []
    lanes, starts, stops = zip(*stretches, strict=True)
    columns = {"lanes": Int8Array(lanes), "starts": Int4Array(starts), "stops": Int4Array(stops)}
    cursor = await connection.execute(_SQL["read_outcomes_in"], columns, binary=True)
    found = {(row[0], row[1]): OutcomeRow._make(row[2:]) for row in await cursor.fetchall()}
    return [found.get(place) for place in places]
