"""Source of an adapter: lists files and reads them, the same way whether it is a folder, a store or a server.

What a source says about itself names no host and no credential: tenants read it too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

from penstock.errors import PenstockError, UsageError

PAGE_FILES = 1_000
"""Files listed at once."""


class FoundFile(NamedTuple):
    """File in a source."""

    path: str
    """Path below the root, with `/` between its parts."""
    version: str
    """Text that changes whenever the content does."""
    size: int


class SourceUnavailable(PenstockError):  # noqa: N818 - the state of another machine
    """The source cannot be listed or read now, none of its files."""


class FileNotReady(PenstockError):  # noqa: N818 - the state of the file
    """One file cannot be read now: it changed, or is gone, or another program has it. A later scan looks again."""


class FileUnreadable(UsageError):  # noqa: N818 - a verdict on the file
    """One file cannot be read, also not later as long as it stays as it is."""


class Source(Protocol):
    """Files below a root that match the adapter's pattern."""

    whole_when_listed: bool
    """A file that is listed is complete. Where it is not, a file must stay the same for a while before it is taken."""

    def list_files(self) -> AsyncGenerator[list[FoundFile]]:
        """All files, a page at a time. Raises SourceUnavailable."""

    def changes(self) -> AsyncGenerator[None] | None:
        """A moment each time files may have changed; None where that cannot be watched. Raises OSError."""

    async def find(self, path: str) -> FoundFile:
        """One file, by a path that `explain_bad_path` found nothing in. Raises FileUnreadable or SourceUnavailable."""

    def read(self, file: FoundFile) -> AsyncGenerator[bytes]:
        """The bytes of exactly this version. Raises FileNotReady, FileUnreadable or SourceUnavailable, also after the
        last block: a file counts as read once the iteration has ended."""


def changed(path: str) -> FileNotReady:
    return FileNotReady(f"{path}: it changed while it was read", hint="Try again once it is complete.")


def missing(path: str) -> FileUnreadable:
    return FileUnreadable(f"{path}: there is no such file")
