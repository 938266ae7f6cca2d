"""An upload's bytes as they came: cut into pieces, compressed, and written with what was parsed from them.

Nothing is written until there is enough of it, and then all at once on a connection of its own: while an uploader is
slow or silent, no transaction and no connection is held for it, and what waits in memory is bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from struct import Struct
from uuid import UUID

import zstandard
from psycopg import Connection

from penstock.db import sql
from penstock.intake import sweep
from penstock.intake.refusal import IntakeGivenUp

PIECE_BYTES = 1024 * 1024
_PENDING_BYTES = 4 * 1024 * 1024
_COPY_BYTES = 256 * 1024
"""Handed to libpq at once: what it cannot send it keeps a copy of."""
_LEVEL = 1
"""As small as the default on JSON, and a third faster."""
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_FIELDS = 4
_ROW_START = Struct("!hiqiiiii")
"""One row of penstock.file_chunks as COPY reads it, up to its bytes."""
_SQL = sql.load("penstock.intake", "intake.sql")


class RawWriter:
    """Writes one source. Used by one thread at a time; the source is opened when its first row is written."""

    def __init__(self, conninfo: str, *, file_id: UUID, owner: str, worker_id: UUID, filename: str) -> None:
        self.file_id = file_id
        self._conninfo = conninfo
        self._about = {"file_id": file_id, "owner": owner, "filename": filename, "worker_id": worker_id}
        self._connection: Connection | None = None
        self._opened = False
        self._source_id: int | None = None
        self._digest = hashlib.sha256()
        # One for each: used by two threads at once, it crashes the process.
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._tail = bytearray()
        self._templates: list[bytes] = []
        self._pieces: list[tuple[int, bytes]] = []
        self._pending_bytes = 0
        self.bytes = 0
        self.chunks = 0
        """Pieces cut so far."""
        self.templates = 0
        """Templates handed in so far."""

    @property
    def source_id(self) -> int:
        if self._source_id is None:
            self._opened = True  # or perhaps: the answer may be lost
            with self.session() as connection:
                (self._source_id,) = connection.execute(_SQL["insert_file"], self._about).fetchall()[0]
        return self._source_id

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

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next bytes; gives every piece that became whole, once it is kept."""
        self.bytes += len(data)
        self._tail += data
        while len(self._tail) >= PIECE_BYTES:
            piece = bytes(self._tail[:PIECE_BYTES])
            del self._tail[:PIECE_BYTES]
            self._keep(piece)
            yield piece

    def rest(self) -> Iterator[bytes]:
        """The last piece, if there is one."""
        if self._tail:
            piece = bytes(self._tail)
            self._tail.clear()
            self._keep(piece)
            yield piece

    def add_templates(self, rows: bytes, count: int) -> None:
        """Rows packed by the parser."""
        self._templates.append(rows)
        self.templates += count
        self._note(len(rows))

    def flush(self) -> None:
        """Write what waits, in one transaction."""
        if not self._templates and not self._pieces:
            return
        with self.session() as connection:
            source_id = self.source_id
            with connection.transaction():
                if connection.execute(_SQL["hold_if_ingesting"], {"file_id": self.file_id}).fetchone() is None:
                    raise given_up(str(self._about["filename"]))
                if self._templates:
                    self._copy(connection, _SQL["copy_templates"], self._templates)
                if self._pieces:
                    first = self.chunks - len(self._pieces)
                    self._copy(connection, _SQL["copy_chunks"], _packed(source_id, first, self._pieces))
        self._templates, self._pieces, self._pending_bytes = [], [], 0

    def kept(self, chunk: int) -> bytes:
        """A piece that was written before."""
        with self.session() as connection:
            place = {"source_id": self.source_id, "chunk": chunk}
            size, packed = connection.execute(_SQL["read_chunk"], place).fetchall()[0]
        return unpacked(size, packed)

    def abandon(self) -> None:
        """Give up what was written. What cannot be done now is left to the sweep."""
        if self._opened:
            sweep.abandon(self._conninfo, self.file_id)

    def _keep(self, piece: bytes) -> None:
        self._digest.update(piece)
        # A copy: the compressor cuts its result from a block as large as the piece, whose rest the heap cannot use.
        packed = bytes(memoryview(self._compressor.compress(piece)))
        self._pieces.append((len(piece), packed))
        self.chunks += 1
        self._note(len(packed))

    def _note(self, size: int) -> None:
        self._pending_bytes += size
        if self._pending_bytes >= _PENDING_BYTES:
            self.flush()

    def _copy(self, connection: Connection, statement: bytes, blocks: Iterator[bytes] | list[bytes]) -> None:
        with connection.cursor() as cursor, cursor.copy(statement) as copy:
            copy.write(_SIGNATURE)
            for block in blocks:
                for at in range(0, len(block), _COPY_BYTES):
                    copy.write(block[at : at + _COPY_BYTES])
            copy.write(_TRAILER)


def unpacked(size: int, packed: bytes) -> bytes:
    """A piece as it came."""
    piece = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size)
    if len(piece) != size:
        raise ValueError(f"a stored piece of {size:,} bytes holds {len(piece):,}")
    return piece


def given_up(filename: str) -> IntakeGivenUp:
    return IntakeGivenUp(
        f"{filename}: another process gave this file up while it was being stored; nothing was kept",
        hint="This process went silent for longer than heartbeat_grace_s. Send the file again.",
    )


def _packed(source_id: int, first: int, pieces: list[tuple[int, bytes]]) -> Iterator[bytes]:
    for chunk, (size, packed) in enumerate(pieces, first):
        yield _ROW_START.pack(_FIELDS, 8, source_id, 4, chunk, 4, size, len(packed)) + packed
