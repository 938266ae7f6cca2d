"""Followed batches: server-sent events and long polls, fed by one poller per followed batch and process.

However many readers follow a batch, it is read once and each event is encoded once; readers share the bytes. The
results last read are kept for readers that keep up. For a reader that lags behind, or starts far back, they are read
again at its own pace, so that a slow reader costs a block of memory at the most, and no database connection. Both are
the batch's owner's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Self
from uuid import UUID

import msgspec
import psycopg
from psycopg_pool import PoolClosed, PoolTimeout
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from penstock.api import objects
from penstock.api.batches import find_batch
from penstock.api.endpoint import Call, Endpoint
from penstock.api.multipart import invalid
from penstock.api.result_blocks import ResultBlocks
from penstock.backoff import Backoff
from penstock.batches.read import Batch, get_batch
from penstock.db.pool import Pool, borrowed
from penstock.model import public_id
from penstock.server.memory import MemoryBudget, MemoryUsedUpError

_log = logging.getLogger("penstock.follow")

_POLL_S = 0.25
# Limits per second and process of polls, and of sends of one batch's events: beyond them, every reader waits longer.
_POLLS_PER_S = 100
_SENDS_PER_S = 1_000
_PROGRESS_S = 1.0
_KEEPALIVE_S = 15.0
# Bytes that wait in memory for a reader that does not read.
_SEND_BYTES = 64 * 1024
_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 5.0

_FAULTS = (psycopg.OperationalError, PoolTimeout, PoolClosed, MemoryUsedUpError)


class Watch:
    """Batch that this process follows for its readers, as last read."""

    def __init__(self, hub: Hub, batch: Batch) -> None:
        self.batch_id = batch.id
        self.batch: Batch | None = batch
        """The batch; None once it has been deleted."""
        self.event = b""
        """The batch as a progress event."""
        self.version = 0
        """Grows with every progress event."""
        self.changed = asyncio.Event()
        """Event that is set at the next news and then replaced. Take it before looking, then wait for it."""
        self.readers = 0
        self.result_readers = 0
        self._database = hub.database.of(batch.owner)
        self.results = ResultBlocks(self._database, hub.memory, batch.id, batch.owner)
        self._hub = hub
        self._told_at = 0.0
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._update_event()

    @property
    def ended(self) -> bool:
        return self.batch is None or self.batch.state.terminal

    @property
    def stopping(self) -> bool:
        return self._hub.stopping

    def last_event(self) -> bytes:
        """The event that ends every stream: the batch as it ended, or that it was deleted."""
        if self.batch is None:
            return _event(b"done", msgspec.json.encode(objects.BatchDeleted(id=public_id("batch", self.batch_id))))
        return self.event.replace(b"event: progress", b"event: done", 1)

    def wake(self) -> None:
        """Wake every reader to look."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
        if self._hub.stopping:
            self._idle.set()

    def leave(self) -> None:
        """Count a reader out."""
        self.readers -= 1
        if not self.readers:
            self._idle.set()

    async def _run(self) -> None:
        backoff = Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        wait_s = 0.0
        while self.readers and not self._hub.stopping:
            pause_s = max(_POLL_S, self.result_readers / _SENDS_PER_S, len(self._hub.watches) / _POLLS_PER_S)
            await self._rest(max(pause_s, wait_s))
            if not self.readers:
                break
            try:
                await self._poll()
                backoff.reset()
                wait_s = 0.0
            except _FAULTS as error:
                wait_s = backoff.next_s()
                _log.warning("cannot read batch %s, trying again: %s", self.batch_id, type(error).__name__)
            except Exception as error:
                backoff.longest_s = _LAST_BACKOFF_S
                wait_s = backoff.next_s()
                _log.error("following batch %s failed, trying again: %s", self.batch_id, type(error).__name__)
        # Nothing is awaited between the last check of `readers` and this: the next reader finds a new watch.
        self._hub.watches.pop(self.batch_id, None)
        self.results.close()
        self.wake()

    async def _rest(self, seconds: float) -> None:
        """Sleep, unless the last reader leaves."""
        self._idle.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def _poll(self) -> None:
        # The batch before its results: once it is seen to have ended, the results read after are all of them.
        async with borrowed(self._database) as connection:
            batch = await get_batch(connection, self.batch_id, None)
        if not self.result_readers:
            self.results.forget()
        news = await self.results.advance()
        self._note(batch)
        if self.ended or time.monotonic() - self._told_at >= _PROGRESS_S:
            news = self._update_event() or news
        if news:
            self.wake()

    def join(self, batch: Batch) -> None:
        """Count a reader in, that has just read the batch."""
        self.readers += 1
        self._note(batch)
        if self.ended and self._update_event():
            self.wake()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"follow {self.batch_id.hex}")

    def _note(self, batch: Batch | None) -> None:
        """Keep a reading of the batch unless a later one is known already; a deleted batch stays deleted."""
        if self.batch is not None and (batch is None or not _is_older(batch, self.batch)):
            self.batch = batch

    def _update_event(self) -> bool:
        """Make the progress event of the batch as it is now. Returns whether it has changed."""
        if self.batch is not None:
            event = _event(b"progress", msgspec.json.encode(objects.batch_object(self.batch)))
            if event == self.event:
                return False
            self.event = event
            self._told_at = time.monotonic()
        self.version += 1
        return True


