"""Notices of PostgreSQL (LISTEN and NOTIFY): one listening connection per process.

Nothing depends on them. A notice can be lost with its connection, and behind a transaction pooler there are none: every
subscriber polls as well, and a notice only makes the next poll come sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

import psycopg
from psycopg import sql

from penstock.backoff import Backoff
from penstock.db.pool import BACKEND_PID, KEEPALIVE, Connection, is_pooled

_log = logging.getLogger("penstock.notices")

WORK = "penstock_work"
"""There is something new to claim; the payload is its pool."""

ANSWERS = "penstock_answers"
"""Requests of sessions have been answered; the payload names their lanes (see `lanes_payload`)."""

_MAX_PAYLOAD_CHARS = 7_000
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 10.0

Handler = Callable[[str], None]


def lanes_payload(lanes: Iterable[int]) -> str:
    """Ids separated by commas; `*` for more of them than a notice can hold."""
    payload = ",".join(map(str, dict.fromkeys(lanes)))
    return payload if len(payload) <= _MAX_PAYLOAD_CHARS else "*"


async def notify(connection: Connection, channel: str, payload: str) -> None:
    """Notify every listening process, on every machine."""
    await connection.execute("SELECT pg_notify(%s, %s)", [channel, payload])


class NoticeListener:
    """Listens to channels for as long as its task runs."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._handlers: dict[str, set[Handler]] = {}
        self._changed = asyncio.Event()
        self.listening = asyncio.Event()
        """Set while notices arrive."""

    @contextlib.contextmanager
    def subscribe(self, channel: str, handler: Handler) -> Iterator[None]:
        """Call `handler` with every payload of the channel, in the event loop."""
        self._handlers.setdefault(channel, set()).add(handler)
        self._changed.set()
        try:
            yield
        finally:
            self._handlers[channel].discard(handler)

    async def run(self) -> None:
        """Listen, and after every lost connection listen again, until cancelled. Returns behind a pooler."""
        backoff = Backoff(_FIRST_BACKOFF_S, _LAST_BACKOFF_S)
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._conninfo,
                    autocommit=True,
                    prepare_threshold=None,
                    application_name="penstock notices",
                    connect_timeout=10,
                    **KEEPALIVE,
                )
                async with connection:
                    if is_pooled(connection, await (await connection.execute(BACKEND_PID)).fetchone()):
                        _log.info("the database is behind a pooler: no notices, polling alone")
                        return
                    backoff.reset()
                    await self._listen(connection)
            except (psycopg.Error, OSError) as error:
                _log.warning("listening failed, trying again: %s", error)
            finally:
                self.listening.clear()
            await backoff.wait()

    async def _listen(self, connection: psycopg.AsyncConnection) -> None:
        known: set[str] = set()
        while True:
            self._changed.clear()
            for channel in self._handlers.keys() - known:
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                known.add(channel)
                # Notices from before this moment were missed.
                self.tell(channel, "")
            self.listening.set()
            waiting = asyncio.create_task(self._changed.wait())
            receiving = asyncio.create_task(self._receive(connection))
            try:
                await asyncio.wait([waiting, receiving], return_when=asyncio.FIRST_COMPLETED)
                if receiving.done():
                    receiving.result()
                    raise psycopg.OperationalError("the connection ended")
            finally:
                for task in (waiting, receiving):
                    task.cancel()
                await asyncio.gather(waiting, receiving, return_exceptions=True)

    async def _receive(self, connection: psycopg.AsyncConnection) -> None:
        async for notice in connection.notifies():
            self.tell(notice.channel, notice.payload)

    def tell(self, channel: str, payload: str) -> None:
        """Call the channel's handlers as a notice does."""
        for handler in tuple(self._handlers.get(channel, ())):
            handler(payload)
