"""Paths and pipes: what cannot be read, and what changes while it is read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from penstock.errors import PenstockError, UsageError
from penstock.intake.source import CHUNK_BYTES, Source, digest_of


def test_a_missing_file_a_directory_and_a_file_in_between(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UsageError, match="absent: cannot be read: No such file"):
        Source(tmp_path / "absent")
    with pytest.raises(UsageError, match="is a directory"):
        Source(tmp_path)
    with pytest.raises(UsageError, match="Not a directory"):
        Source(tmp_path / "file" / "x")


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match=r"in\.jsonl: cannot be read: Permission denied"):
        Source(tmp_path / "in.jsonl")


def test_a_file_is_read_whole_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    data = os.urandom(CHUNK_BYTES * 2 + 5)
    path.write_bytes(data)
    source = Source(path)
    assert source.size == len(data)
    assert b"".join(source.chunks()) == data
    assert digest_of(path) == hashlib.sha256(data).digest()


@pytest.mark.parametrize("size", [0, CHUNK_BYTES, CHUNK_BYTES * 4])
def test_a_file_that_changes_its_size_while_it_is_read_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * CHUNK_BYTES * 3)
    chunks = Source(path).chunks()
    next(chunks)
    os.truncate(path, size)
    with pytest.raises(PenstockError, match="changed while it was read"):
        list(chunks)


def test_a_pipe_is_read_to_its_end_and_says_when_it_has_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    keep_open = os.open(path, os.O_RDWR)  # lets the source open it without another process
    source = Source(path)
    writer = os.open(path, os.O_WRONLY)
    os.close(keep_open)
    chunks = source.chunks()
    assert source.size is None
    os.write(writer, b"one")
    assert next(chunks) == b"one"
    assert next(chunks) == b""
    os.write(writer, b"two")
    os.close(writer)
    assert list(chunks) == [b"two"]
    source.close()
