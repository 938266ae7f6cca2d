"""A TCP proxy that misbehaves on demand: it delays, throttles, freezes, cuts and refuses.

    with TcpProxy(("127.0.0.1", upstream.port)) as proxy:
        proxy.delay(0.05)
        proxy.cut_after(100, Way.DOWN)
        ...  # talk to 127.0.0.1, proxy.port
        proxy.heal()

It lives in a thread with an event loop of its own; its methods may be called from any thread and have taken effect
when they return. What the kernel was already given still arrives. A frozen proxy is a peer that is silent but alive:
the kernel acknowledges what is sent to it, so `tcp_user_timeout` does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self, TypeVar

from tests.support.history import HistoryWriter
from tests.support.proxy_link import CHUNK_BYTES, ByteCut, Cut, End, Link, Screen, Step, Trigger, Way, Weather
from tests.support.tcp_server import LoopThread, TcpServer, bind

_T = TypeVar("_T")

Target = tuple[str, int] | Path
"""Where a proxy leads: host and port, or the path of a unix socket."""

BOTH = (Way.UP, Way.DOWN)


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that happened: when, which, to what (a statement, a size), on which connection (0: on all)."""

    t: float
    what: str
    text: str
    link: int


class _Clear:
    """Lets everything through."""

    def up(self, data: bytes) -> Iterable[Step]:
        return (data,)

    def down(self, data: bytes) -> Iterable[Step]:
        return (data,)

    def ended(self) -> None:
        pass


class TcpProxy:
    """Listens on a free port of 127.0.0.1 and leads to `target`. Faults are kept in `log`, and told to a history."""

    host = "127.0.0.1"

    def __init__(self, target: Target, *, history: HistoryWriter | None = None, name: str = "proxy") -> None:
        self.target = target
        self.accepted = 0
        """Connections so far."""
        self._name = name
        self._history = history
        self._log: list[Fired] = []
        self._weather = Weather()
        self._links: set[Link] = set()
        self._server = TcpServer(self._serve, self.host, limit_bytes=CHUNK_BYTES)
        # Bound and never listening: it keeps the port ours while connections are refused.
        self._reserved = bind(self.host, shared=True)
        self.port: int = self._reserved.getsockname()[1]
        self._life = contextlib.ExitStack()
        self._thread = LoopThread(name)

    # -- faults

    def delay(self, seconds: float, *, ways: Iterable[Way] = BOTH) -> None:
        """Every byte arrives so much later. Bytes under way overlap: latency rises, throughput does not fall."""
        self._set("delay", f"{seconds:g} s", ways, delay_s=seconds)

    def throttle(self, bytes_per_s: int, *, ways: Iterable[Way] = BOTH) -> None:
        """Each connection carries no more than this."""
        self._set("throttle", f"{bytes_per_s} bytes/s", ways, bytes_per_s=bytes_per_s)

    def freeze(self, *, ways: Iterable[Way] = BOTH) -> None:
        """Connections are accepted and stay, but nothing is forwarded, not even that one side has left."""
        self._set("freeze", "", ways, frozen=True)

    def refuse(self) -> None:
        """New connections are refused by the kernel; those there are stay."""

        def stop() -> None:
            self._server.refuse()
            self._note("refuse")

        self._thread.do(stop)

    def cut(self, how: Cut = Cut.RST) -> int:
        """End every connection there is; how many there were."""

        def cut_all() -> int:
            links = list(self._links)
            for link in links:
                link.cut(how)
            self._note("cut", f"{len(links)} connections")
            return len(links)

        return self._thread.do(cut_all)

    def cut_after(self, count_bytes: int, way: Way, *, how: Cut = Cut.RST, times: int | None = 1) -> Trigger:
        """Cut the first connection that passes so many bytes that way from now on, right after the last of them.

        With 0, before the first.
        """
        trigger = Trigger("cut_after", times)
        self._thread.do(lambda: self._weather.byte_cuts.append(ByteCut(trigger, way, count_bytes, how)))
        return trigger

    def heal(self) -> None:
        """Accept and forward again, at once; disarm what has not fired."""

        def heal() -> None:
            self._mend()
            self._listen()

        self._thread.do(heal)

    # -- what happened

    @property
    def links(self) -> int:
        """Connections open now."""
        return len(self._links)

    @property
    def log(self) -> list[Fired]:
        return list(self._log)

    def happened(self, what: str) -> int:
        """How many faults of one kind there were."""
        return sum(fired.what == what for fired in self._log)

    # -- life

    def __enter__(self) -> Self:
        with self._life as undo:
            undo.callback(self._reserved.close)
            undo.enter_context(self._thread)
            undo.callback(lambda: self._thread.run(self._close()))
            self._thread.do(self._listen)
            self._life = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._life.close()
        if error is None:
            self._server.raise_mistakes()

    async def _close(self) -> None:
        self._server.refuse()
        self._mend()
        for link in list(self._links):
            link.cut(Cut.RST)
        await self._server.close()

    def _set(self, what: str, text: str, ways: Iterable[Way], **values: object) -> None:
        chosen = tuple(ways)

        def change() -> None:
            for way in chosen:
                for name, value in values.items():
                    setattr(self._weather.ways[way], name, value)
            self._weather.change()
            self._note(what, text)

        self._thread.do(change)

    def _mend(self) -> None:
        self._weather.clear()

    def _note(self, what: str, text: str = "", link: int = 0) -> None:
        self._log.append(Fired(monotonic(), what, text, link))
        if self._history is not None:
            self._history.record("info", what, self._name, {"text": text[:200], "link": link})

    def _fire(self, trigger: Trigger, text: str, link: int) -> None:
        self._note(trigger.what, text, link)
        trigger.fire()

    # -- connections

    def _listen(self) -> None:
        self._server.listen(bind(self.host, self.port, shared=True))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        number, client = self.accepted, End(reader, writer)
        try:
            server = End(*await self._connect())
        except OSError:
            client.reset()
            return
        link = Link(number, (client, server), self._screen(number), self._weather, self._fire)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self.target, Path):
            return await asyncio.open_unix_connection(str(self.target), limit=CHUNK_BYTES)
        return await asyncio.open_connection(*self.target, limit=CHUNK_BYTES)

    def _screen(self, number: int) -> Screen:
        """What looks at the bytes of connection `number`."""
        del number
        return _Clear()
