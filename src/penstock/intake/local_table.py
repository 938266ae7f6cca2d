"""A table of this machine: one file, or images that are files of their own, named one by one or by their folder."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from penstock.config import IntakeLimits, TableLimits
from penstock.errors import UsageError
from penstock.intake.reader import CHUNK_BYTES
from penstock.intake.tables.formats import open_table
from penstock.intake.tables.image_table import ImageTable, is_left_out
from penstock.intake.tables.table import Table, TableSpec


class LocalTable(ABC):
    """Table that `penstock run` reads. The same names and bytes give the same rows in the same order."""

    def __init__(self, paths: Sequence[Path], name: str, files: Sequence[tuple[str, Path]]) -> None:
        self.paths = paths
        """Paths by which it was named."""
        self.name = name
        self.files = files
        """Its files, by the names that their rows get."""

    @property
    def size(self) -> int:
        return sum(_stat(path).st_size for _, path in self.files)

    @property
    def digest(self) -> bytes:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.digest()

    @property
    @abstractmethod
    def origin(self) -> dict[str, str]:
        """Attributes by which a later run sees, without reading it, that the table has not changed."""

    @abstractmethod
    def chunks(self) -> Iterator[bytes]:
        """Everything that its rows depend on."""

    @abstractmethod
    def open(self, spec: TableSpec, limits: TableLimits, intake: IntakeLimits) -> AbstractContextManager[Table]: ...

    @property
    @abstractmethod
    def bytes_read(self) -> int:
        """How far the open table was read."""


class TableFile(LocalTable):
    """One file: a table, an image, or a zip of images."""

    def __init__(self, path: Path) -> None:
        super().__init__([path], _text(path.name), [(_text(path.name), path)])
        self._path = path
        self._file: BinaryIO | None = None

    @property
    def origin(self) -> dict[str, str]:
        about = _stat(self._path)
        return {"size": str(about.st_size), "mtime_ns": str(about.st_mtime_ns)}

    def chunks(self) -> Iterator[bytes]:
        return _chunks(self._path)

    @contextmanager
    def open(self, spec: TableSpec, limits: TableLimits, intake: IntakeLimits) -> Iterator[Table]:
        with _open(self._path) as self._file, open_table(self._file, self.name, spec, limits, intake) as table:
            yield table

    @property
    def bytes_read(self) -> int:
        return 0 if self._file is None or self._file.closed else self._file.tell()


class ImageFiles(LocalTable):
    """Images that are files of their own."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Files come in this order, those of a folder in the order of their paths in it."""
        only_folder = paths[0] if len(paths) == 1 else None
        found = [file for path in paths for file in (_walk(path) if path.is_dir() else [path])]
        names = [_text((file if only_folder is None else file.relative_to(only_folder)).as_posix()) for file in found]
        super().__init__(paths, _text(paths[0].resolve().name), list(zip(names, found, strict=True)))
        self._bytes_read = 0

    @property
    def origin(self) -> dict[str, str]:
        listing = hashlib.sha256()
        for name, path in self.files:
            about = _stat(path)
            listing.update(f"{name}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
        return {"listing": listing.hexdigest()}

    def chunks(self) -> Iterator[bytes]:
        for name, path in self.files:
            yield f"{name}\0{_stat(path).st_size}\n".encode()
            yield from _chunks(path)

    @contextmanager
    def open(self, spec: TableSpec, limits: TableLimits, intake: IntakeLimits) -> Iterator[Table]:  # noqa: ARG002
        most = limits.max_image_bytes + 1
        images = [(name, partial(self._read, path, most)) for name, path in self.files]
        yield ImageTable(self.name, images, limits, intake, several=True)

    def _read(self, path: Path, max_bytes: int) -> bytes:
        with _open(path) as file:
            data = file.read(max_bytes)
        self._bytes_read += len(data)
        return data

    @property
    def bytes_read(self) -> int:
        return self._bytes_read


def find_table(paths: Sequence[Path]) -> LocalTable:
    """The table that these paths are: one file, or the images of several and of folders."""
    return TableFile(paths[0]) if len(paths) == 1 and not paths[0].is_dir() else ImageFiles(paths)


def _walk(folder: Path) -> list[Path]:
    """All files of a folder and the folders in it, except what a tool or a desktop put there."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=_refuse):
        here = Path(place).relative_to(folder)
        folders[:] = [name for name in folders if not is_left_out((*here.parts, name))]
        found += [Path(place, name) for name in files if not is_left_out((*here.parts, name))]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())


def _chunks(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(error) from error


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(error) from error


def _refuse(error: OSError) -> None:
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> UsageError:
    reason = f"{error.filename}: cannot be read: {error.strerror}"
    return UsageError(reason, hint="Check the path and your rights to it.")


def _text(name: str) -> str:
    """The name as text: a file system's names may be any bytes."""
    return os.fsencode(name).decode("utf-8", "replace")
