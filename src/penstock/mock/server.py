"""Mock on a socket: one protocol object per connection, timers instead of tasks.

A connection works on one request at a time and reads ahead only so far; pipelined requests are
therefore answered in order, and a client that does not read its answers stops being served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Self, cast

from penstock.config import KIB
from penstock.errors import PenstockError
from penstock.mock.behaviour import Behaviour, Fate
from penstock.mock.counts import DROPPED, HUNG, Interval, KeyCalls, Stats
from penstock.mock.service import Answer, Call, Service, plain_error
from penstock.mock.wire import (
    CONTINUE,
    LAST_CHUNK,
    Request,
    RequestReader,
    WireError,
    WireLimits,
    encode_chunk,
    encode_head,
)

READ_AHEAD_MAX_BYTES = 64 * KIB
LINGER_S = 2.0
STOP_GRACE_S = 2.0
BACKLOG = 4_096


class Connection(asyncio.Protocol):
    """Connection of one client. It enters the gate itself, since it has one call at a time."""

    def __init__(self, upstream: MockUpstream, limits: WireLimits) -> None:
        self._upstream = upstream
        self._service = upstream.service
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(limits)
        self._transport: asyncio.Transport
        self._call: Call | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._events: list[bytes] = []
        """Events of a streamed answer that are still to be sent, last event first."""
        self._begun = False
        self._serving = False
        self._deaf = False
        self._writable = True
        self._reading = True

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._upstream.connections.add(self)
        self._service.counts.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._upstream.remove(self)
        self._deaf = True
        self._stop_timer()
        if self._call is not None:
            self._service.counts.abandoned += self._call.fate is not Fate.HANG
            self._release()

    def data_received(self, data: bytes) -> None:
        self._service.counts.bytes_in += len(data)
        if self._deaf:
            return
        self._reader.feed(data)
        if self._call is None and self._writable:
            self._serve()
        elif self._reading and self._reader.buffered_bytes > READ_AHEAD_MAX_BYTES:
            self._reading = False
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._serve()

    # Requests, one after the other.

    def _serve(self) -> None:
        """Serve the requests that have been read, until one takes time or there is no whole one left."""
        if self._serving:
            return  # an answer that was due at once came back here: the loop below goes on with the next
        self._serving = True
        try:
            while self._call is None and self._writable and not self._deaf:
                request = self._reader.next()
                if request is None:
                    self._read_on()
                    break
                self._handle(request)
        except WireError as error:
            self._refuse(error)
        finally:
            self._serving = False

    def _handle(self, request: Request) -> None:
        outcome = self._service.handle(request)
        if isinstance(outcome, Answer):
            self._send(request, outcome)
        else:
            self._call = outcome
            self._service.gate.enter(self)

    def _read_on(self) -> None:
        if self._reader.wants_continue:
            self._reader.wants_continue = False
            self._transport.write(CONTINUE)
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _refuse(self, error: WireError) -> None:
        """Answer bytes that are not a request, and hang up."""
        self._write_whole(plain_error(error.status, error.message), keep_alive=False)
        self._deaf = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        # Closing with bytes unread would reset the connection and destroy the answer: let the client
        # finish sending first, and drop what it sends.
        if not self._reading:
            self._transport.resume_reading()
        self._timer = self._loop.call_later(LINGER_S, self._transport.close)

    # Calls, from the gate to the answer.

    def begin(self) -> None:
        """Start working on the call, which the gate has admitted."""
        call = cast(Call, self._call)
        self._begun = True
        if call.fate is Fate.HANG:
            self._service.counts.by_status[HUNG] += 1
            if self._upstream.stopping:
                self._transport.abort()
        elif call.streams:
            self._begin_stream(call)
        elif (work_s := call.work_s) > 0 and not self._upstream.stopping:
            self._timer = self._loop.call_later(work_s, self._finish, call)
        else:
            self._finish(call)

    def _finish(self, call: Call) -> None:
        self._timer = None
        if call.fate is Fate.DROP:
            self._service.counts.by_status[DROPPED] += 1
            self._hang_up()
            self._release()
        else:
            answer = call.answer()
            self._release()
            call.count_served()
            self._send(call.request, answer)

    def _release(self) -> None:
        self._call = None
        self._begun = False
        self._service.gate.leave(self)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def finish_now(self) -> None:
        """Answer the call under way now, or close an idle connection: the mock is stopping."""
        if self._call is None:
            self._hang_up()
        elif self._begun:
            self._stop_timer()
            if self._call.fate is Fate.HANG:
                self.abort()
            elif self._events:
                self._stream_on(self._call, 0.0)
            else:
                self._finish(self._call)

    def abort(self) -> None:
        self._transport.abort()

    def _hang_up(self) -> None:
        self._deaf = True
        self._transport.close()

    # Answers.

    def _send(self, request: Request, answer: Answer) -> None:
        keep_alive = request.keep_alive and not self._upstream.stopping
        self._write_whole(answer, keep_alive=keep_alive, with_body=request.method != "HEAD")
        self._go_on(keep_alive)

    def _go_on(self, keep_alive: bool) -> None:
        if keep_alive:
            self._serve()
        else:
            self._hang_up()

    def _write_whole(self, answer: Answer, *, keep_alive: bool, with_body: bool = True) -> None:
        headers = [("content-length", str(len(answer.body))), *answer.headers]
        head = encode_head(answer.status, headers, keep_alive=keep_alive)
        self._service.counts.by_status[str(int(answer.status))] += 1
        self._write(head + answer.body if with_body else head)

    def _write(self, data: bytes) -> None:
        self._service.counts.bytes_out += len(data)
        self._transport.write(data)

    def _begin_stream(self, call: Call) -> None:
        request, answer = call.request, call.answer()
        headers = list(answer.headers)
        if request.chunked_answers:
            headers.append(("transfer-encoding", "chunked"))
        else:
            request.keep_alive = False  # without chunks, only the end of the connection ends the answer
        self._write(encode_head(answer.status, headers, keep_alive=request.keep_alive))
        self._events = [*_encoded(answer.events, chunked=request.chunked_answers)][::-1]
        self._stream_on(call, call.work_s / len(self._events))

    def _stream_on(self, call: Call, pause_s: float) -> None:
        """Wait until the next event is due, or write all that are left if none has to wait."""
        if self._events and pause_s > 0 and not self._upstream.stopping:
            self._timer = self._loop.call_later(pause_s, self._stream_next, call, pause_s)
            return
        self._write(b"".join(reversed(self._events)))
        self._events.clear()
        self._service.counts.by_status["200"] += 1
        self._release()
        call.count_served()
        self._go_on(call.request.keep_alive)

    def _stream_next(self, call: Call, pause_s: float) -> None:
        self._timer = None
        self._write(self._events.pop())
        self._stream_on(call, pause_s)


def _encoded(events: Iterable[bytes], *, chunked: bool) -> Iterator[bytes]:
    if not chunked:
        yield from events
        return
    yield from map(encode_chunk, events)
    yield LAST_CHUNK


class MockUpstream:
    """Mock in this process: `async with MockUpstream(Behaviour(...)) as upstream`."""

    def __init__(
        self,
        behaviour: Behaviour | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: WireLimits | None = None,
    ) -> None:
        self.service = Service(behaviour or Behaviour())
        self.connections: set[Connection] = set()
        self.stopping = False
        self._host = host
        self._port = port
        self._limits = limits or WireLimits()
        self._server: asyncio.Server | None = None
        self._empty: asyncio.Event | None = None
        self._changes: list[asyncio.TimerHandle] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Connection(self, self._limits), self._host, self._port, backlog=BACKLOG
            )
        except OSError as error:
            raise PenstockError(
                f"cannot listen on {self._host} port {self._port}: {error.strerror or error}",
                hint="Choose another --port, or 0 for any free one.",
            ) from error
        self._port = self._server.sockets[0].getsockname()[1]
        self._changes = [
            loop.call_later(change.at_s, self.set, {change.name: change.value})
            for change in self.service.behaviour.changes
        ]

    async def stop(self) -> None:
        """Take no more connections, answer the calls under way at once, close."""
        if self._server is None:
            return
        self.stopping = True
        for change in self._changes:
            change.cancel()
        self._server.close()
        self._empty = asyncio.Event()
        for connection in list(self.connections):
            connection.finish_now()
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                while self.connections:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            for connection in list(self.connections):
                connection.abort()
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def port(self) -> int:
        return self._port

    @property
    def origin(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def base_url(self) -> str:
        """Base URL for an OpenAI client."""
        return f"{self.origin}/v1"

    def stats(self) -> Stats:
        return self.service.stats()

    def calls(self) -> dict[str, KeyCalls]:
        """Calls by key, in the order the keys were first seen."""
        return {record.key: record for record in self.service.counts.page(0, self.service.counts.keys).data}

    def rate(self) -> list[Interval]:
        """Calls over time: the latest intervals in which there were any."""
        return self.service.counts.rate()

    def set(self, values: Mapping[str, str | float | None]) -> None:
        """Change options, named and written as on the command line."""
        self.service.set(values)

    def reset(self) -> None:
        self.service.reset()

    def remove(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._empty is not None and not self.connections:
            self._empty.set()
