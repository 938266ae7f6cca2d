"""Histories: what clients, upstreams and fault injectors did and saw, one append-only JSONL file per process.

    {"t": 12.345, "process": "client-1", "type": "invoke", "f": "upload", "key": "u1", "value": {"lines": 100}}

`t` is CLOCK_MONOTONIC, which all processes of one machine share. `invoke` is written before an operation starts;
`ok` (it happened), `fail` (it did not) or `info` (nobody knows, either is legal) after it ended. `checker.py` says
which operations there are and what they must obey.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from itertools import count
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

Kind = Literal["invoke", "ok", "fail", "info"]
Value = dict[str, Any]

_SUFFIX = ".jsonl"


class Event(msgspec.Struct, frozen=True, gc=False):
    """One line of a history."""

    t: float
    process: str
    type: Kind
    f: str
    key: str | None = None
    value: Value | None = None


class BrokenHistoryError(Exception):
    """The history itself cannot be believed; nothing follows from it about what it tells of."""


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(Event)


def digest_of(data: bytes) -> str:
    """How histories name bytes: responses as sent, results as read."""
    return blake2b(data, digest_size=12).hexdigest()


class HistoryWriter:
    """Appends events to a file of its own. `process` becomes `name.2`, `name.3` ... where the name was used before.

    A line is one write to the kernel, so it outlives `kill -9` of this process, and threads may share a writer.
    """

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.process, self.path, self._descriptor = _create(directory, name)

    def record(self, kind: Kind, f: str, key: str | None = None, value: Value | None = None) -> float:
        """Write one event that happens now, and return its time."""
        t = monotonic()
        line = _encode(Event(t, self.process, kind, f, key, value)) + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise OSError(f"{self.path} took only part of a line: is the disk full?")
        return t

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _create(directory: Path, name: str) -> tuple[str, Path, int]:
    # Never a file that exists: its last line may be torn, and nothing may follow a torn line.
    for number in count(1):
        process = name if number == 1 else f"{name}.{number}"
        path = directory / f"{process}{_SUFFIX}"
        try:
            return process, path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
    raise AssertionError("count() does not end")


def read_history(directory: Path) -> list[Event]:
    """Every process's events in the order of their times."""
    events: list[Event] = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        events += read_process(path)
    return in_order(events)


def in_order(events: list[Event]) -> list[Event]:
    """Sorted by time. The sort is stable: of events at the same time, a process's own keep their order."""
    return sorted(events, key=_time)


def _time(event: Event) -> float:
    return event.t


def read_process(path: Path) -> list[Event]:
    """One process's events. Its last line may be torn: the process was killed while it wrote."""
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        return _decoder.decode_lines(whole)
    except msgspec.DecodeError as error:
        raise BrokenHistoryError(f"{path}, {_first_bad_line(whole)}: {error}") from error


def _first_bad_line(data: bytes) -> str:
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            _decoder.decode(line)
        except msgspec.DecodeError:
            return f"line {number}"
    return "some line"
