"""The old system's database: read in one read-only snapshot for each step, row by row, never written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from struct import Struct
from typing import Any
from uuid import UUID

import msgspec
import psycopg
from psycopg import Connection, IsolationLevel

from penstock.db import sql
from penstock.db.pool import KEEPALIVE
from penstock.errors import PenstockError
from penstock.moving.copy_out import copy_out
from penstock.moving.layout import Layout

_SQL = sql.load("penstock.moving", "source.sql")

# Fields of fixed size come first, each behind its length; none of them is NULL.
_LINE = Struct("!hiii16si")
_REQUEST = Struct("!hiii16siiiiiiiqiqiii")
_LENGTH = Struct("!i").unpack_from
"""Length of the next text, behind one that was read; -1 for NULL."""


class SourceLine(msgspec.Struct, frozen=True, gc=False):
    """A line of a file."""

    number: int
    id: bytes
    goes_to: bytes
    """Path, model and method, one after the other."""
    custom_id: bytes | None
    body: bytes


class SourceRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of a batch, or a line of its file that has none. `state` is one of `RequestState`."""

    number: int
    id: bytes
    state: int
    retries: int
    status: int
    finished_at: int
    """Microseconds since 2000, as PostgreSQL sends them."""
    not_before: int
    duration_ms: int
    goes_to: bytes
    custom_id: bytes | None
    response: bytes | None
    error: bytes | None


class RequestState:
    """States of requests, as the statements number them."""

    MISSING, COMPLETED, FAILED, CANCELED, PROCESSING, CLAIMED, PENDING = range(7)
    UNKNOWN = 9


@dataclass(frozen=True, slots=True)
class SourceFile:
    id: UUID
    name: str
    purpose: str
    size_bytes: int
    status: str | None
    owner: str | None
    created_at: datetime
    expires_at: datetime | None
    deleted: bool
    expired: bool
    lines: int
    body_bytes: int
    keys: int


@dataclass(frozen=True, slots=True)
class ListedBatch:
    """A batch in the list of all."""

    id: UUID
    file_id: UUID | None
    owner: str | None
    created_at: datetime
    deleted: bool
    output_file_id: UUID | None
    error_file_id: UUID | None
    pending: int
    claimed: int
    processing: int
    completed: int
    failed: int
    canceled: int
    others: int
    answer_bytes: int

    @property
    def requests(self) -> int:
        return (
            self.pending + self.claimed + self.processing + self.completed + self.failed + self.canceled + self.others
        )


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """A batch with everything that is taken over of it, as one snapshot has it."""

    id: UUID
    file_id: UUID | None
    endpoint: str | None
    completion_window: str | None
    metadata: Any
    owner: str | None
    created_at: datetime
    expires_at: datetime | None
    cancelling_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    cancelled_at: datetime | None
    output_file_id: UUID | None
    error_file_id: UUID | None
    total_requests: int | None
    output_expires_at: datetime | None
    output_deleted: bool
    error_expires_at: datetime | None
    error_deleted: bool
    pending: int
    claimed: int
    processing: int
    completed: int
    failed: int
    canceled: int
    requests: int
    """In whatever state."""

    @property
    def open(self) -> int:
        """Requests that are still to be run."""
        return self.pending + self.claimed + self.processing

    @property
    def before(self) -> dict[str, int]:
        """Its requests by state."""
        states = ("pending", "claimed", "processing", "completed", "failed", "canceled")
        return {state: getattr(self, state) for state in states}


@dataclass(frozen=True, slots=True)
class Activity:
    """What is seen of the source's workers."""

    claimed: int
    processing: int
    last_claim: datetime | None
    last_start: datetime | None
    last_end: datetime | None
    now: datetime

    @property
    def quiet_s(self) -> float | None:
        """Seconds since anything was claimed, begun or ended; None if nothing ever was."""
        moments = [at for at in (self.last_claim, self.last_start, self.last_end) if at is not None]
        return (self.now - max(moments)).total_seconds() if moments else None


