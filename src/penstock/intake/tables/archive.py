"""Zip archives: opened only if their directory is of a sensible size, and what it declares is within the limits."""

from __future__ import annotations

import zipfile
from typing import BinaryIO

from penstock.config import MIB, TableLimits
from penstock.intake.explain import quoted
from penstock.intake.refusal import IntakeRefused

_ENTRY = b"PK\x01\x02"
_MAX_ENTRY_BYTES = 1024
"""Bytes of the directory that an entry may take on average: its name, and what some tools add."""
_END_BYTES = 64 * 1024 + 64
"""The end record with its comment takes no more: a larger read, while an archive is opened, is of its directory."""
_RATIO_FROM_BYTES = MIB
"""A ratio says nothing about a small file."""


class _BoundedDirectory:
    """File whose zip directory is not read if it is too large: zipfile makes an object of every entry."""

    def __init__(self, file: BinaryIO, name: str, max_entries: int) -> None:
        self._file = file
        self._name = name
        self._max_entries = max_entries
        self.opened = False
        self.seek = file.seek
        self.tell = file.tell

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        if self.opened or size <= _END_BYTES:
            return self._file.read(size)
        if size > self._max_entries * _MAX_ENTRY_BYTES:
            raise _too_many(self._name, self._max_entries)
        directory = self._file.read(size)
        if directory.count(_ENTRY) > self._max_entries:
            raise _too_many(self._name, self._max_entries)
        return directory


def open_archive(file: BinaryIO, name: str, limits: TableLimits) -> zipfile.ZipFile:
    """The archive. Raises IntakeRefused if it is damaged, or holds more than the limits allow."""
    bounded = _BoundedDirectory(file, name, limits.max_zip_entries)
    try:
        archive = zipfile.ZipFile(bounded)
        bounded.opened = True
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise IntakeRefused(
            f"{name}: the zip archive is damaged: {error}",
            code="corrupt_file",
            hint="The file may be cut short: fetch or make it again.",
        ) from error
    entries = archive.infolist()
    if len(entries) > limits.max_zip_entries:
        raise _too_many(name, limits.max_zip_entries)
    for entry in entries:
        if entry.file_size > max(entry.compress_size * limits.max_zip_ratio, _RATIO_FROM_BYTES):
            raise IntakeRefused(
                f"{name}: {quoted(entry.filename)} expands more than {limits.max_zip_ratio:,} times (max_zip_ratio)",
                code="file_too_large",
                hint="Make the archive without compression, or raise max_zip_ratio.",
            )
    if sum(entry.file_size for entry in entries) > limits.max_unpacked_bytes:
        raise too_large(name, limits)
    return archive


def too_large(name: str, limits: TableLimits) -> IntakeRefused:
    return IntakeRefused(
        f"{name}: more than {limits.max_unpacked_bytes:,} bytes when unpacked (max_unpacked_bytes)",
        code="file_too_large",
        hint="Split the file, or raise max_unpacked_bytes.",
    )


def _too_many(name: str, max_entries: int) -> IntakeRefused:
    return IntakeRefused(
        f"{name}: more than {max_entries:,} files in the archive (max_zip_entries)",
        code="file_too_large",
        hint="Split the archive, or raise max_zip_entries.",
    )
