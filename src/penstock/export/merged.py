"""Merged rows (inputs with their outcomes) and the history of a batch's attempts, for people, page by page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from penstock.config import MIB
from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection
from penstock.export.order import input_columns, outcome_columns, ranges_of, read_inputs
from penstock.model import BatchState

_SQL = sql.load("penstock.export", "export.sql")

OUTCOME_STATES = ("completed", "failed", "not_found", "skipped")
GROUPED_STATES = ("failed", "not_found")
"""Of outcomes that are counted in groups of errors."""
STATUSES = ("pending", "processing", *OUTCOME_STATES, "cancelled", "expired")
"""Every status that a row can have."""

_PAGE_BYTES = 8 * MIB
_WINDOW_LINES = 2_000
_LAST_LINE = 2**31 - 1
_NO_OUTCOME: tuple[Any, ...] = (None, 0, *[None] * 7)
_NOT_RUN_STATUS = {BatchState.CANCELLING: "cancelled", BatchState.CANCELLED: "cancelled", BatchState.EXPIRED: "expired"}
"""Status of the lines that wait and will not be run any more, by the state of their batch."""


@dataclass(frozen=True, slots=True)
class MergedRow:
    """One input with its outcome, if it has one."""

    line: int
    custom_id: str
    status: str
    url: str
    route: str
    body: bytes
    live: Undecided | None
    """The lease or the deferral that it is in."""
    status_code: int | None
    request_id: str | None
    error_code: str | None
    error_message: str | None
    response: bytes | None
    attempts: int | None
    """Attempts it took; None while it is not decided."""
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One attempt that did not complete its input."""

    lane_id: int
    ordinal: int
    id: int
    line: int | None
    """Line of its input. None, like `custom_id`, when neither input nor outcome exist any more."""
    custom_id: str | None
    attempt: int
    worker_id: UUID
    ended_at: datetime
    duration_ms: int
    counted: bool
    status_code: int | None
    error_code: str
    error_message: str
    not_before: datetime | None

    @property
    def position(self) -> tuple[int, int, int]:
        """Position to pass as `after` for the page that follows."""
        return (self.lane_id, self.ordinal, self.id)


class _Lane(NamedTuple):
    id: int
    source_id: int
    source_lane: int
    route: str
    endpoint: str
    next: int
    total: int
    start: int
    stop: int


class _Stretch(NamedTuple):
    lane: _Lane
    start: int
    stop: int


class Undecided(NamedTuple):
    """Ordinals of one lease (in flight) or one deferral (waiting to be run again)."""

    start: int
    stop: int
    generation: int
    worker_id: UUID | None
    """The worker that holds the lease."""
    attempts: int
    """Attempts that have begun."""
    since: datetime

    @property
    def leased(self) -> bool:
        return self.worker_id is not None


async def read_results_page(
    connection: Connection,
    batch_id: UUID,
    after_line: int = 0,
    limit: int = 100,
    statuses: Collection[str] | None = None,
    *,
    fingerprint: int | None = None,
    max_bytes: int = _PAGE_BYTES,
) -> list[MergedRow]:
    """Read the rows after a line, in input order: `limit` of them, or as many as `max_bytes` hold. Of all, or those
    with some statuses, or of those that failed in one way. An empty page: there are no more."""
    state = await _read_state(connection, batch_id)
    if state is None:
        return []
    if fingerprint is not None:
        statuses = GROUPED_STATES
    view = _View(set(STATUSES if statuses is None else statuses), _NOT_RUN_STATUS.get(state, "pending"), fingerprint)
    rows: list[MergedRow] = []
    line: int | None = after_line
    while line is not None and len(rows) < limit and max_bytes > 0:
        stretches, last_line, cut = await _next_stretches(connection, batch_id, view, line, limit)
        # Before the outcomes: an item that is settled in between is found settled.
        view.undecided = await _read_undecided(connection, batch_id, stretches)
        found, resume = await _read_rows(connection, stretches, cut, view, limit - len(rows), max_bytes)
        rows += found
        max_bytes -= sum(len(row.body) + len(row.response or b"") for row in found)
        line = last_line if resume is None else resume
    return rows


