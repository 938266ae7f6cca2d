"""Being told at once instead of at the next poll: one listening connection per process.

Nothing depends on it. A notice can be lost with its connection, and behind a transaction pooler there are none: whoever
waits on a bell polls as well, and a ring only makes the next poll come sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Iterator

import psycopg
from psycopg import sql

from penstock.db.pool import BACKEND_PID, KEEPALIVE, Connection, is_pooled

_log = logging.getLogger("penstock.bell")

WORK = "penstock_work"
"""There is something new to claim; the payload is its pool."""

ANSWERS = "penstock_answers"
"""Requests of sessions have been answered; the payload names their lanes (see `lanes_payload`)."""

_MAX_PAYLOAD_CHARS = 7_000
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 10.0

Hearer = Callable[[str], None]


def lanes_payload(lanes: Iterable[int]) -> str:
    """Ids separated by commas; `*` for more of them than a notice can hold."""
    payload = ",".join(map(str, dict.fromkeys(lanes)))
    return payload if len(payload) <= _MAX_PAYLOAD_CHARS else "*"


async def ring(connection: Connection, channel: str, payload: str) -> None:
    """Tell everybody who listens, on every machine."""
    await connection.execute("SELECT pg_notify(%s, %s)", [channel, payload])


class Bell:
    """Listens to channels for as long as its task runs."""

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._hearers: dict[str, set[Hearer]] = {}
        self._changed = asyncio.Event()
        self.listening = asyncio.Event()
        """Set while notices arrive."""

    @contextlib.contextmanager
    def hears(self, channel: str, hearer: Hearer) -> Iterator[None]:
        """Call `hearer` with every payload of the channel, in the event loop."""
        self._hearers.setdefault(channel, set()).add(hearer)
        self._changed.set()
        try:
            yield
        finally:
            self._hearers[channel].discard(hearer)

    async def run(self) -> None:
        """Listen, and after every lost connection listen again, until cancelled or told that nobody will ever ring."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._conninfo,
                    autocommit=True,
                    prepare_threshold=None,
                    application_name="penstock bell",
                    connect_timeout=10,
                    **KEEPALIVE,
                )
                async with connection:
                    if is_pooled(connection, await (await connection.execute(BACKEND_PID)).fetchone()):
                        _log.info("the database is behind a pooler: no notices, polling alone")
                        return
                    backoff_s = _FIRST_BACKOFF_S
                    await self._listen(connection)
            except (psycopg.Error, OSError) as error:
                _log.warning("listening failed, trying again: %s", error)
            finally:
                self.listening.clear()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1))  # noqa: S311 -- jitter
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _listen(self, connection: psycopg.AsyncConnection) -> None:
        known: set[str] = set()
        while True:
            self._changed.clear()
            for channel in self._hearers.keys() - known:
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                known.add(channel)
                # Whatever happened before this moment was not heard.
                self.tell(channel, "")
            self.listening.set()
            waiting = asyncio.create_task(self._changed.wait())
            hearing = asyncio.create_task(self._hear(connection))
            try:
                await asyncio.wait([waiting, hearing], return_when=asyncio.FIRST_COMPLETED)
                if hearing.done():
                    hearing.result()
                    raise psycopg.OperationalError("the connection ended")
            finally:
                for task in (waiting, hearing):
                    task.cancel()
                await asyncio.gather(waiting, hearing, return_exceptions=True)

    async def _hear(self, connection: psycopg.AsyncConnection) -> None:
        async for notice in connection.notifies():
            self.tell(notice.channel, notice.payload)

    def tell(self, channel: str, payload: str) -> None:
        """What a notice does, without one."""
        for hearer in tuple(self._hearers.get(channel, ())):
            hearer(payload)
