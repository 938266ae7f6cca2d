"""A file on its way in over the network: kept as it comes, parsed while it comes, sealed at its end.

A file for batches is read line by line as it arrives. One whose lines are not all valid is kept too, with what is wrong
with it: whoever runs a batch over it is told, line by line, as with the hosted services.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

import psycopg
from psycopg import Connection
from psycopg.types.json import Jsonb

from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.errors import UsageError
from penstock.intake import sweep
from penstock.intake.files import MESSAGE_BATCH, FileRow
from penstock.intake.jsonl import FileLane, JsonlParser
from penstock.intake.raw import RawWriter, given_up
from penstock.intake.refusal import IntakeRefused
from penstock.intake.source import CHUNK_BYTES
from penstock.intake.unpack import Unpacker
from penstock.model import new_id

BATCH: Final = "batch"
_OF_BATCHES = (BATCH, MESSAGE_BATCH)
_TOO_LARGE = "file_too_large"
_SQL = sql.load("penstock.intake", "intake.sql")

Alongside = Callable[[Connection, UUID], None]
"""What is to happen in the same transaction as the seal, given the file's id."""


class IdempotencyConflict(UsageError):  # noqa: N818 - a verdict on the input
    """The idempotency key was used before, for something else."""


@dataclass(frozen=True, slots=True)
class UploadedFile:
    file: FileRow
    existed: bool
    """The idempotency key was used before for the same bytes: this is the file of that time."""


