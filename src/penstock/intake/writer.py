"""A file's way into the database: opened, written batch by batch, then sealed or given up.

The reader of a file gives its rows, and its bytes if they are kept, to a `FileWriter`; two threads copy them while the
reader goes on. Nobody can see a file before its seal, so batches commit on their own and no transaction is long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

import psycopg
from psycopg import Connection
from psycopg.types.json import Jsonb

from penstock.blobs.blobs import NewUse, Place, run_steps_blocking, store_images
from penstock.config import IntakeLimits
from penstock.db import sql
from penstock.errors import UsageError
from penstock.intake import sweep
from penstock.intake.copying import CopyQueue
from penstock.intake.files import FileRow
from penstock.intake.pieces import PieceCutter, PiecePacker, unpack_piece
from penstock.intake.refusal import IntakeGivenUp, IntakeRefused
from penstock.intake.rows import FileLane
from penstock.model import new_id
from penstock.observe import catalogue
from penstock.quotas.quotas import Reservation

_SQL = sql.load("penstock.intake", "intake.sql")

Alongside = Callable[[Connection, UUID], None]
"""What is to happen in the same transaction as the seal, given the file's id."""


class IdempotencyConflict(UsageError):  # noqa: N818 - a verdict on the input
    """The idempotency key was used before, for something else."""


class SealUnheardError(psycopg.OperationalError):
    """The answer to the seal was lost, and the database cannot be asked: the file may be stored or not."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A sealed file."""

    file: FileRow
    lanes: tuple[FileLane, ...]
    existed: bool = False
    """The idempotency key was used before for the same bytes: this is the file of that time."""


