"""A stored file's bytes as they came, as a file to read and seek in: one piece of it is in memory at a time."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from typing import Self

from psycopg import Connection

from penstock.db import sql
from penstock.intake.files import ContentGone
from penstock.intake.pieces import PIECE_BYTES, unpack_piece
from penstock.intake.sweep import connect

_SQL = sql.load("penstock.intake", "intake.sql")


class PieceReader:
    """Reads pieces of one source over a connection of its own, for as long as the context lasts."""

    def __init__(self, conninfo: str, source_id: int) -> None:
        self._conninfo = conninfo
        self._source_id = source_id
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        self._connection = connect(self._conninfo)
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def read(self, number: int) -> bytes:
        """A piece by its number."""
        if self._connection is None:
            raise AssertionError("the reader is not open")
        place = {"source_id": self._source_id, "chunk": number}
        found = self._connection.execute(_SQL["read_chunk"], place, binary=True).fetchone()
        if found is None:
            raise ContentGone("The bytes are not there any more: the file was deleted.")
        return unpack_piece(*found)


class StoredBytes(io.RawIOBase):
    """Reads the bytes from `offset` on, `size` of them; `read_piece` gives a piece of the whole by its number."""

    def __init__(self, read_piece: Callable[[int], bytes], size: int, offset: int = 0) -> None:
        self._read_piece = read_piece
        self._size = size
        self._offset = offset
        self._place = 0
        self._piece: tuple[int, bytes] = (-1, b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as files do: zipfile relies on it
        self._place = start + offset
        return self._place

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        left = self._size - self._place
        if left <= 0:
            return 0
        number, start = divmod(self._offset + self._place, PIECE_BYTES)
        if self._piece[0] != number:
            self._piece = (number, self._read_piece(number))
        part = self._piece[1][start : start + min(len(buffer), left)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)
