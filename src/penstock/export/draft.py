"""Files that are written whole or not at all: under another name beside their own, then renamed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from penstock.errors import PenstockError


def draft_of(path: Path) -> Path:
    """Path to which this process writes before it renames to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


@contextmanager
def explain_write_errors(output: Path) -> Iterator[None]:
    """Turn the system's errors into Penstock's, with what to do next."""
    try:
        yield
    except OSError as error:
        raise PenstockError(
            f"cannot write {error.filename or output}: {error.strerror}",
            hint="Nothing was half-written and every result is stored: make room or choose another -o, "
            "then run the same command again.",
        ) from error


class Draft:
    """File under construction, invisible under its final name until published."""

    def __init__(self, path: Path) -> None:
        # The file that a link points at is replaced, not the link.
        self._path = path.resolve()
        self._draft = draft_of(self._path)
        self._file: IO[bytes] | None = None
        self.lines = 0

    def __enter__(self) -> Self:
        _remove_abandoned(self._path)
        self._file = _open_locked(self._draft)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            # A failing close after a failed write would hide the first error, and the draft goes anyway.
            with suppress(OSError):
                self._file.close()
        with suppress(OSError):
            self._draft.unlink(missing_ok=True)

    def write(self, data: bytes, lines: int = 1) -> None:
        if self._file is None:
            raise AssertionError("the draft is not open")
        self._file.write(data)
        self.lines += lines

    def publish(self, *, if_empty: str) -> None:
        if self._file is None:
            raise AssertionError("the draft is not open")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        if self.lines == 0 and if_empty == "remove":
            self._draft.unlink()
            self._path.unlink(missing_ok=True)
        else:
            self._draft.replace(self._path)


def _open_locked(draft: Path) -> IO[bytes]:
    """Open a draft for writing, under a lock that the kernel takes back however this process ends."""
    while True:
        file = draft.open("wb", buffering=1 << 20)
        try:
            with suppress(OSError):  # a file system without locks: drafts of killed exports stay there
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another export may have removed it as abandoned in the moment before the lock.
            if os.path.samestat(os.fstat(file.fileno()), draft.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Remove the drafts of exports that were killed: no process holds a lock on them."""
    prefix = f".{path.name}."
    for draft in path.parent.iterdir():
        if draft.name.startswith(prefix) and draft.name.removeprefix(prefix).removesuffix(".part").isdecimal():
            with suppress(OSError), draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()
