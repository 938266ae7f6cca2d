"""The whole way in: bytes from a path or a stream, unpacked, parsed, stored, sealed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

from penstock.config import IntakeLimits
from penstock.intake.jsonl import JsonlParser
from penstock.intake.refusal import IntakeInterrupted
from penstock.intake.source import Source
from penstock.intake.store import FileWriter, StoredFile
from penstock.intake.unpack import Unpacker

_PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class IntakeProgress:
    bytes_read: int
    bytes_total: int | None
    """Unknown for a pipe."""
    lines: int
    """Requests parsed so far."""


class StreamIntake:
    """Takes a file's bytes as they arrive. Leaving the `with` block without `finish` stores nothing.

    The calls block on the database, so an event loop runs them in a thread, one at a time.
    """

    def __init__(self, conninfo: str, *, owner: str, worker_id: UUID, filename: str, limits: IntakeLimits) -> None:
        self._name = filename
        self._digest = hashlib.sha256()
        self._unpacker = Unpacker(filename, limits)
        self._writer = FileWriter(conninfo, owner=owner, worker_id=worker_id, filename=filename, limits=limits)
        self._parser = JsonlParser(filename, self._writer.source_id, limits, self._writer.write)
        self._sealed = False
        self.bytes_read = 0

    @property
    def lines(self) -> int:
        return self._parser.requests

    @property
    def hopeless(self) -> bool:
        """The file will be refused whatever follows: `finish` may be called at once to say why."""
        return self._parser.hopeless

    def feed(self, chunk: bytes) -> None:
        self.bytes_read += len(chunk)
        self._digest.update(chunk)
        if self.hopeless:
            return
        for piece in self._unpacker.feed(chunk):
            self._parser.feed(piece)

    def flush(self) -> None:
        """Commit what has arrived. For a stream that pauses: no transaction stays open meanwhile."""
        self._writer.flush()

    def finish(self) -> StoredFile:
        """The stream is at its end: seal the file, or raise IntakeRefused."""
        if not self.hopeless:
            for piece in self._unpacker.finish():
                self._parser.feed(piece)
        self._parser.finish()
        stored = self._writer.seal(size=self.bytes_read, digest=self._digest.digest(), lanes=self._parser.lanes)
        self._sealed = True
        return stored

    def close(self) -> None:
        self._parser.close()
        if not self._sealed:
            self._writer.abandon()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def ingest_file(
    conninfo: str,
    path: str | Path,
    *,
    owner: str,
    worker_id: UUID,
    filename: str | None = None,
    limits: IntakeLimits | None = None,
    on_progress: Callable[[IntakeProgress], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> StoredFile:
    """Store a JSONL file (plain, gzip or zstd; `-` is standard input), whole or not at all.

    Blocks; an event loop runs it in a thread. `worker_id` must be registered and stay alive
    meanwhile, or a sweep gives the file up.
    """
    source = Source(path)
    try:
        with StreamIntake(
            conninfo,
            owner=owner,
            worker_id=worker_id,
            filename=filename or source.name,
            limits=limits or IntakeLimits(),
        ) as intake:
            _pump(source, intake, on_progress, should_stop)
            if should_stop():
                raise IntakeInterrupted(f"{source.name}: interrupted; nothing was stored")
            stored = intake.finish()
            if on_progress:
                on_progress(IntakeProgress(intake.bytes_read, source.size, intake.lines))
            return stored
    finally:
        source.close()


def _pump(
    source: Source,
    intake: StreamIntake,
    on_progress: Callable[[IntakeProgress], None] | None,
    should_stop: Callable[[], bool],
) -> None:
    reported_at = 0.0
    for chunk in source.chunks():
        if should_stop() or intake.hopeless:
            return
        if not chunk:
            intake.flush()
            continue
        intake.feed(chunk)
        if on_progress and time.monotonic() - reported_at >= _PROGRESS_INTERVAL_S:
            reported_at = time.monotonic()
            on_progress(IntakeProgress(intake.bytes_read, source.size, intake.lines))
