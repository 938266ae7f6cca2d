"""Files of the console: read from the package as they are, and kept in memory until they change on the disk."""

from __future__ import annotations

import gzip
import hashlib
import re
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"

# No part of a name begins with a dot: there is no way up, and no hidden file.
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_MAX_NAME_CHARS: Final = 200
_MEDIA: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_PACKED: Final = {".html", ".js", ".css", ".svg", ".json", ".txt"}
_IMPORT_MAP: Final = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of the console, as it is sent."""

    content: bytes
    packed: bytes | None
    """The same, gzipped, if that is shorter."""
    media: str
    etag: str
    stamp: tuple[int, int]
    """Time of the last change and size, by which a changed file is known."""


class StaticFiles:
    """Files below a directory. A name that is none of them has no file: there is no page in its place."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._files: dict[str, StaticFile] = {}

    def find(self, name: str) -> StaticFile | None:
        """The file of a name, which is a path below the directory; None if there is none that a browser may have."""
        if len(name) > _MAX_NAME_CHARS or not _NAME.fullmatch(name):
            return None
        path = self._root / name
        media = _MEDIA.get(path.suffix)
        if media is None or not path.is_file():
            return None
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._files.get(name)
        if known is None or known.stamp != stamp:
            known = self._files[name] = _read(path, media, stamp)
        return known


def import_map_hash(page: bytes) -> str | None:
    """The source expression by which a content security policy allows the import map of a page, its only inline
    script; None if it has none."""
    found = _IMPORT_MAP.search(page)
    return f"'sha256-{b64encode(hashlib.sha256(found[1]).digest()).decode()}'" if found else None


def _read(path: Path, media: str, stamp: tuple[int, int]) -> StaticFile:
    content = path.read_bytes()
    packed = gzip.compress(content, mtime=0) if path.suffix in _PACKED else content
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return StaticFile(content, packed if len(packed) < len(content) else None, media, etag, stamp)
