"""Takes a file's bytes as they come and gives back what they contain: plain, gzip or zstd.

A push decoder: no I/O of its own. What it gives back is bounded piece by piece, so that a small
file made to expand without end is refused before it takes memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import zstandard

from penstock.config import IntakeLimits
from penstock.intake.pace import keep_pace
from penstock.intake.refusal import IntakeRefused

PIECE_BYTES = 128 * 1024
_RATIO_FROM_BYTES = 16 * 1024 * 1024
"""A ratio says nothing about a small file: ten thousand equal lines compress a thousandfold."""
_ZSTD_INPUT_BYTES = 512
"""Four bytes of zstd can stand for 128 KiB, and its decoder takes no output bound: feed it little."""
_MAGIC_BYTES = 6
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte of any value
_FOREIGN = {
    b"PK\x03\x04": "a zip archive or a spreadsheet",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


class Unpacker:
    """Recognises the format by its first bytes, decodes it, and enforces the size limits."""

    def __init__(self, name: str, limits: IntakeLimits, *, foreign: Mapping[bytes, str] = _FOREIGN) -> None:
        """`foreign` says which first bytes are refused, and what they stand for."""
        self._name = name
        self._limits = limits
        self._foreign = foreign
        self._codec: _Plain | None = None
        self._start = b""
        self._bytes_in = 0
        self._bytes_out = 0

    def feed(self, raw: bytes) -> Iterator[bytes]:
        self._bytes_in += len(raw)
        if self._codec is None:
            self._start += raw
            if len(self._start) < _MAGIC_BYTES:
                return
            self._codec, raw = self._recognise(), self._start
        yield from self._decode(self._codec, raw)

    def finish(self) -> Iterator[bytes]:
        if self._codec is None:
            self._codec = self._recognise()
            yield from self._decode(self._codec, self._start)
        if not self._codec.whole():
            raise IntakeRefused(
                f"{self._name}: the compressed data ends in the middle, at byte {self._bytes_in:,}",
                code="corrupt_file",
                hint="The file was cut short: fetch or compress it again.",
            )

    def _recognise(self) -> _Plain:
        start = self._start
        for magic, kind in self._foreign.items():
            if start.startswith(magic):
                raise IntakeRefused(
                    f"{self._name}: looks like {kind}; expected JSON Lines in UTF-8, plain, gzip or zstd",
                    code="unsupported_format",
                    hint="Save it as text in UTF-8, one JSON object per line.",
                )
        if start.startswith(_GZIP):
            return _Gzip()
        if start.startswith(_ZSTD) or start[1:4] == _ZSTD_SKIPPABLE:
            return _Zstd()
        return _Plain()

    def _decode(self, codec: _Plain, raw: bytes) -> Iterator[bytes]:
        try:
            for piece in codec.feed(raw):
                self._bytes_out += len(piece)
                self._check_size()
                keep_pace()
                yield piece
        except (zlib.error, zstandard.ZstdError) as error:
            raise IntakeRefused(
                f"{self._name}: the compressed data is damaged near byte {self._bytes_in:,}: {error}",
                code="corrupt_file",
                hint="Fetch or compress the file again.",
            ) from error

    def _check_size(self) -> None:
        size, limits = self._bytes_out, self._limits
        if size > limits.max_file_bytes:
            raise IntakeRefused(
                f"{self._name}: more than {limits.max_file_bytes:,} bytes (max_file_bytes)",
                code="file_too_large",
                hint="Split the file, or raise max_file_bytes.",
            )
        if size > _RATIO_FROM_BYTES and size > self._bytes_in * limits.max_compression_ratio:
            raise IntakeRefused(
                f"{self._name}: expands more than {limits.max_compression_ratio:,} times (max_compression_ratio)",
                code="file_too_large",
                hint="Submit the file uncompressed, or raise max_compression_ratio.",
            )


def unpack(file: BinaryIO, unpacker: Unpacker) -> Iterator[bytes]:
    """What the file contains, piece by piece."""
    while raw := file.read(PIECE_BYTES):
        yield from unpacker.feed(raw)
    yield from unpacker.finish()


class _Plain:
    """Codec of plain bytes, from which the others derive."""

    def feed(self, raw: bytes) -> Iterator[bytes]:
        yield raw

    def whole(self) -> bool:
        """Whether the input may end here."""
        return True


class _Gzip(_Plain):
    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)
        self._between = False

    def feed(self, raw: bytes) -> Iterator[bytes]:
        while True:
            if self._between:
                raw = raw.lstrip(b"\0")  # tape and block writers pad with zeros
                if not raw:
                    return
                self._member = zlib.decompressobj(wbits=31)
                self._between = False
            piece = self._member.decompress(raw, PIECE_BYTES)
            if piece:
                yield piece
            self._between = self._member.eof
            raw = self._member.unused_data if self._between else self._member.unconsumed_tail
            if not raw and len(piece) < PIECE_BYTES:
                return

    def whole(self) -> bool:
        return self._between


class _Zstd(_Plain):
    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor()
        self._frame = self._decoder.decompressobj()

    def feed(self, raw: bytes) -> Iterator[bytes]:
        for at in range(0, len(raw), _ZSTD_INPUT_BYTES):
            part = raw[at : at + _ZSTD_INPUT_BYTES]
            while part:
                if self._frame.eof:
                    self._frame = self._decoder.decompressobj()
                output = self._frame.decompress(part)
                for start in range(0, len(output), PIECE_BYTES):
                    yield output[start : start + PIECE_BYTES]
                part = self._frame.unused_data if self._frame.eof else b""

    def whole(self) -> bool:
        return self._frame.eof
