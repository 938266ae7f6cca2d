"""Acceptor of sessions' requests: many requests, one statement, one commit.

While one statement runs, requests that arrive gather for the next, so that none waits for others on purpose. One
statement runs at a time: within a session, requests are stored in the order in which they arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import psycopg

from penstock.config import MIB, SessionLimits
from penstock.db.coalesce import CoalesceLimits, Coalescer
from penstock.db.pool import Connection, Pool, borrowed
from penstock.errors import PenstockError
from penstock.model import Item, Lease, SessionRequest, public_id
from penstock.server.session_workers import SessionWorkers
from penstock.sessions.accept import Acceptance, Accepted, NewRequest, accept_many, find_stored

_log = logging.getLogger("penstock.sessions")

_MAX_ROWS = 500
_MAX_BYTES = 8 * MIB
_MAX_WAITING_BYTES = 256 * MIB


class TooManyWaitingError(PenstockError):
    """The server takes no more requests until it has stored some of those that wait."""


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingRequest:
    request: NewRequest
    accepted: asyncio.Future[Acceptance]

    def fail(self, error: Exception) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)


class Acceptor:
    """Stores every request that this process receives for a session."""

    def __init__(self, database: Pool, limits: SessionLimits) -> None:
        bounds = CoalesceLimits(
            _MAX_ROWS, _MAX_BYTES, 0, limits.session_accept_max, capacity_bytes=_MAX_WAITING_BYTES, retry_s=0
        )
        self._write_kind = _AcceptWrite(database, limits)
        self._writer = Coalescer(self._write_kind, database, bounds, name="requests of sessions")
        self._writing: asyncio.Task[None] | None = None

    def start_with(self, workers: SessionWorkers) -> None:
        """Let these workers claim requests, from now on, by the statement that stores them."""
        self._write_kind.workers = workers

    async def accept(self, request: NewRequest) -> Acceptance:
        """Store a request; returns once it is stored, or known to be refused. Raises what the database raises."""
        if self._writer.fill >= 1:
            raise TooManyWaitingError("More requests are waiting to be stored than this server takes.")
        entry = _WaitingRequest(request, asyncio.get_running_loop().create_future())
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="accept")
        self._writer.put(entry)
        return await entry.accepted

    async def _write(self) -> None:
        try:
            await self._writer.run()
        finally:
            self._writing = None
            for entry in self._writer.unwritten:
                entry.accepted.cancel()

    async def close(self) -> None:
        """Wait until every request taken is stored."""
        self._writer.close()
        if self._writing is not None:
            await asyncio.wait([self._writing])


class _AcceptWrite:
    """Appends requests to sessions: the `WriteKind` of the acceptor."""

    def __init__(self, database: Pool, limits: SessionLimits) -> None:
        self._database = database
        self._limits = limits
        self.workers: SessionWorkers | None = None

    def key(self, entry: _WaitingRequest) -> UUID:
        return entry.request.id

    def merge(self, earlier: _WaitingRequest, later: _WaitingRequest) -> _WaitingRequest:
        raise AssertionError(f"request {later.request.id} was put twice, after {earlier}")

    def weight(self, entry: _WaitingRequest) -> int:
        return len(entry.request.body)

    async def execute(self, connection: Connection, entries: Sequence[_WaitingRequest], *, repeated: bool) -> None:  # noqa: ARG002 -- they are not
        requests = [entry.request for entry in entries]
        try:
            accepted = await self._accept(connection, requests)
        except (psycopg.Error, UnicodeEncodeError):
            raise
        except Exception as error:
            # The callers get the error; the next requests may be stored.
            _log.warning("%d requests could not be stored: %s", len(entries), type(error).__name__)
            for entry in entries:
                entry.fail(error)
            return
        for entry, acceptance in zip(entries, accepted, strict=True):
            if not entry.accepted.done():
                entry.accepted.set_result(acceptance)

    async def _accept(self, connection: Connection, requests: list[NewRequest]) -> list[Acceptance]:
        max_queued, workers = self._limits.session_max_queued, self.workers
        if workers is None:
            return await accept_many(connection, requests, max_queued=max_queued)
        permits = workers.issue_permits({request.pool for request in requests})
        claimed: dict[str, list[Item]] | None = None
        try:
            accepted = await accept_many(connection, requests, max_queued=max_queued, permits=permits)
            claimed = _claimed(requests, accepted)
        finally:
            workers.return_permits(permits, claimed)
        await asyncio.sleep(0)  # claimed items are called first
        return accepted

    def replace_rejected(self, entry: _WaitingRequest, error: Exception) -> None:
        entry.fail(error)

    async def give_up(self, entries: Sequence[_WaitingRequest], error: Exception) -> None:
        """Accept requests that are stored after all, if only the answer to the commit was lost. Fail the others."""
        stored: Mapping[UUID, Accepted] = {}
        with contextlib.suppress(psycopg.Error):
            async with borrowed(self._database) as connection:
                stored = await find_stored(connection, [entry.request.id for entry in entries])
        for entry in entries:
            if (accepted := stored.get(entry.request.id)) is not None and not entry.accepted.done():
                entry.accepted.set_result(accepted)
        lost = [entry for entry in entries if entry.request.id not in stored]
        _log.warning("%d requests may not be stored: %s", len(lost), type(error).__name__)
        for entry in lost:
            entry.fail(error)


def _claimed(requests: Sequence[NewRequest], accepted: Sequence[Acceptance]) -> dict[str, list[Item]]:
    """Items that were claimed as they were stored, by pool."""
    items: dict[str, list[Item]] = {}
    for request, each in zip(requests, accepted, strict=True):
        if isinstance(each, Accepted) and each.lease is not None:
            items.setdefault(request.pool, []).append(_item(request, each, each.lease))
    return items


def _item(request: NewRequest, accepted: Accepted, lease: Lease) -> Item:
    asked = SessionRequest(request.id, request.endpoint, request.stream, request.waited, cancelled=False)
    custom_id = public_id("session_request", request.id)
    return Item(lease, accepted.ordinal, accepted.sequence, custom_id, request.body, asked)
