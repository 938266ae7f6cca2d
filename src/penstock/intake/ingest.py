"""A file of this machine, stored for `penstock run`: read from a path or standard input, its bytes not kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from uuid import UUID

import psycopg

from penstock.config import IntakeLimits, TableLimits
from penstock.errors import PenstockError
from penstock.intake.function_inputs import URL
from penstock.intake.intake import BATCH, FileIntake
from penstock.intake.jsonl import DEFAULT_ROUTE
from penstock.intake.local_table import LocalTable
from penstock.intake.reader import CHUNK_BYTES
from penstock.intake.refusal import IntakeInterrupted, IntakeRefused
from penstock.intake.rows import FileLane, pack_rows, pack_table_rows, table_lane
from penstock.intake.source import Source
from penstock.intake.tables.table import RowsDigest, TableSpec, Through, image_uses, next_block, pass_rows
from penstock.intake.writer import FileWriter, SealUnheardError, StoredFile
from penstock.model import ROWS

_PROGRESS_INTERVAL_S = 0.1
_BLOCK_ROWS = 1_000


def ingest_file(
    conninfo: str,
    path: str | Path,
    *,
    owner: str,
    worker_id: UUID,
    filename: str | None = None,
    for_function: bool = False,
    limits: IntakeLimits | None = None,
    skip: tuple[int, int] = (0, 0),
    on_progress: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> StoredFile:
    """Store a JSONL file (plain, gzip or zstd; `-` is standard input), whole or not at all.

    Blocks; an event loop runs it in a thread. `worker_id` must be registered and stay alive
    meanwhile, or a sweep gives the file up. `on_progress` is told the bytes that were read. With `for_function` a line
    may be any JSON object. The first bytes and lines, as many as `skip` says, are left out, from the digest
    too; the others keep their numbers.
    """
    limits = limits or IntakeLimits()
    skip_bytes, skip_lines = skip
    with closing(Source(path, skip_bytes)) as source:
        name = filename or source.name
        with (
            _database_errors(name),
            FileIntake(
                conninfo,
                owner=owner,
                worker_id=worker_id,
                filename=name,
                limits=limits,
                for_function=for_function,
                skip_lines=skip_lines,
            ) as intake,
        ):
            _pump(source, intake, on_progress, should_stop)
            _stop_if(should_stop, source.name)
            stored = intake.finish()
            on_progress(intake.bytes_taken)
            return stored


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A sealed table."""

    file: StoredFile
    columns: tuple[str, ...]
    """Names of its columns, in order."""
    images: bool
    """Whether its rows stand for images."""
    digest: str
    """Digest of its rows, those that were left out included."""


def ingest_table(
    conninfo: str,
    source: LocalTable,
    *,
    owner: str,
    worker_id: UUID,
    route: str,
    spec: TableSpec,
    limits: IntakeLimits,
    table_limits: TableLimits,
    first_rows: int | None = None,
    skip_rows: int = 0,
    through: Through = pass_rows,
    on_progress: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> StoredTable:
    """Store the rows of a table, whole or not at all; or its `first_rows` alone, and without those that `skip_rows`
    counts. All of them go to one route. `through` sees those that are stored first, and may refuse them."""
    name = source.name
    writer = FileWriter(conninfo, owner=owner, worker_id=worker_id, filename=name, limits=limits, keep_bytes=False)
    images = False
    with _database_errors(name):
        try:
            for chunk in source.chunks():
                writer.take(chunk)  # for its digest
            with source.open(spec, table_limits, limits) as table:
                lane = table_lane(writer.source_id)
                digest, read = RowsDigest(), islice(table.rows(), first_rows)
                digest.add(islice(read, skip_rows))
                rows = through(read)
                while block := next_block(rows):
                    _stop_if(should_stop, name)
                    digest.add(block)
                    if uses := image_uses(block, lane.total):
                        images = True
                        writer.write_images(uses)
                    writer.write(pack_table_rows(lane, lane.total, block), len(block))
                    on_progress(source.bytes_read)
                writer.flush()
                stored = writer.seal([FileLane(0, route, ROWS, lane.total)], purpose=BATCH)
                return StoredTable(stored, table.columns, images, digest.hex)
        except BaseException:
            writer.abandon()
            raise


def ingest_values(
    conninfo: str,
    values: Iterable[bytes],
    *,
    name: str,
    owner: str,
    worker_id: UUID,
    limits: IntakeLimits,
) -> StoredFile | None:
    """Store JSON values that a function is called with, all or none; None if there are none. Each is named by its
    number, from 1. The digest is that of the values, each with a line break behind it."""
    writer = FileWriter(conninfo, owner=owner, worker_id=worker_id, filename=name, limits=limits, keep_bytes=False)
    with _database_errors(name):
        try:
            lane = None
            for block in _blocks(values, name, limits):
                lane = lane or table_lane(writer.source_id)
                writer.take(b"\n".join(block) + b"\n")
                lines = range(lane.total + 1, lane.total + len(block) + 1)
                rows: list[bytes] = []
                pack_rows(rows, lines, [b"%d" % line for line in lines], block, [lane] * len(block))
                writer.write(b"".join(rows), len(block))
            if lane is None:
                writer.abandon()
                return None
            writer.flush()
            return writer.seal([FileLane(0, DEFAULT_ROUTE, URL, lane.total)], purpose=BATCH)
        except BaseException:
            writer.abandon()
            raise


def _blocks(values: Iterable[bytes], name: str, limits: IntakeLimits) -> Iterator[list[bytes]]:
    block: list[bytes] = []
    size = 0
    for number, value in enumerate(values, 1):
        if len(value) > limits.max_line_bytes:
            raise IntakeRefused(f"{name}: a row has more than {limits.max_line_bytes:,} bytes (max_line_bytes)")
        if number > limits.max_lines:
            raise IntakeRefused(f"{name}: more than {limits.max_lines:,} rows (max_lines)")
        block.append(value)
        size += len(value)
        if len(block) >= _BLOCK_ROWS or size >= CHUNK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _stop_if(should_stop: Callable[[], bool], name: str) -> None:
    if should_stop():
        raise IntakeInterrupted(f"{name}: interrupted; nothing was stored")


def _pump(
    source: Source,
    intake: FileIntake,
    on_progress: Callable[[int], None],
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
        if time.monotonic() - reported_at >= _PROGRESS_INTERVAL_S:
            reported_at = time.monotonic()
            on_progress(intake.bytes_taken)


@contextmanager
def _database_errors(name: str) -> Iterator[None]:
    try:
        yield
    except SealUnheardError as error:
        raise PenstockError(
            f"{name}: the connection was lost while the file was being sealed, and the database "
            f"cannot be asked whether it was stored: {_first_line(error)}",
            hint="Once the database is back, look for the file before submitting it again.",
        ) from error
    except psycopg.Error as error:
        raise PenstockError(
            f"{name}: the database did not take it: {_first_line(error)}; nothing was stored",
            hint=_hint(error),
        ) from error


def _first_line(error: psycopg.Error) -> str:
    return error.diag.message_primary or (str(error).splitlines() or [type(error).__name__])[0]


def _hint(error: psycopg.Error) -> str:
    if isinstance(error, psycopg.errors.DiskFull):
        return "The database's disk is full: free some space, then run the command again."
    if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.InvalidSchemaName):
        return "The database has no Penstock schema yet: run 'penstock db migrate'."
    if isinstance(error, psycopg.OperationalError):
        return "Check that the database is up and reachable, then run the command again."
    return "Run the command again; if it fails the same way, the database's log says more."
