"""Images as small as they can be, and archives of them."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib


def png(width: int, height: int, more: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", more) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def gif(width: int, height: int) -> bytes:
    colours = b"\0\0\0\xff\xff\xff"
    comment = b"\x21\xfe\x03abc\0"
    pixels = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0x80) + colours + b"\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HHB", width, height, 0x80) + b"\0\0" + colours + comment + pixels + b";"


def jpeg(width: int, height: int) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", 12) + b"Exif\0\0\xff\xc0\xff\xd9"  # markers inside a segment are none
    tables = b"\xff\xff\xdb" + struct.pack(">H", 5) + b"abc"
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + b"\0" * 9
    scan = b"\xff\xda" + struct.pack(">H", 12) + b"\0" * 10 + b"pixels"
    return b"\xff\xd8" + exif + tables + frame + scan + b"\xff\xd9"


def webp(kind: bytes, body: bytes) -> bytes:
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def webp_lossy(width: int, height: int) -> bytes:
    return webp(b"VP8 ", b"\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", width, height) + b"\0" * 8)


def webp_lossless(width: int, height: int) -> bytes:
    return webp(b"VP8L", b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0" * 8)


def webp_extended(width: int, height: int) -> bytes:
    return webp(b"VP8X", b"\x10\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little"))


def archive(*files: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as zipped:
        for name, content in files:
            zipped.writestr(zipfile.ZipInfo(name), content, method)
    return out.getvalue()
