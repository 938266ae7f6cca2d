"""A batch's results as JSONL in the Batch API's shape, in input order, streamed from one snapshot."""

from __future__ import annotations

import fcntl
import heapq
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import UUID

import psycopg

from penstock.db import sql
from penstock.errors import PenstockError
from penstock.export.order import Lane, outside
from penstock.model import BatchState
from penstock.results import NOT_RUN, Result, openai_error_line, openai_line

_SQL = sql.load("penstock.export", "export.sql")

_PAGE_BYTES = 8 * 1024 * 1024
_PAGE_ROWS = 2_000
_PROGRESS_LINES = 1_000


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written where."""

    output: Path
    output_lines: int
    errors: Path | None
    error_lines: int


def errors_path(output: Path) -> Path:
    """Where the failures of `output` go: `answers.jsonl` has `answers.errors.jsonl` beside it."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def draft_of(path: Path) -> Path:
    """Where this process writes before it renames to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def export_files(
    conninfo: str,
    batch_id: UUID,
    state: BatchState,
    output: Path,
    *,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Exported:
    """Write a batch's output and error files beside their final names, then rename: whole or not at all."""
    errors = errors_path(output)
    try:
        with ExitStack() as stack:
            good = stack.enter_context(_Draft(output))
            bad = stack.enter_context(_Draft(errors))
            for count, (ok, line) in enumerate(_lines(conninfo, batch_id, state), 1):
                (good if ok else bad).write(line)
                if count % _PROGRESS_LINES == 0:
                    on_progress(count)
            bad.publish(if_empty="remove")
            good.publish(if_empty="keep")
    except OSError as error:
        raise PenstockError(
            f"cannot write {error.filename or output}: {error.strerror}",
            hint="Nothing was half-written and every result is stored: make room or choose another -o, "
            "then run the same command again.",
        ) from error
    return Exported(output, good.lines, errors if bad.lines else None, bad.lines)


class _Draft:
    """A file under construction, invisible under its final name until published."""

    def __init__(self, path: Path) -> None:
        # What a link points at is replaced, not the link.
        self._path = path.resolve()
        self._draft = draft_of(self._path)
        self._file: IO[bytes] | None = None
        self.lines = 0

    def __enter__(self) -> _Draft:
        _remove_abandoned(self._path)
        self._file = _open_locked(self._draft)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            # A failing close after a failed write would hide the first error, and the draft goes anyway.
            with suppress(OSError):
                self._file.close()
        with suppress(OSError):
            self._draft.unlink(missing_ok=True)

    def write(self, line: bytes) -> None:
        if self._file is None:
            raise AssertionError("the draft is not open")
        self._file.write(line)
        self.lines += 1

    def publish(self, *, if_empty: str) -> None:
        if self._file is None:
            raise AssertionError("the draft is not open")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        if self.lines == 0 and if_empty == "remove":
            self._draft.unlink()
            self._path.unlink(missing_ok=True)
        else:
            self._draft.replace(self._path)


def _open_locked(draft: Path) -> IO[bytes]:
    """Open for writing, under a lock that the kernel takes back when this process ends, in whatever way."""
    while True:
        file = draft.open("wb", buffering=1 << 20)
        try:
            with suppress(OSError):  # a file system without locks: drafts of killed exports stay there
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another export may have taken it for abandoned in the moment before the lock.
            if os.path.samestat(os.fstat(file.fileno()), draft.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Remove the drafts of exports that were killed: they are the ones nobody holds a lock on."""
    prefix = f".{path.name}."
    for draft in path.parent.iterdir():
        if draft.name.startswith(prefix) and draft.name.removeprefix(prefix).removesuffix(".part").isdecimal():
            with suppress(OSError), draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()


def _lines(conninfo: str, batch_id: UUID, state: BatchState) -> Iterator[tuple[bool, bytes]]:
    """(belongs in the output, line) in input order."""
    with psycopg.connect(conninfo, prepare_threshold=None) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        lanes = connection.execute(_SQL["list_lanes"], {"batch": batch_id}).fetchall()
        budget = max(_PAGE_BYTES // max(1, len(lanes)), 64 * 1024)
        streams: list[Iterator[tuple[int, bool, bytes]]] = []
        for lane in (Lane(*row) for row in lanes):
            streams.append(_outcomes(connection, batch_id, lane.id, budget))
            if state in NOT_RUN:
                streams.append(_not_run(connection, batch_id, state, lane))
        for _, ok, line in heapq.merge(*streams):
            yield ok, line


def _outcomes(
    connection: psycopg.Connection, batch_id: UUID, lane_id: int, budget: int
) -> Iterator[tuple[int, bool, bytes]]:
    start = 0
    while True:
        rows = connection.execute(
            _SQL["read_outcomes"],
            {"lane": lane_id, "from": start, "rows": _PAGE_ROWS, "bytes": budget},
            binary=True,
        ).fetchall()
        if not rows:
            return
        for _, *outcome in rows:
            result = Result._make(outcome)
            yield result.line, result.state == "completed", openai_line(batch_id, result)
        start = rows[-1][0] + 1


def _not_run(
    connection: psycopg.Connection, batch_id: UUID, state: BatchState, lane: Lane
) -> Iterator[tuple[int, bool, bytes]]:
    code, message = NOT_RUN[state]
    for start in range(0, lane.total, _PAGE_ROWS):
        row = connection.execute(
            _SQL["list_decided"], {"lanes": [lane.id], "starts": [start], "rows": _PAGE_ROWS}
        ).fetchone()
        ordinals = outside(row[1] if row else "", start, min(start + _PAGE_ROWS, lane.total))
        if ordinals:
            places = {
                "sources": [lane.source_id] * len(ordinals),
                "source_lanes": [lane.source_lane] * len(ordinals),
                "ordinals": ordinals,
            }
            for _, line, custom_id in connection.execute(_SQL["read_inputs_at"], places).fetchall():
                yield line, False, openai_error_line(batch_id, line, custom_id, code, message)