class FileWriter:
    """Writes one file. Used by one thread at a time; the file is opened when its first row is written.

    The calls may block on the database, and raise its errors as they are: also those that an earlier call met after it
    had returned.
    """

    def __init__(
        self,
        conninfo: str,
        *,
        owner: str,
        worker_id: UUID,
        filename: str,
        limits: IntakeLimits,
        keep_bytes: bool,
        max_stored_bytes: int = 0,
        idempotency_key: str | None = None,
        expected_bytes: int = 0,
    ) -> None:
        """`max_stored_bytes` is the owner's limit; 0 is none. A file stored before under the key does not count.
        `expected_bytes` is how large the file is said to be; 0 if that is not known."""
        self.file_id = new_id()
        self._room = Reservation(self.file_id, owner, max_stored_bytes, idempotency_key, expected_bytes)
        self._began = monotonic()
        self._conninfo = conninfo
        self._filename = filename
        self._owner = owner
        self._about = {"file_id": self.file_id, "owner": owner, "filename": filename, "worker_id": worker_id}
        self._keep_bytes = keep_bytes
        self._cutter = PieceCutter()
        self._packer = PiecePacker()
        self._digest = hashlib.sha256()
        self._connection: Connection | None = None
        self._opened = False
        self._source_id: int | None = None
        self.bytes = 0
        """As they came."""
        self.chunks = 0
        """Pieces of them kept so far."""
        self.rows = 0
        """Templates handed in so far."""
        self._template_rows = CopyQueue(conninfo, _SQL["copy_templates"], limits, self._hold)
        self._chunk_rows = CopyQueue(conninfo, _SQL["copy_chunks"], limits, self._hold)

    @property
    def source_id(self) -> int:
        if self._source_id is None:
            self._opened = True  # or perhaps: the answer may be lost
            with self.session() as connection:
                (self._source_id,) = connection.execute(_SQL["insert_file"], self._about).fetchall()[0]
        return self._source_id

    @property
    def held_bytes(self) -> int:
        """Bytes in memory that are not written yet."""
        return self._cutter.held_bytes + self._template_rows.held_bytes + self._chunk_rows.held_bytes

    @property
    def digest(self) -> bytes:
        return self._digest.digest()

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """A connection for as long as the block lasts. Blocks inside it share it."""
        if self._connection is not None:
            yield self._connection
            return
        with sweep.connected(self._conninfo) as connection:
            self._connection = connection
            try:
                yield connection
            finally:
                self._connection = None

    def another_session(self) -> AbstractContextManager[Connection]:
        """A connection of its own, to ask what became of a statement whose answer was lost."""
        return sweep.connected(self._conninfo)

    # -- what is written

    def take(self, data: bytes) -> list[bytes]:
        """Take the next bytes as they came; returns what of them can be read now: if they are kept, whole pieces.
        Raises QuotaExceeded if the owner may not store them."""
        if not self._room.covers(self.bytes + len(data)):
            _ = self.source_id  # what is reserved belongs to a file
            with self.session() as connection:
                self._room.extend(connection, self.bytes + len(data))
        self.bytes += len(data)
        self._digest.update(data)
        if not self._keep_bytes:
            return [data]
        return self._keep(self._cutter.feed(data))

    def take_rest(self) -> list[bytes]:
        """The bytes are at their end: the last piece, if there is one."""
        return self._keep(self._cutter.rest())

    def write(self, rows: bytes, count: int) -> None:
        """Take rows of templates, packed by a reader."""
        self.rows += count
        self._template_rows.put(len(rows), count, lambda: rows)

    def write_images(self, uses: Sequence[NewUse]) -> None:
        """Store the images of rows of the file's only lane, in a transaction of their own."""
        source_id = self.source_id
        with self.session() as connection, connection.transaction():
            self._hold(connection)
            run_steps_blocking(connection, store_images(self._owner, Place(source_id, 0), uses))

    def kept(self, chunk: int) -> bytes:
        """A piece that was written before."""
        with self.session() as connection:
            place = {"source_id": self.source_id, "chunk": chunk}
            size, packed = connection.execute(_SQL["read_chunk"], place, binary=True).fetchall()[0]
        return unpack_piece(size, packed)

    def flush(self) -> None:
        """Wait until all that was taken is committed. No transaction stays open."""
        self._chunk_rows.hurry()
        self._template_rows.flush(self.session)
        self._chunk_rows.flush(self.session)

    def _keep(self, pieces: list[bytes]) -> list[bytes]:
        for piece in pieces:
            self._chunk_rows.put(len(piece), 1, partial(self._packer.pack, self.source_id, self.chunks, piece))
            self.chunks += 1
        return pieces

    def _hold(self, connection: Connection) -> None:
        if connection.execute(_SQL["hold_if_ingesting"], {"file_id": self.file_id}).fetchone() is None:
            raise given_up(self._filename)

    # -- the end

    def seal(
        self,
        lanes: Sequence[FileLane],
        *,
        purpose: str,
        refused: IntakeRefused | None = None,
        idempotency_key: str | None = None,
        expires_after_s: float | None = None,
        alongside: Alongside | None = None,
    ) -> StoredFile:
        """Make the file whole and visible, once everything is flushed."""
        _ = self.source_id  # an empty file has not been opened yet
        parameters = {
            "file_id": self.file_id,
            "lines": sum(lane.total for lane in lanes),
            "bytes": self.bytes,
            "digest": self.digest,
            "purpose": purpose,
            "chunks": self.chunks,
            "problems": Jsonb(refused.problems) if refused else None,
            "idempotency_key": idempotency_key,
            "expires_after_s": expires_after_s,
            "source_lanes": [lane.source_lane for lane in lanes],
            "routes": [lane.route for lane in lanes],
            "endpoints": [lane.endpoint for lane in lanes],
            "totals": [lane.total for lane in lanes],
        }
        with self.session() as connection:
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
                    if earlier := self._earlier(connection, purpose, idempotency_key):
                        return StoredFile(earlier, tuple(lanes), existed=True)
                    continue
                except psycopg.OperationalError as lost:
                    row = self._sealed_unheard(lost)
                self._count()
                return StoredFile(FileRow(*row), tuple(lanes))

    def _count(self) -> None:
        catalogue.INGEST_DURATION.observe((), monotonic() - self._began)
        catalogue.INGEST_ROWS.add((), self.rows)
        catalogue.INGEST_BYTES.add((), self.bytes)

    def abandon(self) -> None:
        """Give up what was written. What cannot be done now is left to the sweep."""
        self._template_rows.drop()
        self._chunk_rows.drop()
        if self._opened:
            sweep.abandon(self._conninfo, self.file_id)

    def _earlier(self, connection: Connection, purpose: str, idempotency_key: str | None) -> FileRow | None:
        """The file that has our key, unless it is gone: then the key is free again."""
        key = {"owner": self._owner, "idempotency_key": idempotency_key}
        row = connection.execute(_SQL["read_file_by_key"], key).fetchone()
        if row is None:
            connection.execute(_SQL["free_key_if_gone"], key)
            return None
        earlier = FileRow(*row)
        if (earlier.digest, earlier.purpose) != (self.digest, purpose):
            raise IdempotencyConflict(
                f"{self._filename}: the idempotency key was used before for a file that differs",
                hint="Use a new key for every file.",
            )
        return earlier

    def _sealed_unheard(self, lost: psycopg.OperationalError) -> tuple[Any, ...]:
        """Ask, when the answer to the seal was lost. Failing the file waits for a seal still under way, and finds
        nothing to fail if it went through."""
        try:
            with self.another_session() as connection:
                if sweep.fail(connection, self.file_id) == "ready":
                    return connection.execute(_SQL["read_file"], {"file_id": self.file_id, "owner": None}).fetchall()[0]
        except psycopg.Error:
            if lost.sqlstate is None:  # otherwise it was heard, and is a refusal
                raise SealUnheardError(*lost.args) from lost
        raise lost


def given_up(filename: str) -> IntakeGivenUp:
    return IntakeGivenUp(
        f"{filename}: another process gave this file up while it was being stored; nothing was kept",
        hint="This process went silent for longer than heartbeat_grace_s. Submit the file again.",
    )