class Upload:
    """Takes a file's bytes as they arrive. Leaving the `with` block without `finish` stores nothing.

    The calls block on the database, so an event loop runs them in a thread, one at a time. Errors of the database are
    raised as they are. `purpose` and `expires_after_s` may be set until `finish`; a purpose that comes only after the
    bytes has them read once more. Without `keep_problems`, a file that no batch can run over is refused instead.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        owner: str,
        worker_id: UUID,
        filename: str,
        limits: IntakeLimits,
        purpose: str | None = None,
        file_id: UUID | None = None,
        expires_after_s: float | None = None,
        idempotency_key: str | None = None,
        keep_problems: bool = True,
    ) -> None:
        self.purpose = purpose
        self.expires_after_s = expires_after_s
        self._owner = owner
        self._filename = filename
        self._limits = limits
        self._key = idempotency_key
        self._keep_problems = keep_problems
        self._writer = RawWriter(
            conninfo, file_id=file_id or new_id(), owner=owner, worker_id=worker_id, filename=filename
        )
        self._reading: _Reading | None = None
        self._sealed = False

    @property
    def file_id(self) -> UUID:
        return self._writer.file_id

    @property
    def bytes_read(self) -> int:
        return self._writer.bytes

    def feed(self, data: bytes) -> None:
        """Take the next bytes, cut anywhere."""
        if self._writer.bytes + len(data) > self._limits.max_upload_bytes:
            raise IntakeRefused(
                f"{self._filename}: more than {self._limits.max_upload_bytes:,} bytes (max_upload_bytes)",
                code=_TOO_LARGE,
                hint="Split the file, or compress it with gzip or zstd.",
            )
        for piece in self._writer.feed(data):
            self._read(piece)

    def finish(self, alongside: Alongside | None = None) -> UploadedFile:
        """The stream is at its end: seal the file."""
        if self.purpose is None:
            raise ValueError("a file needs a purpose before it is sealed")
        with self._writer.session() as connection:
            for piece in self._writer.rest():
                self._read(piece)
            lanes: list[FileLane] = []
            refused: IntakeRefused | None = None
            if self.purpose in _OF_BATCHES:
                lanes, refused = self._judge()
            if refused and not self._keep_problems:
                raise refused
            self._writer.flush()
            if not lanes and self._writer.templates:
                sweep.discard_templates(connection, self._writer.source_id)
            return self._seal(connection, lanes, refused, alongside)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()
        if not self._sealed:
            self._writer.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, piece: bytes) -> None:
        """Parse a piece as it comes, if all before it were."""
        parsed = self._reading.pieces if self._reading else 0
        if self.purpose in _OF_BATCHES and parsed == self._writer.chunks - 1:
            self._started().take(piece)

    def _started(self) -> _Reading:
        if self._reading is None:
            parser = JsonlParser(
                self._filename, self._writer.source_id, self._limits, self._writer.add_templates, model_required=True
            )
            self._reading = _Reading(Unpacker(self._filename, self._limits), parser)
        return self._reading

    def _judge(self) -> tuple[list[FileLane], IntakeRefused | None]:
        reading = self._started()
        if reading.pieces < self._writer.chunks:
            self._writer.flush()
            for chunk in range(reading.pieces, self._writer.chunks):
                reading.take(self._writer.kept(chunk))
        return reading.finish()

    def _seal(
        self,
        connection: Connection,
        lanes: list[FileLane],
        refused: IntakeRefused | None,
        alongside: Alongside | None,
    ) -> UploadedFile:
        _ = self._writer.source_id  # an empty file has not been opened yet
        parameters = {
            "file_id": self.file_id,
            "lines": sum(lane.total for lane in lanes),
            "bytes": self._writer.bytes,
            "digest": self._writer.digest,
            "purpose": self.purpose,
            "chunks": self._writer.chunks,
            "problems": Jsonb(refused.problems) if refused else None,
            "idempotency_key": self._key,
            "expires_after_s": self.expires_after_s,
            "source_lanes": [lane.source_lane for lane in lanes],
            "routes": [lane.route for lane in lanes],
            "endpoints": [lane.endpoint for lane in lanes],
            "totals": [lane.total for lane in lanes],
        }
        while True:
            try:
                # On its own it is one statement: one round trip, and nothing open if we stop in the middle.
                with connection.transaction() if alongside else nullcontext():
                    row = connection.execute(_SQL["seal_if_ingesting"], parameters).fetchone()
                    if row is None:
                        raise given_up(self._filename)
                    if alongside is not None:
                        alongside(connection, self.file_id)
            except psycopg.errors.UniqueViolation:
                if earlier := self._earlier(connection):
                    return earlier
                continue
            except psycopg.OperationalError as lost:
                row = self._sealed_unheard(lost)
            self._sealed = True
            return UploadedFile(FileRow(*row), existed=False)

    def _earlier(self, connection: Connection) -> UploadedFile | None:
        """The file that has our key, unless it is gone: then the key is free again."""
        key = {"owner": self._owner, "idempotency_key": self._key}
        row = connection.execute(_SQL["read_file_by_key"], key).fetchone()
        if row is None:
            connection.execute(_SQL["free_key_if_gone"], key)
            return None
        earlier = FileRow(*row)
        if (earlier.digest, earlier.purpose) != (self._writer.digest, self.purpose):
            raise IdempotencyConflict(
                f"{self._filename}: the idempotency key was used before for a file that differs",
                hint="Use a new key for every file.",
            )
        return UploadedFile(earlier, existed=True)

    def _sealed_unheard(self, lost: psycopg.OperationalError) -> tuple[Any, ...]:
        """Ask, when the answer to the seal was lost. Failing the file waits for a seal still under way, and finds
        nothing to fail if it went through."""
        try:
            with self._writer.another_session() as connection:
                if sweep.fail(connection, self.file_id) == "ready":
                    return connection.execute(_SQL["read_file"], {"file_id": self.file_id, "owner": None}).fetchall()[0]
        except psycopg.Error:
            raise lost from None
        raise lost


class _Reading:
    """The way of an upload's pieces through the parser, to its lanes or to what is wrong with it."""

    def __init__(self, unpacker: Unpacker, parser: JsonlParser) -> None:
        self._unpacker = unpacker
        self._parser = parser
        self._refused: IntakeRefused | None = None
        self.pieces = 0

    def take(self, piece: bytes) -> None:
        self.pieces += 1
        if self._refused is None and not self._parser.hopeless:
            self._parse(part for at in range(0, len(piece), CHUNK_BYTES) for part in self._unpack(piece, at))

    def finish(self) -> tuple[list[FileLane], IntakeRefused | None]:
        """The file's lanes, or none and why."""
        if self._refused is None and not self._parser.hopeless:
            self._parse(self._unpacker.finish())
        if self._refused is None:
            try:
                self._parser.finish()
            except IntakeRefused as refused:
                self._refused = refused
        return ([], self._refused) if self._refused else (self._parser.lanes, None)

    def close(self) -> None:
        self._parser.close()

    def _unpack(self, piece: bytes, at: int) -> Iterator[bytes]:
        return self._unpacker.feed(piece[at : at + CHUNK_BYTES])

    def _parse(self, parts: Iterator[bytes]) -> None:
        try:
            for part in parts:
                self._parser.feed(part)
        except IntakeRefused as refused:
            # What expands without end is an attack on us, not a mistake in a line.
            if refused.code == _TOO_LARGE:
                raise
            self._refused = refused
