"""Encoding and delimiter of a CSV file, found from its first bytes."""

from __future__ import annotations

import codecs
import csv
import io
import re
from itertools import islice

from penstock.intake.explain import quoted
from penstock.intake.refusal import IntakeRefused

SAMPLE_BYTES = 64 * 1024
_SAMPLE_RECORDS = 200
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
_DELIMITERS = (",", ";", "\t", "|")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_NO_CHARSETS = {"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7"}
"""What Python can decode from bytes to text, although nobody's file is written in it."""


def find_encoding(sample: bytes, stated: str | None, name: str) -> tuple[str, int]:
    """The encoding of a file, and how many bytes its byte order mark takes. A mark wins over what is stated."""
    for mark, encoding in _BOMS.items():
        if sample.startswith(mark):
            return encoding, len(mark)
    if stated is not None:
        return _check_encoding(stated, name), 0
    try:
        codecs.getincrementaldecoder("utf-8")().decode(sample)  # a character may be cut at the sample's end
    except UnicodeDecodeError as error:
        return _older_encoding(sample, error, name), 0
    return "utf-8", 0


def _check_encoding(stated: str, name: str) -> str:
    try:
        encoding = codecs.lookup(stated).name
        io.TextIOWrapper(io.BytesIO(), encoding)  # base64 and the like are codecs, and not of text
    except (LookupError, ValueError):
        encoding = "undefined"
    if encoding in _NO_CHARSETS:
        raise IntakeRefused(
            f"{name}: `encoding` is {quoted(stated)}, which is not the name of a text encoding",
            hint="For example utf-8, cp1252, iso-8859-15, utf-16-le or shift_jis.",
        )
    return encoding


def _older_encoding(sample: bytes, error: UnicodeDecodeError, name: str) -> str:
    """What a file is taken for whose beginning is not UTF-8."""
    try:
        sample.decode("cp1252")
    except UnicodeDecodeError:
        plausible = False
    else:
        plausible = not _CONTROL.search(sample)
    if not plausible:
        raise IntakeRefused(
            f"{name}: byte {error.start + 1:,} (0x{sample[error.start]:02x}) is not valid UTF-8, "
            "and the text is not Windows-1252 either",
            code="unsupported_format",
            hint="Save the file as UTF-8, or state its `encoding`.",
        )
    return "cp1252"


def find_delimiter(sample: str, *, whole: bool) -> str:
    """The delimiter that splits most records into as many cells as the header has.

    A delimiter that splits the header goes before one that does not. `whole` says that the sample does not end in the
    middle of a record.
    """
    scores = {delimiter: _score(sample, delimiter, whole) for delimiter in _DELIMITERS}
    return max(_DELIMITERS, key=scores.__getitem__)


def _score(sample: str, delimiter: str, whole: bool) -> tuple[bool, float, int]:
    reader = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
    try:
        records = list(islice(reader, _SAMPLE_RECORDS))
    except csv.Error:  # of a field limit that the process has lowered
        return False, 0, 0
    if not whole and 1 < len(records) < _SAMPLE_RECORDS:
        records.pop()
    widths = [len(record) for record in records if "".join(record).strip()]
    if not widths:
        return False, 0, 0
    return widths[0] > 1, widths.count(widths[0]) / len(widths), widths[0]
