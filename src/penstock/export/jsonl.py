"""Result files of a batch: JSONL in the Batch API's shape, in input order, streamed from one snapshot."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import UUID

import psycopg

from penstock.db import arrays, sql
from penstock.errors import PenstockError
from penstock.export.order import InputOrder, Lane
from penstock.export.read import read_lines
from penstock.export.result_lines import NOT_RUN
from penstock.model import BatchState

_SQL = sql.load("penstock.export", "export.sql")

_PAGE_BYTES = 8 * 1024 * 1024
_PAGE_ROWS = 2_000


@dataclass(frozen=True, slots=True)
class Exported:
    """Result files that were written, and their lines."""

    output: Path
    output_lines: int
    errors: Path | None
    error_lines: int


def errors_path(output: Path) -> Path:
    """Path of the error file of `output`: `answers.jsonl` has `answers.errors.jsonl` beside it."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def draft_of(path: Path) -> Path:
    """Path to which this process writes before it renames to `path`."""
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
            asyncio.run(_write_lines(conninfo, batch_id, state, good, bad, on_progress))
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
    """File under construction, invisible under its final name until published."""

    def __init__(self, path: Path) -> None:
        # The file that a link points at is replaced, not the link.
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
    """Open a draft for writing, under a lock that the kernel takes back however this process ends."""
    while True:
        file = draft.open("wb", buffering=1 << 20)
        try:
            with suppress(OSError):  # a file system without locks: drafts of killed exports stay there
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another export may have removed it as abandoned in the moment before the lock.
            if os.path.samestat(os.fstat(file.fileno()), draft.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Remove the drafts of exports that were killed: no process holds a lock on them."""
    prefix = f".{path.name}."
    for draft in path.parent.iterdir():
        if draft.name.startswith(prefix) and draft.name.removeprefix(prefix).removesuffix(".part").isdecimal():
            with suppress(OSError), draft.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                draft.unlink()


async def _write_lines(
    conninfo: str, batch_id: UUID, state: BatchState, good: _Draft, bad: _Draft, on_progress: Callable[[int], None]
) -> None:
    async with await psycopg.AsyncConnection.connect(conninfo) as connection:
        arrays.register(connection)
        await connection.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)
        await connection.set_read_only(True)
        lanes = await (await connection.execute(_SQL["list_lanes"], {"batch": batch_id})).fetchall()
        order = InputOrder([Lane(*row) for row in lanes], "all", without_missing=state not in NOT_RUN)
        count = 0
        while keys := await order.take(connection, _PAGE_ROWS, _PAGE_BYTES):
            for completed, line in await read_lines(connection, batch_id, state, "openai", keys):
                (good if completed else bad).write(line)
            count += len(keys)
            on_progress(count)
