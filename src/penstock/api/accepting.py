"""Storing what callers send to sessions: many requests, one statement, one commit.

While one statement runs, whatever arrives gathers for the next, so that nothing waits for company and company costs
nothing. One statement at a time: within a session, the order in which requests were handed in is the order they get.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import psycopg
from psycopg_pool import PoolTimeout

from penstock.api.errors import busy
from penstock.config import MIB, SessionLimits
from penstock.db.pool import Pool, borrowed
from penstock.desk import Desk
from penstock.hand import Handing
from penstock.model import Item, Lease, SessionRequest, public_id
from penstock.work import sessions
from penstock.work.sessions import Acceptance, Accepted, NewRequest, Taker

_log = logging.getLogger("penstock.sessions")

_MAX_ROWS = 500
_MAX_BYTES = 8 * MIB
_MAX_WAITING_BYTES = 256 * MIB


@dataclass(slots=True)
class _Entry:
    request: NewRequest
    taken: asyncio.Future[Acceptance]


class Acceptor:
    """The one way into sessions for everything a process receives."""

    def __init__(self, database: Pool, limits: SessionLimits) -> None:
        self._database = database
        self._limits = limits
        self.desk: Desk | None = None
        """Where what is stored may be begun at once."""
        self._waiting: deque[_Entry] = deque()
        self._bytes = 0
        self._storing: asyncio.Task[None] | None = None
        self._parked: asyncio.Future[None] | None = None
        self._closing = False

    async def accept(self, request: NewRequest) -> Acceptance:
        """Returns once it is stored, or known to be refused. Raises what the database does."""
        if len(self._waiting) >= self._limits.session_accept_max or self._bytes >= _MAX_WAITING_BYTES:
            raise busy("More requests are waiting to be stored than this server takes.")
        entry = _Entry(request, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._bytes += len(request.body)
        if self._storing is None:
            self._storing = asyncio.create_task(self._store(), name="accept")
        self._wake()
        return await entry.taken

    def _wake(self) -> None:
        if self._parked is not None and not self._parked.done():
            self._parked.set_result(None)

    async def close(self) -> None:
        """Until what was handed in is stored."""
        self._closing = True
        self._wake()
        if self._storing is not None:
            await asyncio.wait([self._storing])

    async def _store(self) -> None:
        try:
            while True:
                while self._waiting:
                    await self._store_some(self._next())
                if self._closing:
                    return
                self._parked = asyncio.get_running_loop().create_future()
                await self._parked
        finally:
            self._storing = self._parked = None

    def _next(self) -> list[_Entry]:
        entries: list[_Entry] = []
        size = 0
        while self._waiting and len(entries) < _MAX_ROWS and size < _MAX_BYTES:
            entry = self._waiting.popleft()
            size += len(entry.request.body)
            entries.append(entry)
        self._bytes -= size
        return entries

    async def _store_some(self, entries: Sequence[_Entry]) -> None:
        try:
            results = await self._accept([entry.request for entry in entries])
        except (psycopg.DataError, psycopg.IntegrityError, UnicodeEncodeError) as error:
            if len(entries) == 1:
                _fail(entries, error)
                return
            # One that cannot be stored must not take the others with it.
            middle = len(entries) // 2
            await self._store_some(entries[:middle])
            await self._store_some(entries[middle:])
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            await self._ask_for(entries, error)
        except Exception as error:
            # Whoever waits is told; the next ones may have better luck.
            _log.warning("%d requests could not be stored: %s", len(entries), type(error).__name__)
            _fail(entries, error)
        except BaseException:
            for entry in entries:
                entry.taken.cancel()
            raise
        else:
            for entry, taken in zip(entries, results, strict=True):
                if not entry.taken.done():
                    entry.taken.set_result(taken)

    async def _ask_for(self, entries: Sequence[_Entry], error: Exception) -> None:
        """The answer to a commit may be all that was lost: whatever is there after all is stored."""
        stored: Mapping[UUID, Accepted] = {}
        with contextlib.suppress(psycopg.Error, PoolTimeout):
            async with borrowed(self._database) as connection:
                stored = await sessions.find_stored(connection, [entry.request.id for entry in entries])
        for entry in entries:
            if (accepted := stored.get(entry.request.id)) is not None and not entry.taken.done():
                entry.taken.set_result(accepted)
        lost = [entry for entry in entries if entry.request.id not in stored]
        _log.warning("%d requests may not be stored: %s", len(lost), type(error).__name__)
        _fail(lost, error)

    async def _accept(self, requests: list[NewRequest]) -> list[Acceptance]:
        max_queued = self._limits.session_max_queued
        async with borrowed(self._database) as connection:
            handings: Mapping[str, Handing] = {}
            if self.desk is not None:
                handings = self.desk.hand_in({request.pool for request in requests})
            takers = {pool: Taker(each.worker_id, each.room, each.closed) for pool, each in handings.items()}
            known = False
            try:
                taken = await sessions.accept_many(connection, requests, max_queued=max_queued, takers=takers)
                for pool, handing in handings.items():
                    handing.take(
                        [
                            _item(request, each, each.lease)
                            for request, each in zip(requests, taken, strict=True)
                            if request.pool == pool and isinstance(each, Accepted) and each.lease is not None
                        ]
                    )
                known = True
            finally:
                for handing in handings.values():
                    handing.end(known)
            await asyncio.sleep(0)  # what was taken is called first
            return taken


def _item(request: NewRequest, accepted: Accepted, lease: Lease) -> Item:
    asked = SessionRequest(request.id, request.endpoint, request.stream, request.waited, cancelled=False)
    custom_id = public_id("session_request", request.id)
    return Item(lease, accepted.ordinal, accepted.sequence, custom_id, request.body, asked)


def _fail(entries: Sequence[_Entry], error: Exception) -> None:
    for entry in entries:
        if not entry.taken.done():
            entry.taken.set_exception(error)
