"""Sources of adapters, each against a real server: all list, find and read alike, and none leads out of its root."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from socket import create_server
from typing import TypeVar

import pytest

from penstock.adapters.config import parse
from penstock.adapters.source import FileNotReady, FileUnreadable, FoundFile, Source, SourceUnavailable
from penstock.adapters.sources import open_source
from penstock.errors import UsageError
from tests.support.file_servers import FileServer, Folder, FtpServer, S3Server, ftp_server, s3_server
from tests.support.tcp_server import bind

_T = TypeVar("_T")


@pytest.fixture(scope="module")
def store() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(params=["folder", "s3", "ftp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileServer]:
    if request.param == "ftp":
        with ftp_server(tmp_path) as server:
            yield server
    elif request.param == "s3":
        bucket: S3Server = request.getfixturevalue("store")
        for page in bucket.store.list():
            bucket.store.delete([meta["path"] for meta in page])
        yield bucket
    else:
        yield Folder(tmp_path)


def source_of(
    place: FileServer, monkeypatch: pytest.MonkeyPatch, pattern: str = "**/*.csv", timeout_s: float = 10
) -> Source:
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    (adapter,) = parse([{**place.entry("drop"), "owner": "ann", "pattern": pattern}], "penstock.toml")
    return open_source(adapter, timeout_s)


def run(body: Callable[[], Awaitable[_T]]) -> _T:
    async def bounded() -> _T:
        async with asyncio.timeout(60):
            return await body()

    return asyncio.run(bounded())


async def listed(source: Source) -> list[FoundFile]:
    async with aclosing(source.list_files()) as pages:
        return sorted([file async for page in pages for file in page])


async def content(source: Source, file: FoundFile) -> bytes:
    async with aclosing(source.read(file)) as blocks:
        return b"".join([block async for block in blocks])


def test_files_are_listed_found_and_read(place: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    large = os.urandom(5 * 1024 * 1024 + 1)
    files = {"a.csv": b"a\n1\n", "2024/may/large.csv": large, "ä b+%.csv": b"b\n2\n"}
    for path, data in {**files, "notes.txt": b"x", ".hidden.csv": b"x", "2024/.tmp/x.csv": b"x"}.items():
        place.put(path, data)
    source = source_of(place, monkeypatch)

    async def body() -> None:
        found = await listed(source)
        assert {file.path: file.size for file in found} == {path: len(data) for path, data in files.items()}
        for file in found:
            assert await source.find(file.path) == file
            assert await content(source, file) == files[file.path]

    run(body)


def test_only_the_version_that_was_listed_is_read(place: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("a.csv", b"first")
    source = source_of(place, monkeypatch)

    async def body() -> None:
        (file,) = await listed(source)
        place.put("a.csv", b"second one")
        (other,) = await listed(source)
        assert other.version != file.version
        with pytest.raises(FileNotReady, match=r"a\.csv: it changed"):
            await content(source, file)
        assert await content(source, other) == b"second one"
        with pytest.raises((FileNotReady, FileUnreadable)):
            await content(source, FoundFile("gone.csv", other.version, other.size))

    run(body)


def test_what_is_not_there_or_does_not_match_is_not_found(place: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("a.txt", b"x")
    source = source_of(place, monkeypatch)

    async def body() -> None:
        for path in ("none.csv", "a.txt", "no/such/directory/a.csv"):
            with pytest.raises(FileUnreadable, match="no such file"):
                await source.find(path)

    run(body)


def test_a_page_is_not_the_end(place: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"penstock.adapters.{place.entry('')['kind']}.PAGE_FILES", 3)
    for number in range(8):
        place.put(f"{number}.csv", b"x")
    source = source_of(place, monkeypatch)
    assert len(run(lambda: listed(source))) == 8


# -- a folder


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    Folder(outside).put("secret.csv", b"secret")
    place = Folder(root)
    place.put("a.csv", b"a")
    (root / "link.csv").symlink_to(outside / "secret.csv")
    (root / "inner.csv").symlink_to("a.csv")
    (root / "directory").symlink_to(outside)
    os.mkfifo(root / "pipe.csv")
    source = source_of(place, monkeypatch)

    async def body() -> None:
        assert [file.path for file in await listed(source)] == ["a.csv"]
        for path in ("link.csv", "inner.csv", "directory/secret.csv", "pipe.csv"):
            with pytest.raises(FileUnreadable, match=path):
                await source.find(path)
        # A link that takes a file's place after it was listed.
        (file,) = await listed(source)
        (root / "a.csv").unlink()
        (root / "a.csv").symlink_to(outside / "secret.csv")
        with pytest.raises(FileUnreadable, match=r"a\.csv"):
            await content(source, file)

    run(body)


def test_names_that_are_not_text_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Folder(tmp_path)
    place.put("a.csv", b"a")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.csv")).write_bytes(b"x")
    source = source_of(place, monkeypatch)
    assert [file.path for file in run(lambda: listed(source))] == ["a.csv"]


def test_a_folder_tells_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(Folder(tmp_path), monkeypatch)

    async def body() -> None:
        changes = source.changes()
        assert changes is not None
        async with aclosing(changes):
            told = asyncio.ensure_future(anext(changes))
            number = 0
            while not told.done():  # the watch begins at some moment after it was asked for
                (tmp_path / f"{number}.csv").write_bytes(b"x")
                number += 1
                await asyncio.wait({told}, timeout=0.05)
            await told

    run(body)


# -- what is away


def test_a_source_that_is_away_says_so_and_names_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(bind()) as deaf:  # nobody else can listen there meanwhile
        port = deaf.getsockname()[1]
        for place in (Folder(tmp_path / "none"), FtpServer(tmp_path, port=port), S3Server(port)):
            source = source_of(place, monkeypatch, timeout_s=1)
            with pytest.raises(SourceUnavailable) as problem:
                run(lambda source=source: listed(source))  # type: ignore[misc]
            assert "cannot be" in problem.value.message
            assert str(port) not in problem.value.message
            assert "127.0.0.1" not in problem.value.message


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(create_server(("127.0.0.1", 0))) as silent:
        place = FtpServer(tmp_path, port=silent.getsockname()[1])
        source = source_of(place, monkeypatch, timeout_s=0.2)
        with pytest.raises(SourceUnavailable, match="does not answer in time"):
            run(lambda: listed(source))


def test_a_missing_secret_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = FtpServer(tmp_path, port=21, env={})
    monkeypatch.delenv("FTP_PASSWORD", raising=False)
    with pytest.raises(UsageError, match=r"adapter 'drop': the variable FTP_PASSWORD \(password_env\) is not set"):
        source_of(place, monkeypatch)
