"""One connection through a fault proxy: four small tasks that read, wait as the weather tells them, and write."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic
from typing import NoReturn, Protocol

from tests.support.tcp_server import abort, reset
from tests.support.wait import wait_until

CHUNK_BYTES = 64 * 1024
_QUEUED_CHUNKS = 64
_LINGER_S = 2.0
_PIECES_PER_S = 20


class Way(Enum):
    """The two ways bytes go."""

    UP = "from client to server"
    DOWN = "from server to client"


class Cut(Enum):
    """How a connection ends, on both sides. A unix socket knows no reset: there both look alike."""

    RST = "reset"
    FIN = "end of stream"


class Stall(Enum):
    """Forward nothing more until the weather is fair again or the client has left."""

    HERE = "here"


@dataclass(frozen=True, slots=True)
class Back:
    """Bytes for the one who sent, not for the other side."""

    data: bytes


Step = bytes | Back | Cut | Stall
"""What becomes of bytes: forwarded, answered, or the end."""


class Screen(Protocol):
    """Sees a connection's bytes before they are forwarded, and says what becomes of them."""

    def up(self, data: bytes) -> Iterable[Step]: ...

    def down(self, data: bytes) -> Iterable[Step]: ...

    def ended(self) -> None: ...


class Trigger:
    """A fault that waits for its moment, `times` times; with None, every time."""

    def __init__(self, what: str, times: int | None = 1) -> None:
        self.what = what
        self.fired = 0
        self._left = times
        self._lock = threading.Lock()

    @property
    def armed(self) -> bool:
        return self._left is None or self._left > 0

    def take(self) -> bool:
        """Whether the moment is ours. It then ends in `fire`, or in `give_back` if nothing came of it."""
        with self._lock:
            if not self.armed:
                return False
            if self._left is not None:
                self._left -= 1
            return True

    def give_back(self) -> None:
        with self._lock:
            if self._left is not None:
                self._left += 1

    def fire(self) -> None:
        with self._lock:
            self.fired += 1

    def disarm(self) -> None:
        with self._lock:
            self._left = 0

    def wait(self, deadline_s: float, times: int = 1) -> None:
        """Until it has fired so many times."""
        wait_until(lambda: self.fired >= times, deadline_s)


@dataclass(slots=True, eq=False)
class ByteCut:
    """Cuts each connection that passes `limit` bytes one way, counted from now."""

    trigger: Trigger
    way: Way
    limit: int
    how: Cut
    passed: dict[int, int] = field(default_factory=dict)
    """Bytes so far, by connection."""

    def room(self, link: int, way: Way, size: int) -> int | None:
        """How many of the next `size` bytes still pass; None if the cut does not fall among them."""
        if way is not self.way or not self.trigger.armed:
            return None
        before = self.passed.get(link, 0)
        self.passed[link] = before + size
        return self.limit - before if before + size >= self.limit and self.trigger.take() else None


@dataclass(slots=True)
class _Condition:
    delay_s: float = 0.0
    bytes_per_s: int | None = None
    frozen: bool = False