class Source:
    """A database of the eager layout, over one connection."""

    def __init__(self, connection: Connection, layout: Layout) -> None:
        self._connection = connection
        self._prelude = layout.prelude().as_bytes(connection).replace(b"%", b"%%") + b" "

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read as of one moment for as long as the block lasts."""
        with self._connection.transaction():
            with explain_source_errors("source"):
                self._connection.execute(_SQL["begin_snapshot"])
            yield

    def activity(self) -> Activity:
        return Activity(*self._rows("read_activity")[0])

    def files(self) -> list[SourceFile]:
        return [SourceFile(*row) for row in self._rows("list_files")]

    def batches(self) -> list[ListedBatch]:
        return [ListedBatch(*row) for row in self._rows("list_batches")]

    def batch(self, batch_id: UUID) -> SourceBatch | None:
        """The batch; None if it is not there any more, or deleted."""
        rows = self._rows("read_batch", {"batch": batch_id})
        return SourceBatch(*rows[0]) if rows else None

    def left_behind(self) -> tuple[int, int, int]:
        """Requests outside batches, requests of batches that are not there, templates without a file."""
        outside, lost, orphans = self._rows("count_left_behind")[0]
        return outside, lost, orphans

    def open_models(self) -> dict[str, int]:
        """Requests still to be run, by model."""
        return dict(self._rows("list_open_models"))

    def lines(self, file_id: UUID) -> Iterator[SourceLine]:
        """The lines of a file, in order."""
        for data in self._copy("copy_lines", {"file": file_id}):
            _, _, number, _, key, length = _LINE.unpack_from(data)
            at = _LINE.size + length
            goes_to = data[_LINE.size : at]
            (length,) = _LENGTH(data, at)
            custom_id, at = (None, at + 4) if length < 0 else (data[at + 4 : at + 4 + length], at + 4 + length)
            # The body is the last field.
            yield SourceLine(number, key, goes_to, custom_id, data[at + 4 :])

    def requests_of_file(self, batch_id: UUID, file_id: UUID) -> Iterator[SourceRequest]:
        """The lines of a batch's file, in the same order, with the batch's request for each."""
        return self._requests("copy_requests_of_file", {"batch": batch_id, "file": file_id})

    def requests_without_line(
        self, batch_id: UUID, file_id: UUID | None, endpoint: str | None
    ) -> Iterator[SourceRequest]:
        """A batch's requests whose line is not in this file."""
        return self._requests(
            "copy_requests_without_line", {"batch": batch_id, "file": file_id, "endpoint": endpoint or ""}
        )

    def _requests(self, name: str, parameters: Mapping[str, Any]) -> Iterator[SourceRequest]:
        for data in self._copy(name, parameters):
            (_, _, number, _, key, _, state, _, retries, _, status, _, finished, _, due, _, duration, length) = (
                _REQUEST.unpack_from(data)
            )
            at = _REQUEST.size + length
            goes_to = data[_REQUEST.size : at]
            custom_id = response = error = None
            (length,) = _LENGTH(data, at)
            at += 4
            if length >= 0:
                custom_id, at = data[at : at + length], at + length
            (length,) = _LENGTH(data, at)
            at += 4
            if length >= 0:
                response, at = data[at : at + length], at + length
            (length,) = _LENGTH(data, at)
            if length >= 0:
                error = data[at + 4 :]
            yield SourceRequest(
                number, key, state, retries, status, finished, due, duration, goes_to, custom_id, response, error
            )

    def _rows(self, name: str, parameters: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        with explain_source_errors("source"):
            return self._connection.execute(self._prelude + _SQL[name], parameters or {}).fetchall()

    def _copy(self, name: str, parameters: Mapping[str, Any]) -> Iterator[bytes]:
        """The rows of a statement in binary, each as it comes from the server."""
        return chain.from_iterable(self._copied_blocks(name, parameters))

    def _copied_blocks(self, name: str, parameters: Mapping[str, Any]) -> Iterator[list[bytes]]:
        with explain_source_errors("source"):
            yield from copy_out(self._connection, self._prelude + _SQL[name], parameters)


@contextmanager
def open_source(conninfo: str, layout: Layout) -> Iterator[Source]:
    """Connect to the source and check its layout. Every transaction on it is read-only."""
    with explain_source_errors("source"):
        connection = connect(conninfo)
    with closing(connection):
        with explain_source_errors("source"):
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            layout.check(connection)
        yield Source(connection, layout)


def connect(conninfo: str) -> Connection:
    return psycopg.connect(
        conninfo,
        autocommit=True,
        prepare_threshold=None,
        connect_timeout=10,
        client_encoding="UTF8",
        application_name="penstock import",
        **KEEPALIVE,
    )


@contextmanager
def explain_source_errors(which: str) -> Iterator[None]:
    """Turn errors of the driver into ones for a person."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise PenstockError(
            f"the role has no right to that in the {which}: {_first_line(error)}",
            hint="Grant it SELECT on the four tables and USAGE on the schema.",
        ) from error
    except psycopg.OperationalError as error:
        raise PenstockError(
            f"the {which} cannot be reached: {_first_line(error)}",
            hint="Check the address, the password and that the server runs. What is imported so far stays;"
            " the same command goes on.",
        ) from error
    except psycopg.DataError as error:
        raise PenstockError(
            f"the {which} holds values that do not fit the layout: {_first_line(error)}",
            hint="Check the types of the mapped columns: ids are uuid, times are timestamps.",
        ) from error


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
