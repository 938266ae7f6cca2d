"""CSV in, rows out. The csv module splits records; what it is given, and how much of it, is decided here."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import BinaryIO

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.cells import is_blank
from penstock.intake.tables.columns import Columns
from penstock.intake.tables.dialect import SAMPLE_BYTES, find_delimiter, find_encoding
from penstock.intake.tables.table import RowFault, TableRow, TableSpec, no_rows, too_many_rows
from penstock.intake.unpack import Unpacker, unpack

_UNCLOSED = "A quote that is opened and never closed takes in all that follows: look at the cell that begins there"


_BLOCK_ROWS = 100
"""Few: what the garbage collector meets again and again costs more than larger blocks save."""
_BLOCK_CHARS = 1024 * 1024


@dataclass(slots=True)
class _Block:
    """Records that follow each other, and what ends the table after them."""

    records: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    """Physical lines on which they begin, and that of the fault."""
    fault: RowFault | None = None
    """What is wrong with the record behind them."""
    refusal: IntakeRefused | None = None
    """Why the text behind them cannot be read."""


class _Endless(csv.Error):
    """A record takes more text than a row may have."""


class CsvTable:
    """Delimited text that is being read: plain, gzip or zstd."""

    def __init__(self, file: BinaryIO, name: str, spec: TableSpec, limits: TableLimits, intake: IntakeLimits) -> None:
        self._name = name
        self._limits = limits
        self._ended = False
        self._line = 0
        """Physical line that the last whole record, or blank line after it, ends on."""
        self._skipped = 0
        """Blank lines that the reader was not given."""
        self._chars = 0
        """Characters that the reader was given."""
        if csv.field_size_limit() < limits.max_cell_bytes:
            # One limit for the whole process: it is only ever raised, and what is held is bounded by `_blocks`.
            csv.field_size_limit(limits.max_cell_bytes)

        pieces = unpack(file, Unpacker(name, intake, foreign={}))
        sample = b""
        while len(sample) < SAMPLE_BYTES and (piece := next(pieces, None)) is not None:
            sample += piece
        self._encoding, self._start = find_encoding(sample[:SAMPLE_BYTES], spec.encoding, name)
        self._reader = csv.reader(
            chain.from_iterable(self._blocks(chain([sample[self._start :]], pieces))),
            delimiter=spec.delimiter or self._find_delimiter(sample, name),
            strict=True,
        )
        self._columns = self._read_header(spec)

    @property
    def columns(self) -> tuple[str, ...]:
        return self._columns.names

    def rows(self) -> Iterator[TableRow]:
        return chain.from_iterable(self._row_blocks())

    def _row_blocks(self) -> Iterator[Iterable[TableRow]]:
        count, most = 0, self._limits.max_rows
        for block in self._record_blocks():
            bodies, summaries, fault = self._columns.build(block.records)
            numbers = range(count + 1, min(count + len(bodies), most) + 1)
            yield map(TableRow, bodies, summaries, map(str, numbers))
            count += len(bodies)
            if count > most:
                raise too_many_rows(self._name, most)
            if (fault := fault or block.fault) is not None:
                line = block.lines[len(bodies)]
                raise fault.placed(self._name, _place(count + 1, line), line)
            if block.refusal is not None:
                raise block.refusal
        if not count:
            raise no_rows(self._name, "Expected a header and a row for each item below it.")

    def _record_blocks(self) -> Iterator[_Block]:
        """The records that are not blank, as many at a time as are made rows of together."""
        reader, width = self._reader, self._columns.width
        block, most_chars = _Block(), self._chars + _BLOCK_CHARS
        try:
            for cells in reader:
                line, self._line = self._line + 1, reader.line_num + self._skipped
                ragged = len(cells) != width
                if (ragged or not cells[0].strip()) and all(map(is_blank, cells)):
                    continue
                block.lines.append(line)
                if ragged:
                    block.fault = self._ragged(len(cells))
                    break
                block.records.append(cells)
                if len(block.records) == _BLOCK_ROWS or self._chars > most_chars:
                    yield block
                    block, most_chars = _Block(), self._chars + _BLOCK_CHARS
        except csv.Error as error:
            block.lines.append(self._line + 1)
            block.fault = self._unreadable(error)
        except IntakeRefused as refusal:
            block.refusal = refusal
        yield block

    def _find_delimiter(self, sample: bytes, name: str) -> str:
        if name.lower().removesuffix(".gz").removesuffix(".zst").endswith(".tsv"):
            return "\t"
        decoder = codecs.getincrementaldecoder(self._encoding)("replace")
        text = decoder.decode(sample[self._start : SAMPLE_BYTES])
        return find_delimiter(text, whole=len(sample) < SAMPLE_BYTES)

    def _read_header(self, spec: TableSpec) -> Columns:
        begins = 0
        try:
            for cells in self._reader:
                begins, self._line = self._line + 1, self._lines_read
                if not all(map(is_blank, cells)):
                    return Columns(self._name, cells, spec, self._limits)
        except csv.Error as error:
            begins = self._line + 1
            raise self._unreadable(error).placed(self._name, f"the header (line {begins:,})", begins) from None
        except RowFault as fault:
            raise fault.placed(self._name, f"the header (line {begins:,})", begins) from None
        raise no_rows(self._name, "The file is empty: expected a header and a row for each item below it.")

    def _ragged(self, count: int) -> RowFault:
        noun = "cell" if count == 1 else "cells"
        return RowFault(
            "",
            f"{count:,} {noun}; the header has {self._columns.width:,}",
            "Give every row as many cells as the header; put cells that hold a delimiter or a line break in quotes. "
            f"If {self._reader.dialect.delimiter!r} is not what separates cells, state the `delimiter`.",
        )

    def _blocks(self, pieces: Iterable[bytes]) -> Iterator[io.StringIO]:
        """The text in blocks of whole lines, which the reader takes one by one.

        What is held of a line that has not ended (here) or of a record whose quotes have not closed (by the csv module)
        is never more than a row may have and two pieces.
        """
        held: list[str] = []
        waiting_chars, line = 0, 0
        for text in self._decode(pieces):
            if self._line == self._lines_read and (rest := self._skip_blank(held, text)) is not None:
                held = [rest]
                continue
            if self._line > line:
                waiting_chars, line = 0, self._line
            elif waiting_chars > self._limits.max_row_bytes:
                raise _Endless
            waiting_chars += len(text)
            self._chars += len(text)
            end = _last_line_end(text)
            held.append(text[:end] if end else text)
            if end:
                yield io.StringIO("".join(held), newline="")
                held = [text[end:]]
        yield io.StringIO("".join(held), newline="")
        self._ended = True

    def _skip_blank(self, held: list[str], text: str) -> str | None:
        """Pass over lines without a cell that holds anything: millions of them are no work. What is left is the line
        that has not ended; None if there are other lines."""
        nothing = f" \t\r\n{self._reader.dialect.delimiter}"
        if text.strip(nothing) or (end := _last_line_end(text)) == 0 or any(each.strip(nothing) for each in held):
            return None
        blank = "".join(held) + text[:end]
        lines = blank.count("\n") + blank.count("\r") - blank.count("\r\n")
        self._skipped += lines
        self._line += lines
        self._chars += len(blank)
        return text[end:]

    @property
    def _lines_read(self) -> int:
        return self._reader.line_num + self._skipped

    def _decode(self, pieces: Iterable[bytes]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder(self._encoding)()
        position = self._start
        for piece, final in chain(((piece, False) for piece in pieces), [(b"", True)]):
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(piece, final)
            except UnicodeDecodeError as error:
                raise self._not_text(error, position - pending) from None
            position += len(piece)
            if "\0" in text:
                line = self._line_after(text[: text.index("\0")])
                raise IntakeRefused(
                    f"{self._name}: line {line:,}: a null byte, which text does not have",
                    code="unsupported_format",
                    hint="Save the file as UTF-8; if it is UTF-16 without a byte order mark, state its `encoding`.",
                )
            yield text

    def _line_after(self, text: str) -> int:
        """Physical line that follows all lines read so far and this text."""
        return self._lines_read + max(text.count("\n"), text.count("\r")) + 1

    def _not_text(self, error: UnicodeDecodeError, position: int) -> IntakeRefused:
        line = self._line_after(error.object[: error.start].decode(self._encoding, "replace"))
        position += error.start
        return IntakeRefused(
            f"{self._name}: line {line:,}, byte {position + 1:,} of the file (0x{error.object[error.start]:02x}): "
            f"not valid {self._encoding}",
            code="unsupported_format",
            hint="Save the file in one encoding, best UTF-8, or state the `encoding` it has.",
        )

    def _unreadable(self, error: csv.Error) -> RowFault:
        if self._ended:
            return RowFault("", "a quote is opened and never closed", f"{_UNCLOSED}.")
        if isinstance(error, _Endless):
            reason = f"longer than {self._limits.max_row_bytes:,} bytes (max_row_bytes)"
            return RowFault("", reason, f"{_UNCLOSED}. If there is none, raise max_row_bytes.")
        if "field limit" in str(error):
            reason = f"a cell is longer than {self._limits.max_cell_bytes:,} bytes (max_cell_bytes)"
            return RowFault("", reason, f"{_UNCLOSED}. If there is none, raise max_cell_bytes.")
        return RowFault(
            "",
            "text follows a closing quote",
            'Write a quote inside a quoted cell twice: "5"" pipe".',
        )


def _last_line_end(text: str) -> int:
    """Where the last line ends that has ended. It may end in a bare \\r; one at the very end may be half of \\r\\n."""
    return max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1


def _place(number: int, line: int) -> str:
    return f"row {number:,} (line {line:,})"
