"""First bytes of a file, and what they say about it."""

from __future__ import annotations

HEAD_BYTES = 512
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""The container of old Office files, and of new ones with a password."""

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
"""A zip's first entry, or the end of one that has none."""
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte of any value
_IMAGES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_FOREIGN = {
    **dict.fromkeys(_ZIP, "a zip archive"),
    OLE: "an old Office file, or one with a password",
    b"%PDF-": "a PDF document",
    _GZIP: "gzip",
    _ZSTD: "zstd",
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
    b"\xfd7zXZ\x00": "xz",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"PAR1\x15": "Parquet",
    b"II*\x00": "a TIFF image",
    b"MM\x00*": "a TIFF image",
}
_BRANDS = {b"heic": "a HEIC image", b"heix": "a HEIC image", b"mif1": "a HEIF image", b"avif": "an AVIF image"}


def is_zip(head: bytes) -> bool:
    return head.startswith(_ZIP)


def is_packed(head: bytes) -> bool:
    """Whether it is text that was compressed, which Unpacker reads."""
    return head.startswith((_GZIP, _ZSTD)) or head[1:4] == _ZSTD_SKIPPABLE


def image_type(head: bytes) -> str | None:
    """Media type of an image that can be taken, or None."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((media_type for magic, media_type in _IMAGES.items() if head.startswith(magic)), None)


def foreign_type(head: bytes) -> str | None:
    """What a file is that is neither text nor an image that can be taken, if its first bytes say so."""
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return "a BMP image"
    if head[:3] == bytes(3) and head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:12], "a video")
    return next((kind for magic, kind in _FOREIGN.items() if head.startswith(magic)), None)


def looks_like(head: bytes) -> str:
    """What a file that was not expected looks like, for a message."""
    if kind := image_type(head) or foreign_type(head):
        return kind
    if not head:
        return "an empty file"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:200].lower()
    if b"<svg" in start:
        return "an SVG image"
    if start.startswith((b"<!doctype html", b"<html")):
        return "HTML"
    if start.startswith(b"<?xml"):
        return "XML"
    return "unknown data" if b"\0" in head else "text"
