"""File to be submitted: read from disk piece by piece, unpacked on the way."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

from penstock.config import IntakeLimits
from penstock.errors import UsageError
from penstock.intake.source import Source as Reader
from penstock.intake.unpack import Unpacker

_BOM = b"\xef\xbb\xbf"
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")


class Source:
    """File that can be read as often as needed, piece by piece. Only one piece is in memory."""

    def __init__(self, path: Path) -> None:
        if str(path) == "-":
            raise UsageError(
                "standard input cannot be read twice, as an upload that was cut needs it",
                hint="Save the stream to a file first.",
            )
        self._path = path
        self._limits = IntakeLimits()
        reader = Reader(path)
        try:
            size = reader.size
            if size is None:
                raise UsageError(f"{path} is not a regular file", hint="Save the stream to a file first.")
            self.size: int = size
            packed = next(reader.chunks(), b"").startswith(_COMPRESSED)
        finally:
            reader.close()
        self.plain_size = None if packed else size
        """Bytes that will be sent, if known beforehand."""

    @property
    def filename(self) -> str:
        return os.fsencode(self._path.name).decode("utf-8", "replace")

    def chunks(self) -> Generator[bytes]:
        """The bytes as they lie on disk."""
        reader = Reader(self._path)
        try:
            yield from reader.chunks()
        finally:
            reader.close()

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        """(unpacked bytes, bytes read from disk so far)."""
        unpacker, read = Unpacker(str(self._path), self._limits), 0
        with closing(self.chunks()) as chunks:
            for chunk in chunks:
                read += len(chunk)
                for piece in unpacker.feed(chunk):
                    yield piece, read
            for piece in unpacker.finish():
                yield piece, read

    def endpoint(self) -> str:
        """Endpoint of the first line; all others must have the same."""
        number, line = self._first_line()
        place = f"{self._path}, line {number}"
        hint = "A line is a JSON object with custom_id, url and body; docs/client.md shows one. Or give --endpoint."
        try:
            request = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{place}: not valid JSON: {error}", hint=hint) from error
        url = request.get("url") if isinstance(request, dict) else None
        if not isinstance(url, str) or not url:
            raise UsageError(f"{place}: has no url", hint=hint)
        return url

    def _first_line(self) -> tuple[int, bytes]:
        """The first line that is not blank, with its number."""
        held, number = b"", 1
        for piece, _ in self.pieces():
            held = (held + piece).removeprefix(_BOM)
            while b"\n" in held:
                line, _, held = held.partition(b"\n")
                if line.strip():
                    return number, line
                number += 1
            if len(held) > self._limits.max_line_bytes:
                raise UsageError(
                    f"{self._path}, line {number}: longer than {self._limits.max_line_bytes:,} bytes",
                    hint="Is it JSONL, one request per line?",
                )
        if held.strip():
            return number, held
        raise UsageError(f"{self._path}: holds no request", hint="Write one request per line.")
