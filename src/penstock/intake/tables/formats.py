"""Formats of tables: a file's content decides, then its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import BinaryIO

from penstock.config import IntakeLimits, TableLimits
from penstock.intake.refusal import IntakeRefused
from penstock.intake.tables.archive import open_archive
from penstock.intake.tables.csv_table import CsvTable
from penstock.intake.tables.image_table import ImageTable, from_archive
from penstock.intake.tables.jsonl_table import JsonlTable
from penstock.intake.tables.magic import HEAD_BYTES, OLE, foreign_type, image_type, is_packed, is_zip, looks_like
from penstock.intake.tables.table import Table, TableSpec
from penstock.intake.tables.xlsx_table import XlsxTable

_CSV = {".csv", ".tsv", ".txt"}
_JSONL = {".jsonl", ".ndjson"}
_PACKED = {".gz", ".zst"}
_EXPECTED = "Expected .csv, .tsv, .txt, .jsonl, .ndjson (or .gz, .zst of them), .xlsx, an image, or a .zip of images."
_ENCRYPTED_PACKAGE = "EncryptedPackage".encode("utf-16-le")


@contextmanager
def open_table(
    file: BinaryIO, name: str, spec: TableSpec, limits: TableLimits, intake: IntakeLimits
) -> Iterator[Table]:
    """The table that a file holds. `file` is seekable and stays open until the table is done with."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    if is_zip(head):
        archive = open_archive(file, name, limits)
        if any(entry.startswith("xl/") for entry in archive.namelist()):
            with closing(XlsxTable(file, name, spec, limits)) as sheet:
                yield sheet
        elif _ending(name) == ".xlsx":
            raise _refusal(name, "not a workbook: the archive has no xl/ folder", "Save it again as .xlsx.")
        else:
            yield from_archive(archive, name, limits, intake)
    elif image_type(head):
        yield ImageTable(name, [(name, partial(_read_whole, file, limits.max_image_bytes + 1))], limits, intake)
    elif head.startswith(OLE):
        raise _old_office(file, head, name)
    else:
        yield _open_text(file, name, head, spec, limits, intake)


def _read_whole(file: BinaryIO, max_bytes: int) -> bytes:
    file.seek(0)
    return file.read(max_bytes)


def _open_text(
    file: BinaryIO, name: str, head: bytes, spec: TableSpec, limits: TableLimits, intake: IntakeLimits
) -> Table:
    ending = _ending(name)
    if not head and ending not in _CSV | _JSONL:
        raise IntakeRefused(f"{name}: the file is empty", code="empty_file", hint=_EXPECTED)
    if not is_packed(head) and (kind := foreign_type(head)):
        raise _refusal(name, f"looks like {kind}", _EXPECTED)
    file.seek(0)
    if ending in _CSV:
        return CsvTable(file, name, spec, limits, intake)
    if ending in _JSONL:
        return JsonlTable(file, name, spec, limits, intake)
    found = f"the name ends in {ending}" if ending else "the name has no ending"
    raise _refusal(name, f"{found}, and the content looks like {looks_like(head)}", _EXPECTED)


def _ending(name: str) -> str:
    path = PurePosixPath(name.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in _PACKED else path.suffix


def _old_office(file: BinaryIO, head: bytes, name: str) -> IntakeRefused:
    # Sectors of 2^n bytes follow a header of one sector; the directory names the streams that the file holds.
    sector_bytes = 1 << min(int.from_bytes(head[30:32], "little"), 16)
    file.seek((int.from_bytes(head[48:52], "little") + 1) * sector_bytes)
    if _ENCRYPTED_PACKAGE in file.read(16 * 1024):
        return _refusal(name, "the workbook is protected with a password", "Save it without the password.")
    return _refusal(name, "an old Office file (.xls, .doc)", "Open it and save it as .xlsx or CSV.")


def _refusal(name: str, reason: str, hint: str) -> IntakeRefused:
    return IntakeRefused(f"{name}: {reason}", code="unsupported_format", hint=hint)
