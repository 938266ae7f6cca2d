"""Workbooks in, rows out. A child process loads the sheet; its rows pass through here one at a time."""

from __future__ import annotations

import io
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO, cast

import msgspec

from penstock.config import TableLimits
from penstock.intake.explain import quoted
from penstock.intake.pace import keep_pace
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.cells import CONVERSIONS, Cell, is_blank
from penstock.intake.tables.columns import Columns, row_too_large
from penstock.intake.tables.table import PACED_ROWS, RowFault, TableRow, TableSpec, no_rows, too_many_rows
from penstock.intake.tables.xlsx_child import End, Head, Order, Refusal

_LOOK_EVERY_MS = 250
"""How often a reader that waits for its child looks whether it is still wanted."""

_decode_row = msgspec.json.Decoder(list[Cell]).decode
_decode_other = msgspec.json.Decoder(Head | Refusal | End).decode
_to_text = CONVERSIONS["text"]


class XlsxTable:
    """A sheet of a workbook that is being read. Its child process lives until it is closed."""

    def __init__(self, file: BinaryIO, name: str, spec: TableSpec, limits: TableLimits) -> None:
        self._name = name
        self._limits = limits
        order = Order(spec.sheet, limits.max_xlsx_memory_bytes)
        with _on_disk(file) as source:
            self._child = subprocess.Popen(  # noqa: S603 (our own program)
                [sys.executable, "-m", "penstock.intake.tables.xlsx_child", msgspec.json.encode(order).decode()],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt at the terminal is for the parent, which closes the child
            )
        self._out = cast(IO[bytes], self._child.stdout)
        self._sheet = ""
        self.sheets: list[str] = []
        """Names of all sheets of the workbook."""
        self._row = 0
        """Row that was read last, as Excel numbers them."""
        try:
            self._columns = self._read_header(spec)
        except BaseException:
            self.close()
            raise

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns.names

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._out.close()

    def rows(self) -> Iterator[TableRow]:
        number = 0
        try:
            while (cells := self._next_record()) is not None:
                number += 1
                if number > self._limits.max_rows:
                    raise too_many_rows(self._name, self._limits.max_rows)
                bodies, summaries, fault = self._columns.build([cells])
                if fault is not None:
                    raise fault
                yield TableRow(bodies[0], summaries[0], str(number))
        except RowFault as fault:
            raise self._placed(fault) from None
        if not number:
            raise self._no_rows()

    def _read_header(self, spec: TableSpec) -> Columns:
        self._await_child()
        head = self._read_other(self._out.readline(self._limits.max_row_bytes))
        if isinstance(head, Head):
            self._sheet, self._row = head.sheet, head.first_row - 1
            self.sheets = head.sheets
        try:
            cells = self._next_record()
            if cells is None:
                raise self._no_rows()
            return Columns(self._name, [str(_to_text(cell) or "") for cell in cells], spec, self._limits)
        except RowFault as fault:
            raise self._placed(fault) from None

    def _await_child(self) -> None:
        """Wait until the child has loaded the sheet, which takes most of its time, or until the upload is over."""
        waiting = select.poll()  # select() takes no descriptor from 1,024 on
        waiting.register(self._out, select.POLLIN)
        while not waiting.poll(_LOOK_EVERY_MS):
            keep_pace()

    def _next_record(self) -> list[Cell] | None:
        """The next row of the sheet that is not blank, or None after the last."""
        while True:
            line = self._out.readline(self._limits.max_row_bytes)
            if not line.startswith(b"["):
                self._read_other(line)
                return None
            self._row += 1
            if not self._row % PACED_ROWS:
                keep_pace()
            if not line.endswith(b"\n"):
                if len(line) < self._limits.max_row_bytes:
                    raise self._crashed()
                raise row_too_large(self._limits)
            cells = _decode_row(line)
            if not all(map(is_blank, cells)):
                return cells

    def _read_other(self, line: bytes) -> Head | End:
        if not line.endswith(b"\n"):
            raise self._crashed()
        found: Head | Refusal | End = _decode_other(line)
        if isinstance(found, Refusal):
            raise IntakeRefused(f"{self._name}: {found.reason}", hint=found.hint)
        return found

    def _crashed(self) -> IntakeRefused:
        status = self._child.wait()
        most = f"{self._limits.max_xlsx_memory_bytes:,} bytes of memory (max_xlsx_memory_bytes)"
        reason = f"needs more than {most} to be read" if status < 0 else f"its reader stopped with status {status}"
        return IntakeRefused(
            f"{self._name}: {reason}",
            code="file_too_large" if status < 0 else "corrupt_file",
            hint="Delete cells far away from the table, save the sheet as CSV, or raise max_xlsx_memory_bytes.",
        )

    def _placed(self, fault: RowFault) -> IntakeRefused:
        return fault.placed(self._name, f"sheet {quoted(self._sheet)}, row {self._row:,}", self._row)

    def _no_rows(self) -> IntakeRefused:
        hint = "Expected a header and a row for each item below it; if they are on another sheet, state the `sheet`."
        return no_rows(f"{self._name}: sheet {quoted(self._sheet)}", hint)


@contextmanager
def _on_disk(file: BinaryIO) -> Iterator[BinaryIO | IO[bytes]]:
    """The file itself if the system knows it, else a copy: the child opens it by its descriptor."""
    file.seek(0)
    if isinstance(getattr(file, "raw", file), io.FileIO):
        file.flush()
        yield file
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        yield copy