@dataclass(slots=True)
class _View:
    """Statuses the caller asked for, and the leases and deferrals that give undecided lines their status."""

    wanted: set[str]
    waiting: str
    """Status of lines that wait."""
    fingerprint: int | None = None
    """The failures alone of one group of errors."""
    undecided: dict[int, list[Undecided]] = field(default_factory=dict)
    """By lane, within the stretches that are read."""

    def status(self, lane_id: int, ordinal: int, state: str | None, generation: int) -> tuple[str, Undecided | None]:
        """Status of an input with an outcome of this state and generation, or without one; and the lease or deferral it
        has it from. While an input is run again its outcome does not count, unless the batch will not run it any more:
        then the outcome it has stays."""
        for some in self.undecided.get(lane_id, ()):
            if some.start <= ordinal < some.stop and (state is None or some.generation > generation):
                if some.leased:
                    return "processing", some
                if state is None or self.waiting == "pending":
                    return self.waiting, some
        return state or self.waiting, None


async def _next_stretches(
    connection: Connection, batch_id: UUID, view: _View, after_line: int, limit: int
) -> tuple[list[_Stretch], int | None, set[int]]:
    """Stretches to read next; the last line they cover, None if they cover every wanted line except the rest of lanes
    that were cut; and the lanes that were cut."""
    outcomes = view.wanted & set(OUTCOME_STATES)
    if outcomes and outcomes == view.wanted and "completed" not in outcomes:
        lanes = await find_lanes(connection, batch_id, after_line, _LAST_LINE)
        stretches, cut = await _find_not_completed(connection, lanes, view, limit)
        return stretches, None, cut
    if not outcomes:
        lanes = await find_lanes(connection, batch_id, after_line, _LAST_LINE)
        stretches, cut = await _find_waiting(connection, batch_id, lanes, view, limit)
        return stretches, None, cut
    width = limit if len(view.wanted) == len(STATUSES) else _WINDOW_LINES
    last_line = min(after_line + width, _LAST_LINE)
    lanes = await find_lanes(connection, batch_id, after_line, last_line)
    stretches = [_Stretch(lane, lane.start, lane.stop) for lane in lanes if lane.start < lane.stop]
    return stretches, last_line if any(lane.stop < lane.total for lane in lanes) else None, set()


async def _read_rows(
    connection: Connection, stretches: Sequence[_Stretch], cut: set[int], view: _View, limit: int, max_bytes: int
) -> tuple[list[MergedRow], int | None]:
    """Read the wanted rows. Also returns the line to go on from if some were left, for lack of room or because their
    lanes were cut."""
    if not stretches:
        return [], None
    chosen, resume = await _choose(connection, stretches, cut, view, limit, max_bytes)
    places = [(lane.source_id, lane.source_lane, ordinal) for _, lane, ordinal in chosen]
    cursor = await connection.execute(_SQL["read_bodies_at"], input_columns(places), binary=True)
    inputs = await cursor.fetchall()
    decided = outcome_columns([(lane.id, ordinal) for _, lane, ordinal in chosen])
    cursor = await connection.execute(_SQL["read_results_at"], decided, binary=True)
    outcomes = {n: outcome for n, *outcome in await cursor.fetchall()}
    rows: list[MergedRow] = []
    for n, line, custom_id, body in inputs:
        _, lane, ordinal = chosen[n - 1]
        state, generation, *outcome = outcomes.get(n) or _NO_OUTCOME
        status, live = view.status(lane.id, ordinal, state, generation)
        if status in view.wanted:
            rows.append(MergedRow(line, custom_id, status, lane.endpoint, lane.route, body, live, *outcome))
    return rows, resume


async def _choose(
    connection: Connection, stretches: Sequence[_Stretch], cut: set[int], view: _View, limit: int, max_bytes: int
) -> tuple[list[tuple[int, _Lane, int]], int | None]:
    """Choose a page: (line, lane, ordinal) of the first wanted inputs in line order, and the line after which there may
    be more."""
    columns = {
        "lanes": Int8Array([stretch.lane.id for stretch in stretches]),
        "sources": Int8Array([stretch.lane.source_id for stretch in stretches]),
        "source_lanes": Int4Array([stretch.lane.source_lane for stretch in stretches]),
        "starts": Int4Array([stretch.start for stretch in stretches]),
        "stops": Int4Array([stretch.stop for stretch in stretches]),
    }
    inputs = await (await connection.execute(_SQL["read_input_keys"], columns)).fetchall()
    outcomes = await (await connection.execute(_SQL["read_outcome_keys"], columns)).fetchall()
    decided = {(n, ordinal): outcome for n, ordinal, *outcome in outcomes}
    chosen: list[tuple[int, _Lane, int]] = []
    total = 0
    last_lines: dict[int, int] = {}
    for n, _, line, _ in inputs:
        lane_id = stretches[n - 1].lane.id
        last_lines[lane_id] = max(line, last_lines.get(lane_id, 0))
    # After the last line read of a lane that was cut, lines of other lanes would come too early.
    covered = min((line for lane_id, line in last_lines.items() if lane_id in cut), default=None)
    for n, ordinal, line, size in sorted(inputs, key=lambda row: row[2]):
        lane = stretches[n - 1].lane
        if covered is not None and line > covered:
            break
        state, generation, answer = decided.get((n, ordinal), (None, 0, 0))
        if view.status(lane.id, ordinal, state, generation)[0] in view.wanted:
            chosen.append((line, lane, ordinal))
            total += size + answer
            if len(chosen) == limit or total >= max_bytes:
                return chosen, line
    return chosen, covered


