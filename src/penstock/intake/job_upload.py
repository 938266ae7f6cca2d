"""Input of a job on its way in: kept as it comes, and read through as a table before the job is made.

So a job begins only if every row of its input can be taken; whether some of it is refused is known before anything is
visible.
"""

from __future__ import annotations

import io
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.stored_bytes import StoredBytes
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.table import TableSpec, Through, pass_rows
from penstock.intake.writer import Alongside, FileWriter, StoredFile

JOB: Final = "job"
"""Purpose of a job's input."""


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
    ) -> None:
        self.filename = filename
        self._limits = limits
        self._table_limits = table_limits
        self._key = idempotency_key
        self._writer = FileWriter(
            conninfo, owner=owner, worker_id=worker_id, filename=filename, limits=limits, keep_bytes=True
        )
        self._sealed = False

    @property
    def file_id(self) -> UUID:
        return self._writer.file_id

    @property
    def digest(self) -> bytes:
        return self._writer.digest

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        if self._writer.bytes + len(data) > self._limits.max_upload_bytes:
            raise IntakeRefused(
                f"{self.filename}: more than {self._limits.max_upload_bytes:,} bytes (max_upload_bytes)",
                code="file_too_large",
                hint="Split the file, or compress it with gzip or zstd.",
            )
        self._writer.take(data)

    def finish(self, spec: TableSpec, alongside: Alongside, *, through: Through = pass_rows) -> StoredFile:
        """Read the input through, then seal it and make the job, in one transaction. Raises IntakeRefused, and what
        `through` raises."""
        with self._writer.session():
            self._writer.take_rest()
            self._writer.flush()
            file = io.BufferedReader(StoredBytes(self._writer.kept, self._writer.bytes))
            with open_table(file, self.filename, spec, self._table_limits, self._limits) as table:
                for _ in through(table.rows()):
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
