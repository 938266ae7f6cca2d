"""Images in, rows out: one image, several, or a zip of them. A row says what is known of its image."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import PurePosixPath

import msgspec

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.explain import quoted
from penstock.intake.pace import keep_pace
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.columns import summarise
from penstock.intake.tables.image_size import check_whole, image_size
from penstock.intake.tables.magic import HEAD_BYTES, image_type, is_zip, looks_like
from penstock.intake.tables.table import Blob, TableRow

_ENCRYPTED = 0x1
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""Others take memory as the archive says, before anything of it is unpacked."""
_LITTER = {"__macosx", "thumbs.db", "desktop.ini"}
_EXPECTED = "Expected PNG, JPEG, GIF or WebP."
_encode = msgspec.json.Encoder().encode

Read = Callable[[], bytes]
"""Reads an image, or more than `max_image_bytes` of it."""


class ImageTable:
    """Images that are being read, one at a time."""

    columns: tuple[str, ...] = ("path", "name", "media_type", "bytes", "width", "height", "sha256")

    def __init__(
        self,
        name: str,
        images: Sequence[tuple[str, Read]],
        limits: TableLimits,
        intake: IntakeLimits,
        *,
        several: bool = False,
    ) -> None:
        """`several` if the images are files of their own, among which a table may have come."""
        self._name = name
        self._images = images
        self._max_image_bytes = limits.max_image_bytes
        self._max_side = limits.max_image_side
        self._rule = "; several files at once must be images" if several else ""
        if not images:
            raise IntakeRefused(f"{name}: holds no images", code="empty_file", hint=_EXPECTED)
        if len(images) > limits.max_images:
            raise IntakeRefused(
                f"{name}: {len(images):,} images; more than {limits.max_images:,} (max_images)",
                code="file_too_large",
                hint="Split them into several jobs, or raise max_images.",
            )
        for path, count in Counter(path for path, _ in images).items():
            self._check_path(path, count, intake)

    def rows(self) -> Iterator[TableRow]:
        for path, read in self._images:
            keep_pace()
            data = read()
            if len(data) > self._max_image_bytes:
                raise self._refusal(path, *_too_large(self._max_image_bytes))
            yield self._row(path, data)

    def _row(self, path: str, data: bytes) -> TableRow:
        media_type = image_type(data)
        if media_type is None:
            raise self._not_an_image(path, data)
        try:
            width, height = image_size(data, media_type)
            check_whole(data, media_type)
        except ValueError as error:
            raise self._refusal(path, f"damaged: {error}", "Save the image again.", "corrupt_file") from None
        if max(width, height) > self._max_side:
            reason = f"{width:,} x {height:,} pixels; more than {self._max_side:,} on a side (max_image_side)"
            raise self._refusal(path, reason, "Save the image again, smaller; or raise max_image_side.")
        sha256 = hashlib.sha256(data).hexdigest()
        values = (path, PurePosixPath(path).name, media_type, len(data), width, height, sha256)
        row = dict(zip(self.columns, values, strict=True))
        blob = Blob(sha256, data, media_type)
        return TableRow(_encode({"row": row, "raw": None}), summarise({"path": path}), path, blob)

    def _not_an_image(self, path: str, data: bytes) -> IntakeRefused:
        if is_zip(data):
            unpack = "Unpack it first: archives in archives, or among other files, are not read."
            return self._refusal(path, "a zip archive inside the upload", unpack)
        reason = f"not an image; it looks like {looks_like(data[:HEAD_BYTES])}{self._rule}"
        return self._refusal(path, reason, f"{_EXPECTED} Leave other files out, or name the images alone.")

    def _check_path(self, path: str, count: int, intake: IntakeLimits) -> None:
        rename = "Rename the file."
        if not 0 < len(path) <= intake.max_custom_id_chars:
            most = f"{intake.max_custom_id_chars:,} characters (max_custom_id_chars)"
            raise self._refusal(path, f"a path of {len(path):,} characters; expected 1 to {most}", rename)
        if not path.isprintable():
            raise self._refusal(path, "a path with control characters", rename)
        if count > 1:
            raise self._refusal(path, f"{count:,} images have this path", "Give each image a path of its own.")

    def _refusal(self, path: str, reason: str, hint: str, code: str = "invalid_request") -> IntakeRefused:
        place = quoted(path) if path == self._name else f"{self._name}: {quoted(path)}"
        return IntakeRefused(f"{place}: {reason}", code=code, hint=hint)


def from_archive(archive: zipfile.ZipFile, name: str, limits: TableLimits, intake: IntakeLimits) -> ImageTable:
    """Images in a zip, in the order of their paths."""
    images: list[tuple[str, Read]] = []
    for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
        path = entry.filename.replace("\\", "/")
        parts = PurePosixPath(path).parts
        if entry.is_dir() or is_left_out(parts):
            continue
        if fault := _entry_fault(path, parts, entry, limits):
            raise IntakeRefused(f"{name}: {quoted(path)}: {fault[0]}", hint=fault[1])
        images.append((path, partial(_read_entry, archive, entry, name)))
    return ImageTable(name, images, limits, intake)


def is_left_out(parts: Sequence[str]) -> bool:
    """Whether a path is hidden, or a tool or a desktop put it there, and no person."""
    hidden = any(part.startswith(".") and part != ".." for part in parts)
    return hidden or not _LITTER.isdisjoint((parts[0].lower(), parts[-1].lower()))


def _entry_fault(
    path: str, parts: Sequence[str], entry: zipfile.ZipInfo, limits: TableLimits
) -> tuple[str, str] | None:
    """Reason and remedy of an entry that is not even read."""
    if path.startswith("/") or ".." in parts or path[1:2] == ":":
        return "a path that leads out of the archive", "Make the archive from inside its folder."
    if entry.flag_bits & _ENCRYPTED:
        return "encrypted", "Make the archive without a password."
    if entry.compress_type not in _METHODS:
        return f"compressed by method {entry.compress_type}", "Make the archive with the usual method, deflate."
    if entry.file_size > limits.max_image_bytes:
        return _too_large(limits.max_image_bytes)
    return None


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> bytes:
    """The entry's bytes. zipfile gives no more than the directory declares, and checks them against its checksum."""
    try:
        with archive.open(entry) as file:
            return file.read(entry.file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise IntakeRefused(
            f"{name}: {quoted(entry.filename)}: damaged: {error}",
            code="corrupt_file",
            hint="The archive may be cut short or made wrongly: make it again.",
        ) from error


def _too_large(max_image_bytes: int) -> tuple[str, str]:
    return f"larger than {max_image_bytes:,} bytes (max_image_bytes)", "Scale the image down, or raise max_image_bytes."
