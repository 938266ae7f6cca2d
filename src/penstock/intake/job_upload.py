"""Input of a job on its way in: kept as it comes, and read through as a table before the job is made.

So a job begins only if every row of its input can be taken; whether some of it is refused is known before anything is
visible.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import BinaryIO, Final, Self
from uuid import UUID

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.stored_bytes import StoredBytes
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.image_table import ImageTable
from penstock.intake.tables.table import Table, TableSpec, Through, paced_rows, pass_rows
from penstock.intake.writer import Alongside, FileWriter, StoredFile

JOB: Final = "job"
"""Purpose of a job's input."""

Part = tuple[str, int]
"""Name and size of one of several files that came together. They are stored one after the other."""


@contextmanager
def open_upload(
    read_piece: Callable[[int], bytes],
    size: int,
    filename: str,
    parts: Sequence[Part] | None,
    spec: TableSpec,
    table_limits: TableLimits,
    limits: IntakeLimits,
) -> Iterator[Table]:
    """The table that stored bytes hold: one file's, or the images of an upload of several."""
    file = io.BufferedReader(StoredBytes(read_piece, size))
    if parts is None:
        with open_table(file, filename, spec, table_limits, limits) as table:
            yield table
        return
    starts = accumulate((part_size for _, part_size in parts), initial=0)
    most = table_limits.max_image_bytes + 1
    images = [
        (path, partial(_read_part, file, start, min(part_size, most)))
        for (path, part_size), start in zip(parts, starts, strict=False)
    ]
    yield ImageTable("upload", images, table_limits, limits, several=True)


def _read_part(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


class JobUpload:
    """Takes a job's bytes as they arrive. Leaving the `with` block without `finish` stores nothing.

    The calls block, so an event loop runs them in a thread, one at a time.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        owner: str,
        worker_id: UUID,
        filename: str,
        limits: IntakeLimits,
        table_limits: TableLimits,
        idempotency_key: str | None = None,
        max_stored_bytes: int = 0,
    ) -> None:
        self.filename = filename
        self._limits = limits
        self._table_limits = table_limits
        self._key = idempotency_key
        self._writer = FileWriter(
            conninfo,
            owner=owner,
            worker_id=worker_id,
            filename=filename,
            limits=limits,
            keep_bytes=True,
            max_stored_bytes=max_stored_bytes,
            idempotency_key=idempotency_key,
        )
        self._sealed = False

    @property
    def file_id(self) -> UUID:
        return self._writer.file_id

    @property
    def held_bytes(self) -> int:
        return self._writer.held_bytes

    @property
    def digest(self) -> bytes:
        return self._writer.digest

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        if self._writer.bytes + len(data) > self._limits.max_upload_bytes:
            raise IntakeRefused(
                f"{self.filename}: more than {self._limits.max_upload_bytes:,} bytes (max_upload_bytes)",
                code="file_too_large",
                hint="Split it into several jobs, or compress a table with gzip or zstd.",
            )
        self._writer.take(data)

    def finish(
        self,
        spec: TableSpec,
        alongside: Alongside,
        parts: Sequence[Part] | None = None,
        *,
        through: Through = pass_rows,
    ) -> StoredFile:
        """Read the input through, then seal it and make the job, in one transaction. `parts` are the files, if several
        came together. Raises IntakeRefused, and what `through` raises."""
        with self._writer.session():
            self._writer.take_rest()
            self._writer.flush()
            upload = (self._writer.kept, self._writer.bytes, self.filename, parts)
            with open_upload(*upload, spec, self._table_limits, self._limits) as table:
                for _ in through(paced_rows(table.rows())):
                    pass
            stored = self._writer.seal([], purpose=JOB, idempotency_key=self._key, alongside=alongside)
        self._sealed = not stored.existed
        return stored

    def close(self) -> None:
        if not self._sealed:
            self._writer.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
