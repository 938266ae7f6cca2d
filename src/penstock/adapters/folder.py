"""Source that is a folder. Symbolic links below its root are not followed, neither to files nor to directories."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path

import watchfiles
from anyio import to_thread

from penstock.adapters.paths import Pattern, explain_bad_path
from penstock.adapters.source import (
    PAGE_FILES,
    FileNotReady,
    FileUnreadable,
    FoundFile,
    SourceUnavailable,
    changed,
    missing,
)

_log = logging.getLogger("penstock.adapters")

_BLOCK_BYTES = 1024 * 1024
_WATCH_STEP_MS = 100
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, to open a named pipe would wait for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderSource:
    """Folder, watched and listed."""

    whole_when_listed = False

    def __init__(self, root: Path, pattern: Pattern) -> None:
        self._root = root
        self._pattern = pattern

    async def list_files(self) -> AsyncGenerator[list[FoundFile]]:
        with closing(self._walk("")) as files:
            while page := await to_thread.run_sync(lambda: list(islice(files, PAGE_FILES))):
                yield page

    async def changes(self) -> AsyncGenerator[None]:
        """A moment each time something below the root has changed. Raises OSError if the folder cannot be watched."""
        watching = watchfiles.awatch(
            self._root,
            watch_filter=None,
            step=_WATCH_STEP_MS,
            recursive=self._pattern.deep,
            ignore_permission_denied=True,
        )
        async for _ in watching:
            yield

    async def find(self, path: str) -> FoundFile:
        def look() -> FoundFile:
            with closing(self._open(path)) as opened:
                return _found(path, os.fstat(opened.fd))

        if not self._pattern.matches(path):
            raise missing(path)
        return await to_thread.run_sync(look)

    async def read(self, file: FoundFile) -> AsyncGenerator[bytes]:
        try:
            opened = await to_thread.run_sync(self._open, file.path)
        except FileUnreadable:
            if await to_thread.run_sync(self._is_gone, file.path):
                raise FileNotReady(f"{file.path}: it is gone") from None
            raise
        with closing(opened):
            if _found(file.path, os.fstat(opened.fd)) != file:
                raise changed(file.path)
            try:
                while block := await to_thread.run_sync(partial(os.read, opened.fd, _BLOCK_BYTES)):
                    yield block
            except OSError as error:
                raise SourceUnavailable(f"{file.path}: cannot be read: {error.strerror}") from error
            if _found(file.path, os.fstat(opened.fd)) != file:
                raise changed(file.path)

    def _walk(self, directory: str) -> Generator[FoundFile]:
        try:
            entries = os.scandir(self._root / directory)
        except OSError as error:
            if not directory:
                hint = "Check the adapter's root, and that the server may read it."
                raise SourceUnavailable(f"the folder cannot be listed: {error.strerror}", hint=hint) from error
            _log.warning("%s: this directory is passed over: %s", directory, error.strerror)
            return
        with entries:
            for entry in entries:
                path = f"{directory}/{entry.name}" if directory else entry.name
                if reason := explain_bad_path(path):
                    _log.warning("%a is passed over: %s", path, reason)
                elif entry.is_dir(follow_symlinks=False):
                    if self._pattern.enters(path):
                        yield from self._walk(path)
                elif entry.is_file(follow_symlinks=False) and self._pattern.matches(path):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield _found(path, status)

    def _open(self, path: str) -> _Opened:
        """Open a file by one name after the other, none of which may be a link: a link that is put in its place
        meanwhile leads nowhere."""
        *directories, name = path.split("/")
        try:
            place = os.open(self._root, _DIRECTORY)
        except OSError as error:
            raise SourceUnavailable(f"the folder cannot be opened: {error.strerror}") from error
        try:
            for directory in directories:
                inner = os.open(directory, _DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
                os.close(place)
                place = inner
            opened = _Opened(os.open(name, _FILE, dir_fd=place))
        except FileNotFoundError:
            raise missing(path) from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise FileUnreadable(f"{path}: cannot be opened: {reason}; links are not followed") from None
        finally:
            os.close(place)
        if not stat.S_ISREG(os.fstat(opened.fd).st_mode):
            opened.close()
            raise FileUnreadable(f"{path}: is not a file")
        return opened

    def _is_gone(self, path: str) -> bool:
        return not os.path.lexists(self._root / path)


class _Opened:
    """Open file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def _found(path: str, status: os.stat_result) -> FoundFile:
    return FoundFile(path, f"{status.st_size}-{status.st_mtime_ns}", status.st_size)
