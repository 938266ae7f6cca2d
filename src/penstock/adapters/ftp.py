"""Source that is a directory of an FTP server. Each listing, and each file, has a connection of its own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

import aioftp

from penstock.adapters.config import FtpPlace
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

_MAX_DIRECTORIES = 10_000


class FtpSource:
    """Directory of an FTP server, listed."""

    whole_when_listed = False

    def __init__(self, place: FtpPlace, pattern: Pattern, timeout_s: float) -> None:
        self._place = place
        self._password = place.password()
        self._pattern = pattern
        self._timeout_s = timeout_s

    async def list_files(self) -> AsyncGenerator[list[FoundFile]]:
        page: list[FoundFile] = []
        async with self._connected() as client:
            directories = deque([""])
            while directories:
                directory = directories.popleft()
                with _explained(directory or "the directory"):
                    async for entry, facts in client.list(self._full(directory)):
                        path = f"{directory}/{entry.name}" if directory else entry.name
                        if explain_bad_path(path) or entry != PurePosixPath(self._full(path)):
                            continue  # a server may name what lies elsewhere
                        if facts["type"] == "dir":
                            if self._pattern.enters(path) and len(directories) < _MAX_DIRECTORIES:
                                directories.append(path)
                        elif facts["type"] == "file" and self._pattern.matches(path):
                            page.append(_found(path, facts))
                            if len(page) == PAGE_FILES:
                                yield page
                                page = []
        yield page

    def changes(self) -> None:
        return None

    async def find(self, path: str) -> FoundFile:
        if not self._pattern.matches(path):
            raise missing(path)
        async with self._connected() as client:
            return await self._look(client, path)

    async def read(self, file: FoundFile) -> AsyncGenerator[bytes]:
        size = 0
        async with self._connected() as client:
            await self._check(client, file)
            with _explained(file.path):
                try:
                    async with client.download_stream(self._full(file.path)) as stream:
                        async for block in stream.iter_by_block():
                            size += len(block)
                            yield block
                except aioftp.StatusCodeError as error:
                    raise _refused(file.path, error) from None
            await self._check(client, file)
        if size != file.size:
            raise changed(file.path)

    async def _check(self, client: aioftp.Client, file: FoundFile) -> None:
        try:
            now = await self._look(client, file.path)
        except FileUnreadable:
            raise FileNotReady(f"{file.path}: it is gone") from None
        if now != file:
            raise changed(file.path)

    async def _look(self, client: aioftp.Client, path: str) -> FoundFile:
        with _explained(path):
            try:
                facts = await client.stat(self._full(path))
            except aioftp.StatusCodeError:
                raise missing(path) from None
            if facts["type"] != "file":
                raise FileUnreadable(f"{path}: is not a file")
            return _found(path, facts)

    def _full(self, path: str) -> str:
        base = self._place.directory
        return f"{base.rstrip('/')}/{path}" if path else base

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[aioftp.Client]:
        client = aioftp.Client(connection_timeout=self._timeout_s, socket_timeout=self._timeout_s)
        with _explained("the server"):
            try:
                await client.connect(self._place.host, self._place.port)
                await client.login(self._place.user, self._password)
            except BaseException:
                client.close()
                raise
        try:
            yield client
            with suppress(OSError, aioftp.AIOFTPException):
                await client.quit()
        finally:
            client.close()


def _found(path: str, facts: Any) -> FoundFile:
    return FoundFile(path, f"{facts['size']}-{facts['modify']}", int(facts["size"]))


def _refused(path: str, error: aioftp.StatusCodeError) -> FileUnreadable | FileNotReady:
    """Meaning of the server's refusal to send a file: codes that begin with 5 are meant to last."""
    code = str(error.received_codes[-1])
    if code.startswith("5"):
        return FileUnreadable(f"{path}: the server refuses to send it (code {code})")
    return FileNotReady(f"{path}: the server does not send it now (code {code})")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of the server without their text, which has its address and what it answered."""
    try:
        yield
    except aioftp.StatusCodeError as error:
        reason = f"the server refused (code {error.received_codes[-1]})"
    except TimeoutError:
        reason = "the server does not answer in time"
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else type(error).__name__
    except (aioftp.AIOFTPException, EOFError, KeyError, ValueError) as error:
        reason = f"the server's answer cannot be read ({type(error).__name__})"
    else:
        return
    hint = "Check the adapter's host, port, user and directory, and that the server runs."
    raise SourceUnavailable(f"{what} cannot be read: {reason}", hint=hint)
