"""Readers keep the pace that is set for their thread, wherever they compute for long, and stop where it says so."""

from __future__ import annotations

import io
from collections.abc import Callable

import openpyxl
import psutil
import pytest

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.pace import paced
from penstock.intake.tables import xlsx_table
from penstock.intake.tables.image_table import ImageTable
from penstock.intake.tables.table import TableRow, TableSpec, paced_rows
from penstock.intake.tables.xlsx_table import XlsxTable
from penstock.intake.unique import UniqueIds
from tests.support.images import png


def far_apart() -> io.BytesIO:
    """A workbook of a header and one row, with 5,000 blank ones between them."""
    book, out = openpyxl.Workbook(), io.BytesIO()
    for row in (1, 5_002):
        book.worksheets[0].cell(row, 1, "a")
    book.save(out)
    return out


def read_blank_rows() -> None:
    table = XlsxTable(far_apart(), "x.xlsx", TableSpec(), TableLimits())
    try:
        assert len(list(table.rows())) == 1
    finally:
        table.close()


def find_duplicates() -> None:
    unique = UniqueIds(run_ids=50)
    unique.add([b"%d" % number for number in range(1_000)])
    unique.add([b"%d" % number for number in range(1_000)])
    unique.duplicates(1)
    unique.close()


def read_images() -> None:
    images = [(f"{number}.png", lambda: png(1, 1)) for number in range(50)]
    assert len(list(ImageTable("images", images, TableLimits(), IntakeLimits()).rows())) == 50


def check_rows() -> None:
    assert len(list(paced_rows([TableRow(b"{}", "", "1")] * 5_000))) == 5_000


@pytest.mark.parametrize("read", [read_blank_rows, find_duplicates, read_images, check_rows])
def test_readers_keep_the_pace(read: Callable[[], None]) -> None:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    with paced(count):
        read()
    assert calls >= 50


def test_a_workbook_that_nobody_waits_for_any_more_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Exception):  # noqa: N818 - not an error
        pass

    before = set(psutil.Process().children())
    loading: set[psutil.Process] = set()

    def stop() -> None:
        loading.update(set(psutil.Process().children()) - before)
        raise Gone

    monkeypatch.setattr(xlsx_table, "_LOOK_EVERY_MS", 0)
    with paced(stop), pytest.raises(Gone):
        XlsxTable(far_apart(), "x.xlsx", TableSpec(), TableLimits())
    assert loading
    assert not any(process.is_running() for process in loading)
