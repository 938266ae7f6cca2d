"""Packed rows are cut between rows, wherever a batch ends."""

from __future__ import annotations

from itertools import accumulate

from penstock.intake.rows import find_cut, pack_rows, pack_table_rows, table_lane
from penstock.intake.tables.table import TableRow

LANE = table_lane(7)
TABLE_ROWS = [TableRow(b"x" * (line % 5), "summary", "id" * line, None) for line in range(1, 30)]
WITH_SUMMARY = [pack_table_rows(LANE, place, [row]) for place, row in enumerate(TABLE_ROWS)]


def without_summary() -> list[bytes]:
    pieces: list[bytes] = []
    pack_rows(pieces, range(30, 33), [b"a", b"bcd", b"e"], [b"{}", b"", b"{}" * 300], [LANE] * 3)
    return [start + body for start, body in zip(pieces[::2], pieces[1::2], strict=True)]


ROWS = WITH_SUMMARY + without_summary()
ENDS = list(accumulate(map(len, ROWS)))
PACKED = b"".join(ROWS)


def test_a_cut_is_behind_so_many_rows() -> None:
    for count in range(1, len(ROWS) + 1):
        assert find_cut(PACKED, count, len(PACKED)) == (ENDS[count - 1], count)
    assert find_cut(PACKED, len(ROWS) + 1, 2 * len(PACKED)) == (len(PACKED), len(ROWS))


def test_a_cut_is_behind_the_row_that_reaches_the_bytes() -> None:
    for size in range(1, len(PACKED) + 1):
        cut, count = find_cut(PACKED, len(ROWS), size)
        assert cut == ENDS[count - 1] >= size
        assert count == 1 or ENDS[count - 2] < size
