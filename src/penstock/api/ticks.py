"""Ticks: figures of a page as they change, as server-sent events.

However many tabs show a batch, or the list of an owner's work, it is read once a tick and encoded once. Ticks carry
sums only; which rows a grid shows is known to its page, which asks for them when `changes` has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Hashable, Iterator
from time import monotonic
from typing import Final
from uuid import UUID

import msgspec
import psycopg
from psycopg_pool import PoolClosed, PoolTimeout
from starlette.responses import Response, StreamingResponse

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.api.errors import no_work
from penstock.api.multipart import invalid
from penstock.api.work import WorkEntry, choose_owner, describe, parse_work_id, read_details
from penstock.backoff import Backoff
from penstock.batches import work
from penstock.batches.work import NO_PACE
from penstock.db.pool import Connection, Pool, borrowed

_log = logging.getLogger("penstock.ticks")

_TICK_S: Final = 0.25
_SLOW_TICK_S: Final = 1.0
# Reads per second of all that is watched in this process: beyond that, everything is read less often.
_READS_PER_S: Final = 60
_KEEPALIVE_S: Final = 15.0
# A browser connects again: by then its sign-in may have expired.
_LONGEST_S: Final = 3_600.0
_LISTED: Final = 50
_NEWEST: Final = UUID(int=2**128 - 1)
_OPEN: Final = ("validating", "in_progress", "paused", "cancelling")

_FAULTS = (psycopg.OperationalError, PoolTimeout, PoolClosed)


class Watched:
    """What some tabs show: read again at every tick, for as long as one of them is there."""

    tick_s = _TICK_S

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks
        self.readers = 0
        self.version = 0
        """Grows with every change."""
        self.gone = False
        """Whether it was deleted."""
        self.changed = asyncio.Event()
        """Event that is set at the next change and then replaced. Take it before looking, then wait for it."""
        self.idle = asyncio.Event()

    @property
    def stopping(self) -> bool:
        return self._ticks.stopping

    def event(self, since: int) -> bytes:
        """What has changed since a version, as an event; all of it since 0."""
        raise NotImplementedError

    async def read(self, connection: Connection) -> bool:
        """Read it again. Returns whether anything has changed."""
        raise NotImplementedError

    def wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def run(self, database: Pool) -> None:
        backoff, wait_s = Backoff(0.5, 5.0), 0.0
        while self.readers and not self.stopping and not self.gone:
            try:
                async with borrowed(database) as connection:
                    if await self.read(connection):
                        self.wake()
                backoff.reset()
                wait_s = 0.0
            except _FAULTS as error:
                wait_s = backoff.next_s()
                _log.warning("cannot read what a console shows, trying again: %s", type(error).__name__)
            except Exception as error:
                wait_s = backoff.next_s()
                _log.error("reading what a console shows failed, trying again: %s", type(error).__name__)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.idle.wait(), max(self.tick_s, wait_s, self._ticks.shortest_s))
        self.wake()


class WatchedWork(Watched):
    """One batch or job. Its figures are read at every tick, everything else of it once a second."""

    def __init__(self, ticks: Ticks, batch_id: UUID, *, for_admin: bool) -> None:
        super().__init__(ticks)
        self._batch_id = batch_id
        self._for_admin = for_admin
        self._event = b""
        self._figures: object = None
        self._read_at = -_SLOW_TICK_S

    def event(self, since: int) -> bytes:  # noqa: ARG002 - it is one object, always sent whole
        return b"event: gone\ndata: {}\n\n" if self.gone else self._event

    async def read(self, connection: Connection) -> bool:
        found = await work.read_work(connection, [self._batch_id], None)
        if found == self._figures and monotonic() < self._read_at + _SLOW_TICK_S:
            return False
        details = None
        if found:
            grace_s = self._ticks.grace_s
            details = await read_details(connection, self._batch_id, None, grace_s=grace_s, for_admin=self._for_admin)
        self._figures, self._read_at = found, monotonic()
        if details is None:
            self.gone = True
            return True
        self.tick_s = _TICK_S if details.ended_at is None else _SLOW_TICK_S
        event = _event(details)
        if event == self._event:
            return False
        self._event = event
        self.version += 1
        return True


class ListTick(Camel):
    """Entries of the list of work that have changed, and ids of those that were deleted."""

    work: list[WorkEntry]
    gone: list[str]


class WatchedList(Watched):
    """The newest work of an owner, or of all, and the newest that is not over."""

    tick_s = _SLOW_TICK_S

    def __init__(self, ticks: Ticks, owner: str | None) -> None:
        super().__init__(ticks)
        self._owner = owner
        self._entries: dict[UUID, tuple[int, WorkEntry]] = {}
        self._gone: list[tuple[int, str]] = []

    def event(self, since: int) -> bytes:
        changed = [entry for version, entry in self._entries.values() if version > since]
        gone = [id_ for version, id_ in self._gone if version > since] if since else []
        return _event(ListTick(work=changed, gone=gone))

    async def read(self, connection: Connection) -> bool:
        wanted: set[UUID] = set()
        for states in (work.states_behind(work.STATES), _OPEN):
            met = await work.find_work(
                connection, owner=self._owner, dialects=work.DIALECTS, states=states, below=_NEWEST, look=_LISTED
            )
            wanted.update(id_ for id_, _ in met)
        found = await work.read_work(connection, [*wanted | self._entries.keys()], self._owner)
        paces = await work.read_paces(connection, found)
        version = self.version + 1
        entries = {one.id: describe(one, paces.get(one.id, NO_PACE)) for one in found}
        gone = [entry.id for id_, (_, entry) in self._entries.items() if id_ not in entries]
        moved = [id_ for id_, entry in entries.items() if id_ not in self._entries or self._entries[id_][1] != entry]
        if not moved and not gone and self.version:
            return False
        self._entries.update({id_: (version, entries[id_]) for id_ in moved})
        self._entries = {id_: known for id_, known in self._entries.items() if id_ in wanted}
        self._gone = [*self._gone, *((version, id_) for id_ in gone)][-_LISTED:]
        self.version = version
        return True


def _event(content: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(content)


class Ticks:
    """Everything that the tabs of one process's consoles show."""

    def __init__(self, database: Pool, grace_s: float) -> None:
        self._database = database
        self.grace_s = grace_s
        """How long a worker may be silent."""
        self._watched: dict[Hashable, tuple[Watched, asyncio.Task[None]]] = {}
        self.stopping = False

    @property
    def shortest_s(self) -> float:
        """The shortest time between two reads of the same thing, with so many to be read."""
        return len(self._watched) / _READS_PER_S

    @contextlib.contextmanager
    def watch_work(self, batch_id: UUID, *, for_admin: bool) -> Iterator[Watched]:
        """Watch a batch or a job that the caller may see."""
        with self._watch(("work", batch_id, for_admin), WatchedWork(self, batch_id, for_admin=for_admin)) as watched:
            yield watched

    @contextlib.contextmanager
    def watch_list(self, owner: str | None) -> Iterator[Watched]:
        """Watch the newest work of an owner, or of all."""
        with self._watch(("list", owner), WatchedList(self, owner)) as watched:
            yield watched

    @contextlib.contextmanager
    def _watch(self, key: Hashable, new: Watched) -> Iterator[Watched]:
        """Join those who watch the same; the first of them begins it."""
        if key not in self._watched or self._watched[key][0].gone:
            running = asyncio.create_task(self._run(key, new), name="ticks")
            self._watched[key] = new, running
        watched, _ = self._watched[key]
        watched.readers += 1
        try:
            yield watched
        finally:
            watched.readers -= 1
            if not watched.readers:
                watched.idle.set()
                # The next reader begins anew, also before this one's task has ended.
                if self._watched.get(key, (None,))[0] is watched:
                    del self._watched[key]

    async def _run(self, key: Hashable, watched: Watched) -> None:
        await watched.run(self._database)
        if self._watched.get(key, (None,))[0] is watched:
            del self._watched[key]

    def stop(self) -> None:
        """End every stream: the server is going down, browsers connect again."""
        self.stopping = True
        for watched, _ in self._watched.values():
            watched.idle.set()
            watched.wake()


