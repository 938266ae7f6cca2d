"""A table as its readers hand it on: what a job says about it, its columns, its rows, and why one is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec

from penstock.blobs.blobs import NewUse
from penstock.config import MIB
from penstock.intake.pace import keep_pace
from penstock.intake.refusal import BadLine, IntakeRefused

BLOCK_ROWS = 2_000
BLOCK_BYTES = 4 * MIB
PACED_ROWS = 100

ColumnType = Literal["text", "integer", "number", "boolean"]


class TableSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What a job says about its table. Images have columns of their own: nothing here applies to them."""

    rename: dict[str, str] = {}
    """New names of columns, by the header as it stands in the file or by its canonical name."""
    keep: list[str] | None = None
    """Columns that rows have, in this order, by their canonical names; None for all."""
    types: dict[str, ColumnType] = {}
    """Types of columns, by their canonical names. Without one, a cell's text decides."""
    sheet: str | int | None = None
    """Sheet of a workbook, by its name or its number from 1; None for the first."""
    delimiter: Annotated[str, msgspec.Meta(pattern=r'^[^"\r\n]$')] | None = None
    """What stands between the cells of a CSV file; None to find out."""
    encoding: str | None = None
    """Encoding of a CSV file, such as `cp1252`; None to find out."""


class Blob(NamedTuple):
    """Bytes that a row refers to by their hash."""

    sha256: str
    data: bytes
    media_type: str


class TableRow(msgspec.Struct, frozen=True, gc=False):
    """A row to be stored. Nothing for the garbage collector, which would look at thousands of them again and again."""

    body: bytes
    """JSON: `{"row": {…}, "raw": …}`."""
    summary: str
    custom_id: str
    """Row number from 1, or an image's path."""
    blob: Blob | None = None

    @property
    def size(self) -> int:
        """Bytes of its body and its image."""
        return len(self.body) + (0 if self.blob is None else len(self.blob.data))


class RowsDigest:
    """Digest of the rows of a table, by which two tables are found to begin alike."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.count = 0

    def add(self, rows: Iterable[TableRow]) -> None:
        for row in rows:
            self._digest.update(row.body + b"\n")
            self.count += 1

    @property
    def hex(self) -> str:
        return self._digest.hexdigest()


def next_block(rows: Iterator[TableRow], max_rows: int = BLOCK_ROWS, max_bytes: int = BLOCK_BYTES) -> list[TableRow]:
    """The next rows, so many or up to the one that reaches the bytes; none if there are no more."""
    block: list[TableRow] = []
    size = 0
    for row in islice(rows, max_rows):
        block.append(row)
        size += len(row.body) if row.blob is None else row.size
        if size >= max_bytes:
            break
        if not len(block) % PACED_ROWS:
            keep_pace()
    return block


def paced_rows(rows: Iterable[TableRow]) -> Iterator[TableRow]:
    """The rows, at the pace that is set for this thread."""
    for number, row in enumerate(rows, 1):
        yield row
        if not number % PACED_ROWS:
            keep_pace()


def image_uses(rows: Iterable[TableRow], first: int) -> list[NewUse]:
    """The images of rows that are stored from this ordinal on."""
    return [
        NewUse(ordinal, bytes.fromhex(row.blob.sha256), row.blob.data)
        for ordinal, row in enumerate(rows, first)
        if row.blob is not None
    ]


class Table(Protocol):
    """A file that is being read. Equal bytes and an equal spec give equal rows in the same order."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Canonical names, in order. Those of JSON Lines grow as rows are read."""

    def rows(self) -> Iterator[TableRow]:
        """Every row, once. Raises IntakeRefused at the first that cannot be taken."""


Through = Callable[[Iterator[TableRow]], Iterator[TableRow]]
"""Passes rows on, and may raise a UsageError instead."""


def pass_rows(rows: Iterator[TableRow]) -> Iterator[TableRow]:
    return rows


class RowFault(Exception):  # noqa: N818 - a verdict on the row, which its reader puts in its place
    """What is wrong with a row: the column at fault, if it is one, and what to do."""

    def __init__(self, column: str, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.column = column
        self.reason = reason
        self.hint = hint

    def placed(self, name: str, place: str, line: int) -> IntakeRefused:
        """The refusal of the file for this fault of the row at that place."""
        where = f"{place}, column {self.column}" if self.column else place
        bad_line = BadLine(line, self.column, self.reason, "invalid_request")
        return IntakeRefused(f"{name}: {where}: {self.reason}", hint=self.hint, bad_lines=[bad_line])


def no_rows(name: str, hint: str) -> IntakeRefused:
    return IntakeRefused(f"{name}: holds no rows", code="empty_file", hint=hint)


def too_many_rows(name: str, max_rows: int) -> IntakeRefused:
    return IntakeRefused(
        f"{name}: more than {max_rows:,} rows (max_rows)",
        code="file_too_large",
        hint="Split the file into several, or raise max_rows.",
    )
