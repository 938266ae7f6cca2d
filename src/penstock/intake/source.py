"""Reads a path or standard input in chunks, and notices a file that changes meanwhile."""

from __future__ import annotations

import hashlib
import os
import select
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import PenstockError, UsageError

CHUNK_BYTES = 128 * 1024
_PIPE_WAIT_MS = 200
_STDIN = "-"


class Source:
    """An input opened for reading once, from its beginning to its end."""

    def __init__(self, path: str | Path, skip_bytes: int = 0) -> None:
        """What lies before `skip_bytes` is not read."""
        self.name = "standard input" if str(path) == _STDIN else str(path)
        try:
            # A duplicate of standard input: closing ours must not close the process's own.
            self._fd = os.dup(0) if str(path) == _STDIN else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unreadable(error) from error
        self._stat = os.fstat(self._fd)
        if stat.S_ISDIR(self._stat.st_mode):
            self.close()
            raise UsageError(f"{self.name}: is a directory; expected a file", hint="Name one JSONL file.")
        self._regular = stat.S_ISREG(self._stat.st_mode)
        self._skipped = skip_bytes
        if skip_bytes:
            os.lseek(self._fd, skip_bytes, os.SEEK_SET)

    @property
    def size(self) -> int | None:
        """The size if it is known beforehand."""
        return self._stat.st_size - self._skipped if self._regular else None

    def chunks(self) -> Iterator[bytes]:
        """The input's bytes. An empty chunk says that a pipe has nothing at the moment."""
        read = 0
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        while True:
            if not self._regular and not waiting.poll(_PIPE_WAIT_MS):
                yield b""
                continue
            try:
                chunk = os.read(self._fd, CHUNK_BYTES)
            except OSError as error:
                raise self._unreadable(error) from error
            if not chunk:
                break
            read += len(chunk)
            yield chunk
        if self._regular:
            self._check_unchanged(self._skipped + read)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check_unchanged(self, read: int) -> None:
        before, after = self._stat, os.fstat(self._fd)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or read < before.st_size:
            raise PenstockError(
                f"{self.name}: changed while it was read ({before.st_size:,} bytes before, "
                f"{after.st_size:,} after); nothing was stored",
                hint="Wait until whatever writes the file is done, then run the command again.",
            )

    def _unreadable(self, error: OSError) -> UsageError:
        rights = "" if isinstance(error, FileNotFoundError) else " and your rights to it"
        return UsageError(f"{self.name}: cannot be read: {error.strerror or error}", hint=f"Check the path{rights}.")


def digest_of(path: str | Path) -> bytes:
    """The digest that intake records for this file: SHA-256 of its bytes as they lie on disk."""
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