async def _read_state(connection: Connection, batch_id: UUID) -> BatchState | None:
    row = await (await connection.execute(_SQL["read_ended"], {"batch": batch_id})).fetchone()
    return BatchState(row[0]) if row else None


async def find_lanes(connection: Connection, batch_id: UUID, after_line: int, last_line: int) -> list[_Lane]:
    cursor = await connection.execute(
        _SQL["find_lanes_between"], {"batch": batch_id, "after_line": after_line, "last_line": last_line}
    )
    return [_Lane._make(row) for row in await cursor.fetchall()]


async def _read_undecided(
    connection: Connection, batch_id: UUID, stretches: Sequence[_Stretch], limit: int | None = None
) -> dict[int, list[Undecided]]:
    """Read the ordinals that are in flight or wait to be run again within some stretches, by lane; of each lease and
    each deferral all ranges, or the first `limit`."""
    where = {
        "batch": batch_id,
        "lanes": Int8Array([stretch.lane.id for stretch in stretches]),
        "starts": Int4Array([stretch.start for stretch in stretches]),
        "stops": Int4Array([stretch.stop for stretch in stretches]),
        "ranges": limit,
    }
    undecided: dict[int, list[Undecided]] = {}
    cursor = await connection.execute(_SQL["list_undecided"], where)
    for lane_id, *rest, text in await cursor.fetchall():
        undecided.setdefault(lane_id, []).extend(Undecided(start, stop, *rest) for start, stop in ranges_of(text))
    return undecided


async def _find_not_completed(
    connection: Connection, lanes: Sequence[_Lane], view: _View, limit: int
) -> tuple[list[_Stretch], set[int]]:
    """Find the next outcomes of each lane in the states wanted, none of them completed, or of one group of errors, by
    the indexes over such outcomes; and the lanes that may have more."""
    stretches: list[_Stretch] = []
    cut: set[int] = set()
    for lane in lanes:
        ordinals: list[int] = []
        if view.fingerprint is not None:
            group = {"lane": lane.id, "fingerprint": view.fingerprint, "start": lane.start, "rows": limit}
            cursor = await connection.execute(_SQL["read_keys_of_group"], group)
            ordinals = [ordinal for (ordinal,) in await cursor.fetchall()]
        for state in view.wanted if view.fingerprint is None else ():
            where = {"lane": lane.id, "state": state, "start": lane.start, "rows": limit}
            cursor = await connection.execute(_SQL["read_keys_of_state"], where)
            ordinals += [ordinal for (ordinal,) in await cursor.fetchall()]
        if len(ordinals) >= limit:
            cut.add(lane.id)
        stretches += [_Stretch(lane, ordinal, ordinal + 1) for ordinal in sorted(ordinals)[:limit]]
    return stretches, cut


async def _find_waiting(
    connection: Connection, batch_id: UUID, lanes: Sequence[_Lane], view: _View, limit: int
) -> tuple[list[_Stretch], set[int]]:
    """Find the next ordinals of each lane that are in flight or wait: in its leases, its deferrals and beyond its
    cursor; and the lanes that may have more."""
    whole = [_Stretch(lane, lane.start, lane.total) for lane in lanes if lane.start < lane.total]
    undecided = await _read_undecided(connection, batch_id, whole, limit)
    stretches: list[_Stretch] = []
    cut: set[int] = set()
    for lane in lanes:
        ranges = [
            (some.start, some.stop)
            for some in undecided.get(lane.id, ())
            if ("processing" if some.leased else view.waiting) in view.wanted
        ]
        if view.waiting in view.wanted:
            ranges.append((lane.next, lane.total))
        left, seen = limit, lane.start
        for start, stop in sorted(ranges):
            # Ordinals claimed since the cursor was read lie beyond it, too.
            begin = max(start, seen)
            end = min(stop, begin + left)
            if begin < end:
                stretches.append(_Stretch(lane, begin, end))
                left, seen = left - (end - begin), end
        if left == 0:
            cut.add(lane.id)
    return stretches, cut


