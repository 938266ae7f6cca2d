"""Width and height of an image, from its header; and whether it goes on to its end."""

from __future__ import annotations

import struct

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset(range(0xD0, 0xDA)) | {0x01}
_GIF_EXTENSION, _GIF_IMAGE, _GIF_END = 0x21, 0x2C, 0x3B


def image_size(data: bytes, media_type: str) -> tuple[int, int]:
    """Width and height in pixels. Raises ValueError if the header does not say."""
    try:
        width, height = _SIZES[media_type](data)
    except (struct.error, IndexError):
        raise ValueError("its header is cut short") from None
    if not width or not height:
        raise ValueError("its header says that it has no pixels")
    return width, height


def check_whole(data: bytes, media_type: str) -> None:
    """Look for the image's end, without decoding it. Raises ValueError if it is not there."""
    try:
        whole = _ENDS[media_type](data)
    except (struct.error, IndexError):
        whole = False
    if not whole:
        raise ValueError("it is cut short")


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise ValueError("its header is damaged")
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _png_ends(data: bytes) -> bool:
    at, kind = 8, b""
    while kind != b"IEND":
        length, kind = struct.unpack_from(">I4s", data, at)
        at += 12 + length
    return at <= len(data)


def _gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _gif_ends(data: bytes) -> bool:
    at = 13 + _gif_colours_bytes(data[10])
    while data[at] != _GIF_END:
        if data[at] == _GIF_EXTENSION:
            at += 2
        elif data[at] == _GIF_IMAGE:
            at += 11 + _gif_colours_bytes(data[at + 9])
        else:
            raise ValueError("a block of it is damaged")
        while data[at]:
            at += 1 + data[at]
        at += 1
    return True


def _gif_colours_bytes(flags: int) -> int:
    """Size of the table of colours that follows, if one does."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _jpeg(data: bytes) -> tuple[int, int]:
    height, width = struct.unpack_from(">HH", data, _find_frame(data) + 5)
    return width, height


def _jpeg_ends(data: bytes) -> bool:
    # A preview has an end of its own, but lies before the frame; in the frame's data, 0xFF is followed by other bytes.
    return data.find(b"\xff\xd9", _find_frame(data)) >= 0


def _find_frame(data: bytes) -> int:
    """Place of the marker that begins the frame."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise ValueError("its header is damaged")
        marker = data[at + 1]
        if marker in _START_OF_FRAME:
            return at
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        else:
            at += 2 + max(2, struct.unpack_from(">H", data, at + 2)[0])


def _webp(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + struct.unpack_from("<I", data, 26)[0] // 256
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise ValueError("its header is damaged")


def _webp_ends(data: bytes) -> bool:
    (size,) = struct.unpack_from("<I", data, 4)
    return 8 + int(size) <= len(data)


_SIZES = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}
_ENDS = {"image/png": _png_ends, "image/jpeg": _jpeg_ends, "image/gif": _gif_ends, "image/webp": _webp_ends}
