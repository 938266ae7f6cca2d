"""ZIP archive written front to back: nothing is kept but a few numbers per part, and nothing is gone back to."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

IN_64_BITS = 0xFFFF_FFFF
"""What stands in a 32-bit field for a number that is in a 64-bit one elsewhere: every larger number, and this one."""
MAX_PART_BYTES = IN_64_BITS - 1
"""Longest part. Whether a part has 64-bit sizes is said in its header, before its size is known: all parts would have
to say so, and Excel refuses most files that do (Apache's COMPRESS-474)."""

_LEVEL = 2
"""Measured on sheets: level 6 makes them a seventh smaller, and takes 60 % more time for the whole export."""
_DEFLATED = 8
_SIZES_FOLLOW = 1 << 3
_1980_01_01 = 0x21
"""Earliest date of the format: the same content gives the same bytes."""
_VERSION, _VERSION_64 = 20, 45

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_OFFSET_64 = struct.Struct("<2HQ")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")


class _Part(NamedTuple):
    name: bytes
    offset: int
    crc: int
    deflated_bytes: int
    plain_bytes: int


class ZipStream:
    """ZIP archive under way: every method gives the bytes to send next. Offsets from `zip64_offset` on are written in
    64 bits, as an archive beyond 4 GiB needs them."""

    def __init__(self, *, zip64_offset: int = IN_64_BITS) -> None:
        self._zip64_offset = zip64_offset
        self._parts: list[_Part] = []
        self._offset = 0
        self.part_bytes = 0
        """Bytes written into the open part, before compression."""

    def add(self, name: str, content: bytes) -> bytes:
        """Write a whole part."""
        return self.open(name) + self.write(content) + self.close()

    def open(self, name: str) -> bytes:
        """Begin a part; its name is ASCII."""
        self._name = name.encode("ascii")
        self._start = self._offset
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._crc = self._deflated_bytes = self.part_bytes = 0
        header = _LOCAL_HEADER.pack(
            b"PK\3\4", _VERSION, _SIZES_FOLLOW, _DEFLATED, 0, _1980_01_01, 0, 0, 0, len(self._name), 0
        )
        return self._count(header + self._name)

    def write(self, content: bytes) -> bytes:
        """Write into the open part."""
        self._crc = zlib.crc32(content, self._crc)
        self.part_bytes += len(content)
        return self._count_deflated(self._deflate.compress(content))

    def close(self) -> bytes:
        """End the open part."""
        rest = self._count_deflated(self._deflate.flush())
        if max(self.part_bytes, self._deflated_bytes) > MAX_PART_BYTES:
            raise AssertionError(f"{self._name.decode()} has {self.part_bytes} bytes, more than {MAX_PART_BYTES}")
        part = _Part(self._name, self._start, self._crc, self._deflated_bytes, self.part_bytes)
        self._parts.append(part)
        return rest + self._count(_DESCRIPTOR.pack(b"PK\7\x08", part.crc, part.deflated_bytes, part.plain_bytes))

    def end(self) -> bytes:
        """Write the directory, which ends the archive."""
        directory = b"".join(map(self._directory_entry, self._parts))
        start, size, count = self._offset, len(directory), len(self._parts)
        ends = b""
        shown_start = start
        if start >= self._zip64_offset:
            shown_start = IN_64_BITS
            ends = _END_64.pack(
                b"PK\6\6", _END_64.size - 12, _VERSION_64, _VERSION_64, 0, 0, count, count, size, start
            ) + _LOCATOR_64.pack(b"PK\6\7", 0, start + size, 1)
        ends += _END.pack(b"PK\5\6", 0, 0, count, count, size, shown_start, 0)
        return self._count(directory + ends)

    def _directory_entry(self, part: _Part) -> bytes:
        version, offset, extra = _VERSION, part.offset, b""
        if offset >= self._zip64_offset:
            version, offset, extra = _VERSION_64, IN_64_BITS, _OFFSET_64.pack(1, 8, offset)
        sizes = (part.crc, part.deflated_bytes, part.plain_bytes, len(part.name), len(extra))
        header = _CENTRAL_HEADER.pack(
            b"PK\1\2", version, version, _SIZES_FOLLOW, _DEFLATED, 0, _1980_01_01, *sizes, 0, 0, 0, 0, offset
        )
        return header + part.name + extra

    def _count_deflated(self, content: bytes) -> bytes:
        self._deflated_bytes += len(content)
        return self._count(content)

    def _count(self, content: bytes) -> bytes:
        self._offset += len(content)
        return content