class RequestBody(NamedTuple):
    line: int
    custom_id: str
    body: bytes


async def read_bodies(
    connection: Connection, places: Sequence[tuple[int, int, int]], max_bytes: int = _PAGE_BYTES
) -> list[RequestBody | None]:
    """Read the inputs at some (source, source lane, ordinal), in that order, None for one that was deleted: the first
    of them that `max_bytes` hold, at least one."""
    columns = {
        "sources": Int8Array([source_id for source_id, _, _ in places]),
        "source_lanes": Int4Array([source_lane for _, source_lane, _ in places]),
        "starts": Int4Array([ordinal for _, _, ordinal in places]),
        "stops": Int4Array([ordinal + 1 for _, _, ordinal in places]),
    }
    keys = await (await connection.execute(_SQL["read_input_keys"], columns)).fetchall()
    sizes = {n: size for n, _, _, size in keys}
    total = room = 0
    for n in range(1, len(places) + 1):
        total += sizes.get(n, 0)
        if total > max_bytes and room:
            break
        room = n
    found: list[RequestBody | None] = [None] * room
    cursor = await connection.execute(_SQL["read_bodies_at"], input_columns(places[:room]), binary=True)
    for n, *rest in await cursor.fetchall():
        found[n - 1] = RequestBody(*rest)
    return found


async def read_attempts_page(
    connection: Connection,
    batch_id: UUID,
    after: tuple[int, int, int] | None = None,
    limit: int = 100,
    line: int | None = None,
) -> list[AttemptRow]:
    """Read the failed attempts after a position, of a whole batch or of one line, lane by lane in the order of
    inputs."""
    after = after or (0, -1, 0)
    lanes = await _list_attempt_lanes(connection, batch_id, line)
    lanes = [lane for lane in lanes if lane.id >= after[0] and lane.start < lane.stop]
    found: list[tuple[_Lane, Any]] = []
    for lane in lanes:
        # Before a lane's first ordinal, or after the last attempt that was seen.
        start = (lane.start - 1, _LAST_LINE)
        if lane.id == after[0]:
            start = max(start, after[1:])
        where = {"lane": lane.id, "start": start[0], "id": start[1], "stop": lane.stop, "rows": limit - len(found)}
        cursor = await connection.execute(_SQL["read_attempts"], where)
        found += [(lane, row) for row in await cursor.fetchall()]
        if len(found) >= limit:
            break
    lines = await _read_lines(connection, list(dict.fromkeys((lane, row[0]) for lane, row in found)))
    return [
        AttemptRow(lane.id, ordinal, attempt_id, *lines[lane.id, ordinal], *rest)
        for lane, (ordinal, attempt_id, *rest) in found
    ]


async def _read_lines(
    connection: Connection, places: Sequence[tuple[_Lane, int]]
) -> dict[tuple[int, int], tuple[int | None, str | None]]:
    """(line, custom id) by lane and ordinal, from the outcome or else the input; (None, None) if both are gone."""
    lines: dict[tuple[int, int], tuple[int | None, str | None]] = {}
    cursor = await connection.execute(
        _SQL["read_lines_at"], outcome_columns([(lane.id, ordinal) for lane, ordinal in places])
    )
    for n, line, custom_id in await cursor.fetchall():
        lane, ordinal = places[n - 1]
        lines[lane.id, ordinal] = line, custom_id
    rest = [(lane, ordinal) for lane, ordinal in places if (lane.id, ordinal) not in lines]
    inputs = await read_inputs(connection, [(lane.source_id, lane.source_lane, ordinal) for lane, ordinal in rest])
    for (lane, ordinal), one in zip(rest, inputs, strict=True):
        lines[lane.id, ordinal] = one or (None, None)
    return lines


async def _list_attempt_lanes(connection: Connection, batch_id: UUID, line: int | None) -> list[_Lane]:
    """List the lanes of a batch with the ordinals to look at: all, or those of one line."""
    if line is not None:
        return await find_lanes(connection, batch_id, line - 1, line)
    cursor = await connection.execute(_SQL["list_lanes"], {"batch": batch_id})
    rows = await cursor.fetchall()
    return [_Lane(lane_id, source, number, "", "", 0, total, 0, total) for lane_id, source, number, total in rows]
