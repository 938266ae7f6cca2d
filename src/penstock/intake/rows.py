"""Rows of templates, packed as a binary COPY reads them, and the lanes they belong to.

What a reader hands to the writer: every reader packs its rows here, whatever it reads them from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from struct import Struct
from typing import TYPE_CHECKING

from penstock.config import IntakeLimits
from penstock.intake import explain
from penstock.intake.explain import Fault

if TYPE_CHECKING:
    from penstock.intake.tables.table import TableRow

PIECES_PER_ROW = 2

# A count of fields, then each as length and bytes. What is the same for all rows of a lane comes first: source_id,
# source_lane, the length of ordinal.
_LANE_START = Struct("!hiqiii")
_FIELDS = 7
_NULL = -1

RowSink = Callable[[bytes, int], None]
"""Takes packed rows, and how many they are."""


@dataclass(frozen=True, slots=True)
class FileLane:
    """The file's requests for one (url, model): what a batch makes a lane from."""

    source_lane: int
    route: str
    endpoint: str
    total: int


@dataclass(slots=True)
class Lane:
    """A lane of a file that is being read."""

    row_start: bytes
    total: int = 0


def table_lane(source_id: int, source_lane: int = 0, filled: int = 0) -> Lane:
    """The lane of a table's rows, with so many of them in it."""
    return Lane(_LANE_START.pack(_FIELDS, 8, source_id, 4, source_lane, 4), filled)


class FileLanes(dict[tuple[str, str], Lane]):
    """The lanes of one file by (url, model), in the order in which they were met."""

    def __init__(self, source_id: int, limits: IntakeLimits) -> None:
        super().__init__()
        self._source_id = source_id
        self._limits = limits

    def open(self, url: str, model: str) -> Lane | Fault:
        """The lane of a request, begun if it is the first of its kind; or why there can be none."""
        lane = self.get((url, model))
        if lane is not None:
            return lane
        if fault := explain.url_fault(url) or explain.model_fault(model):
            return fault
        if len(self) == self._limits.max_routes_per_file:
            return explain.too_many_routes(url, model, self._limits)
        lane = self[url, model] = Lane(_LANE_START.pack(_FIELDS, 8, self._source_id, 4, len(self), 4))
        return lane

    def listed(self) -> list[FileLane]:
        return [FileLane(at, route, endpoint, lane.total) for at, ((endpoint, route), lane) in enumerate(self.items())]


class _RowStarts(dict[int, Callable[..., bytes]]):
    """Packs the beginning of a row, for each length of custom_id: ordinal, line, custom_id, no summary, the length of
    the body."""

    def __missing__(self, length: int) -> Callable[..., bytes]:
        pack = self[length] = Struct(f"!{_LANE_START.size}siiii{length}sii").pack
        return pack


_row_starts = _RowStarts()
_TABLE_ROW_START = Struct(f"!{_LANE_START.size}siiii")
"""Up to custom_id: the lane's start, ordinal, line, the length of custom_id."""

_LINE = Struct("!ii")
_LENGTH = Struct("!i")


def pack_table_rows(lane: Lane, lines_before: int, rows: Sequence[TableRow]) -> bytes:
    """Pack rows with summaries, at the end of their lane and after so many lines."""
    bodies = [row.body for row in rows]
    ids = [row.custom_id.encode() for row in rows]
    summaries = [row.summary.encode() for row in rows]
    count, length_of = len(rows), _LENGTH.pack
    ordinals = range(lane.total, lane.total + count)
    lines = range(lines_before + 1, lines_before + count + 1)
    starts = map(_TABLE_ROW_START.pack, repeat(lane.row_start), ordinals, repeat(4), lines, map(len, ids))
    lane.total += count
    fields = (starts, ids, map(length_of, map(len, summaries)), summaries, map(length_of, map(len, bodies)), bodies)
    return b"".join(chain.from_iterable(zip(*fields, strict=True)))


def pack_rows(
    rows: list[bytes], lines: Sequence[int], ids: list[bytes], bodies: list[bytes], lanes: list[Lane]
) -> None:
    """Add the rows of some lines, each at the end of its lane, as PIECES_PER_ROW pieces."""
    for line, custom_id, body, lane in zip(lines, ids, bodies, lanes, strict=True):
        length = len(custom_id)
        pack_start = _row_starts[length]
        rows += (pack_start(lane.row_start, lane.total, 4, line, length, custom_id, _NULL, len(body)), body)
        lane.total += 1


_BEFORE_CUSTOM_ID = _LANE_START.size + _LENGTH.size + _LINE.size


def find_cut(packed: bytes, max_rows: int, max_bytes: int) -> tuple[int, int]:
    """Where to cut packed rows, and how many are before: these rows, or those up to the one that reaches the bytes."""
    at = rows = 0
    while at < len(packed) and rows < max_rows and at < max_bytes:
        at += _BEFORE_CUSTOM_ID
        for _ in ("custom_id", "summary", "body"):
            (length,) = _LENGTH.unpack_from(packed, at)
            at += _LENGTH.size + max(length, 0)
        rows += 1
    return at, rows
