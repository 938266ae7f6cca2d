"""Sheets for tests: values of every kind, with what formats trip over, and what a writer makes of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from penstock.export.sheets.values import Value
from penstock.export.sheets.writer import SheetWriter

FORMULAS = [
    "=1+1",
    "+1",
    "-5",
    "@SUM(A1)",
    "\t=1",
    "\rx",
    "\nx",
    "  =HYPERLINK(A1)",
    "\xa0-1",
    "\ufeff=1",
    "\0=1",
    "＝1+1",
    "＋1",
    "－1",
    "＠x",
    " ＝1",
    "-",
    "=",
]
"""Text that a spreadsheet would take for a formula, or drop the beginning of and then take for one."""

_PIECES = [
    *"=+-@＝'\"&<>,;_x \t\r\n\0\x1f\x85\ufeff\ufffe\uffff\u2028😀a1",
    "_x0041",
    "_x005F_",
    "x0041_",
    "]]>",
    "#N/A",
]

texts = st.text(st.characters(codec="utf-8"), max_size=20) | st.lists(st.sampled_from(_PIECES), max_size=8).map("".join)
nested: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
).filter(lambda value: isinstance(value, list | dict))
values: st.SearchStrategy[Value] = (
    texts
    | st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | nested
)


def write_sheet(writer: SheetWriter, rows: Sequence[Sequence[Value]], page_rows: int = 3) -> bytes:
    """The whole file, written in pages."""
    sent = [writer.begin()]
    sent += [writer.write(rows[at : at + page_rows]) for at in range(0, len(rows), page_rows)]
    return b"".join([*sent, writer.end()])