# -- the stream


class TicksQuery(msgspec.Struct):
    work: str | None = None
    home: bool = False
    owner: str | None = None


async def stream_ticks(call: Call[TicksQuery, None]) -> Response:
    """Figures as they change, at most four times a second: of one batch or job, as `GET /api/work/{work_id}` tells it,
    or of the newest entries of the list. The first event has all of it."""
    query, ticks = call.query, call.server.ticks
    if (query.work is None) is not query.home:
        raise invalid("work", "give either work=ID or home=true.")
    if query.work is None:
        watching = ticks.watch_list(choose_owner(call.caller, query.owner))
    else:
        watching = ticks.watch_work(await _find_work(call, query.work), for_admin=call.caller.role == "admin")
    return StreamingResponse(
        _stream(watching),
        media_type="text/event-stream",
        # Tells proxies not to buffer: they would hold every event back.
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _find_work(call: Call[TicksQuery, None], text: str) -> UUID:
    """The id of the caller's batch or job."""
    batch_id = parse_work_id(text)
    if batch_id is not None:
        async with borrowed(call.database) as connection:
            if await work.read_work(connection, [batch_id], call.caller.scope):
                return batch_id
    raise no_work(text, "work")


async def _stream(watching: contextlib.AbstractContextManager[Watched]) -> AsyncIterator[bytes]:
    until = monotonic() + _LONGEST_S
    with watching as watched:
        yield b"retry: 1000\n\n"
        version = 0
        while not watched.stopping and monotonic() < until:
            changed = watched.changed
            if watched.gone:
                yield watched.event(version)
                return
            if watched.version > version:
                event, version = watched.event(version), watched.version
                yield event
            try:
                await asyncio.wait_for(changed.wait(), _KEEPALIVE_S)
            except TimeoutError:
                yield b": still here\n\n"


ENDPOINTS = (
    Endpoint(
        "GET",
        "/api/ticks",
        stream_ticks,
        "Figures of a batch or job, or of the list, as server-sent events.",
        media="text/event-stream",
        errors=(404,),
    ),
)