class Weather:
    """What all connections of a proxy are subject to. Belongs to the proxy's event loop."""

    def __init__(self) -> None:
        self.ways = {way: _Condition() for way in Way}
        self.byte_cuts: list[ByteCut] = []
        self._cleared = 0
        self._changed = asyncio.Event()

    def change(self) -> None:
        """Wake whoever waits, to look at the weather again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def clear(self) -> None:
        self.ways = {way: _Condition() for way in Way}
        for byte_cut in self.byte_cuts:
            byte_cut.trigger.disarm()
        self.byte_cuts.clear()
        self._cleared += 1
        self.change()

    async def until_thawed(self, way: Way) -> None:
        while self.ways[way].frozen:
            await self._changed.wait()

    async def until_due(self, way: Way, arrived: float) -> None:
        while (left_s := arrived + self.ways[way].delay_s - monotonic()) > 0:
            await self._change_within(left_s)

    async def pace(self, way: Way, sent_bytes: int) -> None:
        """Take as long over what was sent as the throttle says, or until the weather changes."""
        rate = self.ways[way].bytes_per_s
        if rate is not None:
            await self._change_within(sent_bytes / rate)

    def piece_bytes(self, way: Way) -> int:
        rate = self.ways[way].bytes_per_s
        return CHUNK_BYTES if rate is None else max(1, rate // _PIECES_PER_S)

    async def cleared_before(self, event: asyncio.Event) -> bool:
        """Wait for fair weather; False if the event came first."""
        before = self._cleared
        gone = asyncio.create_task(event.wait())
        try:
            while self._cleared == before and not gone.done():
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait([gone, changed], return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            gone.cancel()
        return self._cleared != before

    async def _change_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


@dataclass(frozen=True, slots=True)
class End:
    """One of a link's two sockets."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def reset(self) -> None:
        reset(self.writer)

    def finish(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # closed already
            self.writer.write_eof()

    async def close(self, *, lingering: bool) -> None:
        """Close; lingering, only once the other side has: to close with bytes unread would be a reset."""
        try:
            if lingering:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(_LINGER_S):
                        while await self.reader.read(CHUNK_BYTES):
                            pass
            self.writer.close()
            with contextlib.suppress(OSError):
                await self.writer.wait_closed()
        finally:
            abort(self.writer)  # cancelled, it waits for nobody


_Queue = asyncio.Queue[tuple[float, bytes | None]]
"""Chunks with the time they came; b"" is the end of the stream, None a reset."""


class Link:
    """One client's connection, and the connection to the server that belongs to it."""

    def __init__(
        self,
        number: int,
        ends: tuple[End, End],
        screen: Screen,
        weather: Weather,
        on_fire: Callable[[Trigger, str, int], None],
    ) -> None:
        self.number = number
        self._client, self._server = ends
        self._screen = screen
        self._weather = weather
        self._on_fire = on_fire
        self._client_left = asyncio.Event()
        self._server_left = False
        self._ending: Cut | None = None
        self._task: asyncio.Task[None] | None = None
        for end in ends:
            # Nothing waits in this process's own buffers, where a freeze or a cut could not hold it back.
            end.writer.transport.set_write_buffer_limits(0)

    async def run(self) -> None:
        """Carry bytes until both sides have ended, or the link is cut."""
        self._task = asyncio.current_task()
        try:
            async with asyncio.TaskGroup() as group:
                for way in Way:
                    queue: _Queue = asyncio.Queue(_QUEUED_CHUNKS)
                    group.create_task(self._read(way, queue))
                    group.create_task(self._write(way, queue))
        finally:
            self._screen.ended()
            lingering = self._ending is Cut.FIN
            await asyncio.gather(self._client.close(lingering=lingering), self._server.close(lingering=lingering))

    def cut(self, how: Cut) -> None:
        if self._ending is not None:
            return
        self._ending = how
        for end in (self._client, self._server):
            if how is Cut.RST:
                end.reset()
            else:
                end.finish()
        if self._task is not None:
            self._task.cancel()

    async def _end(self, how: Cut) -> NoReturn:
        self.cut(how)
        while True:
            await asyncio.Event().wait()  # here the cancellation arrives

    def _source(self, way: Way) -> End:
        return self._client if way is Way.UP else self._server

    def _sink(self, way: Way) -> End:
        return self._server if way is Way.UP else self._client

    async def _read(self, way: Way, queue: _Queue) -> None:
        reader = self._source(way).reader
        while True:
            await self._weather.until_thawed(way)
            data: bytes | None
            try:
                data = await reader.read(CHUNK_BYTES)
            except OSError:
                data = None
            if not data and way is Way.UP:
                self._client_left.set()
            await queue.put((monotonic(), data))
            if not data:
                return

    async def _write(self, way: Way, queue: _Queue) -> None:
        look = self._screen.up if way is Way.UP else self._screen.down
        while True:
            arrived, data = await queue.get()
            await self._weather.until_due(way, arrived)
            await self._weather.until_thawed(way)
            if data is None:
                await self._end(Cut.RST)
            if not data:
                self._server_left = self._server_left or way is Way.DOWN
                self._sink(way).finish()
                return
            for step in look(data):
                await self._take(way, step)

    async def _take(self, way: Way, step: Step) -> None:
        if isinstance(step, Cut):
            await self._end(step)
        elif isinstance(step, Stall):
            if not await self._weather.cleared_before(self._client_left):
                await self._end(Cut.RST)
        elif isinstance(step, Back):
            if self._server_left:  # and the client was told: there is nothing more to answer
                await self._end(Cut.RST)
            await self._send(way, self._source(way), step.data)
        else:
            await self._send(way, self._sink(way), step)

    async def _send(self, way: Way, end: End, data: bytes) -> None:
        for byte_cut in self._weather.byte_cuts:
            room = byte_cut.room(self.number, way, len(data))
            if room is not None:
                await self._put(way, end, data[:room])
                self._on_fire(byte_cut.trigger, f"{byte_cut.limit} bytes {way.value}", self.number)
                await self._end(byte_cut.how)
        await self._put(way, end, data)

    async def _put(self, way: Way, end: End, data: bytes) -> None:
        try:
            while data:
                await self._weather.until_thawed(way)
                piece = data[: self._weather.piece_bytes(way)]
                data = data[len(piece) :]
                end.writer.write(piece)
                await end.writer.drain()
                await self._weather.pace(way, len(piece))
        except OSError:
            await self._end(Cut.RST)