def _is_older(batch: Batch, known: Batch) -> bool:
    """Whether one reading of a batch was made before another: figures only grow until requests are run again."""
    if batch.reruns != known.reruns:
        return batch.reruns < known.reruns
    if batch.state.terminal != known.state.terminal:
        return known.state.terminal
    return batch.counts.settled < known.counts.settled


class Hub:
    """Hub of the followed batches of one process."""

    def __init__(self, database: Pool, memory: MemoryBudget) -> None:
        self.database = database
        self.memory = memory
        self.watches: dict[UUID, Watch] = {}
        self.stopping = False

    @contextlib.contextmanager
    def watching(self, batch: Batch) -> Iterator[Watch]:
        """Follow a batch that the caller may see, just read."""
        watch = self.watches.get(batch.id)
        if watch is None:
            watch = self.watches[batch.id] = Watch(self, batch)
        watch.join(batch)
        try:
            yield watch
        finally:
            watch.leave()

    async def wait(self, batch: Batch, timeout_s: float, receive: Receive) -> Batch | None:
        """Wait until the batch has ended or the time is up. None if it was deleted meanwhile."""
        with self.watching(batch) as watch:
            ended = asyncio.create_task(_wait_until_ended(watch))
            left = asyncio.create_task(wait_until_left(receive))
            try:
                await asyncio.wait((ended, left), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if left.done():
                    raise ClientDisconnect
            finally:
                ended.cancel()
                left.cancel()
            return watch.batch

    def stop(self) -> None:
        """End every stream and answer every long poll: the server is going down, clients come again elsewhere."""
        self.stopping = True
        for watch in self.watches.values():
            watch.wake()


async def _wait_until_ended(watch: Watch) -> None:
    while True:
        changed = watch.changed
        if watch.ended or watch.stopping:
            return
        await changed.wait()


async def wait_until_left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


# -- server-sent events


class EventsQuery(msgspec.Struct):
    results: bool = False
    after: int | None = None


async def batch_events(call: Call[EventsQuery, None]) -> Response:
    """The batch as it runs, at most once a second; with `results=true` every result too, in order of completion."""
    batch = await find_batch(call, call.id("batch", "batch_id"))
    return StreamingResponse(
        _stream(call.server.hub, batch, _offset(call) if call.query.results else None),
        media_type="text/event-stream",
        # Tells proxies not to buffer: they would hold every event back.
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


def _offset(call: Call[EventsQuery, None]) -> int:
    text = call.request.headers.get("last-event-id") or str(call.query.after or 0)
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise invalid("after", "it is the id of a result event.")
    return int(text)


async def _stream(hub: Hub, batch: Batch, offset: int | None) -> AsyncIterator[bytes]:
    with hub.watching(batch) as watch:
        yield b"retry: 2000\n\n" + watch.event
        version = watch.version
        with _Reader(watch, offset) as reader:
            while not watch.stopping:
                changed, ended = watch.changed, watch.ended
                if watch.version != version and not ended:
                    version = watch.version
                    yield watch.event
                async for events in reader.read(ended):
                    yield events
                if ended and reader.complete:
                    yield watch.last_event()
                    return
                try:
                    # An ended batch is not polled any more: results that could not be read are read again here.
                    await asyncio.wait_for(changed.wait(), _POLL_S if ended else _KEEPALIVE_S)
                except TimeoutError:
                    yield b": still here\n\n"


class _Reader:
    """Position of one reader in the results of a batch; None for a reader that does not want results."""

    def __init__(self, watch: Watch, offset: int | None) -> None:
        self._watch = watch
        self._offset = offset
        self.complete = offset is None
        """Whether the reader has had everything."""

    def __enter__(self) -> Self:
        self._watch.result_readers += self._offset is not None
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.result_readers -= self._offset is not None

    async def read(self, ended: bool) -> AsyncIterator[bytes]:
        """Blocks of all results up to now."""
        results = self._watch.results
        while self._offset is not None and not self._watch.stopping:
            if results.edge is not None and self._offset >= results.edge and not ended:
                return
            try:
                block = await results.after(self._offset)
                if block is None:
                    results.reached(self._offset)
                    self.complete = ended
                    return
                block.take()
            except _FAULTS:
                return
            self._offset = block.after
            try:
                for at in range(0, len(block.events), _SEND_BYTES):
                    yield block.events[at : at + _SEND_BYTES]
            finally:
                block.let_go()


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, data)


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/batches/{batch_id}/events",
        batch_events,
        "Follow a batch as server-sent events: progress, result, done.",
        media="text/event-stream",
        errors=(404,),
    ),
)
