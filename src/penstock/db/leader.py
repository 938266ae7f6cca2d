"""One of many processes leads: the one that does what need not be done twice.

    async with Leader(conninfo, "caretaker", grace_s=10) as leader:
        async with leader.turn("expire") as turn:
            while turn.mine and await a_step(): ...

The lead is an advisory lock on a connection of its own. It is gone the moment that connection is: when the leader dies,
when its machine does, and, since the server ends a session that says nothing for `grace_s`, when it is frozen or cut
off. The leader beats several times within that time and believes in its lead only for as long after a beat as the
server is sure to have kept it, so that one who was frozen knows better before its next step.

A lead is not a fence. Between two looks at `mine` a process can stand still, and what it had begun goes on later: each
statement it sends must still be right if somebody else has done the same meanwhile. The lead saves the effort of doing
it everywhere.

Behind a transaction pooler a session is nobody's, and its locks fall to whoever gets it next. There nobody leads:
each turn is a lock of its own, held by a transaction for as long as the turn lasts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from time import monotonic
from types import TracebackType
from typing import Any, Protocol, Self

import psycopg

from penstock.db import sql
from penstock.db.pool import KEEPALIVE, Connection
from penstock.tasks import cancelled

_log = logging.getLogger("penstock.leader")
_SQL = sql.load("penstock.db", "leader.sql")

# Of the grace. The server counts from the end of a beat and the leader from its sending, so the leader stops first, and
# the rest is room for clocks that do not run alike.
_BEAT = 0.2
_SURE = 0.7
_LOOK_S = 1.0
_FIRST_BACKOFF_S = 0.2
_LAST_BACKOFF_S = 10.0


class Turn(Protocol):
    """One round of some periodic work."""

    @property
    def mine(self) -> bool:
        """Whether it is this process's to do, still. Look before every step."""


class Leader:
    """Leads, or stands ready to, for as long as its context lasts."""

    def __init__(
        self, conninfo: str, name: str, *, grace_s: float = 10.0, on_lead: Callable[[], None] = lambda: None
    ) -> None:
        self._conninfo = conninfo
        self._name = name
        self._grace_s = grace_s
        self._on_lead = on_lead
        self._sure_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self.pooled = asyncio.Event()
        """Set once it is known that the database is behind a pooler: nobody leads, turns are taken one by one."""

    @property
    def leads(self) -> bool:
        """Whether this process leads, for certain and at this moment."""
        return monotonic() < self._sure_until

    @property
    def mine(self) -> bool:
        """A leader's turns are its own for as long as it leads."""
        return self.leads

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._stand(), name=f"leader {self._name}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sure_until = 0.0
        if self._task is not None:
            await cancelled([self._task])

    @contextlib.asynccontextmanager
    async def turn(self, work: str) -> AsyncIterator[Turn]:
        """A turn at this work; its `mine` says from the start if it is somebody else's."""
        if not self.pooled.is_set():
            yield self
            return
        async with await self._connect() as connection:
            round_ = _Round(connection, f"{self._name} {work}", self._grace_s)
            await round_.begin()
            try:
                yield round_
            finally:
                await round_.end()

    # -- with a session of our own

    async def _stand(self) -> None:
        """Stand for the lead, and after every lost connection stand again, until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                async with await self._connect() as connection:
                    if not await self._prepare(connection):
                        _log.info("the database is behind a pooler: nobody leads, each turn is taken by itself")
                        self.pooled.set()
                        self._on_lead()
                        return
                    backoff_s = _FIRST_BACKOFF_S
                    await self._follow(connection)
                    await self._lead(connection)
            except (psycopg.Error, OSError) as error:
                if self._sure_until:
                    _log.warning("%s: no longer leading: %s", self._name, type(error).__name__)
            finally:
                self._sure_until = 0.0
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1))  # noqa: S311 -- jitter
            backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)

    async def _prepare(self, connection: Connection) -> bool:
        """Make the session one that can lead. False if it is not ours alone."""
        row = await (await connection.execute(_SQL["whose_session"])).fetchone()
        if row != (connection.info.backend_pid,):
            return False
        await connection.execute(_SQL["prepare_candidate"], {"grace_ms": self._grace_ms})
        return True

    async def _follow(self, connection: Connection) -> None:
        """Until the lead is ours."""
        while True:
            began = monotonic()
            row = await (await connection.execute(_SQL["lead_if_nobody_does"], {"name": self._name})).fetchone()
            if row == (True,):
                self._sure_until = began + _SURE * self._grace_s
                _log.info("%s: leading", self._name)
                self._on_lead()
                return
            await _listen(connection, min(_LOOK_S, _BEAT * self._grace_s))

    async def _lead(self, connection: Connection) -> None:
        """Beat, until the connection ends."""
        while True:
            await _listen(connection, _BEAT * self._grace_s)
            began = monotonic()
            async with asyncio.timeout(self._grace_s):
                await connection.execute(_SQL["beat"])
            self._sure_until = began + _SURE * self._grace_s

    async def _connect(self) -> Connection:
        options: dict[str, Any] = {**KEEPALIVE, "tcp_user_timeout": self._grace_ms}
        return await psycopg.AsyncConnection.connect(
            self._conninfo,
            autocommit=True,
            prepare_threshold=None,
            application_name=f"penstock leader {self._name}",
            connect_timeout=10,
            **options,
        )

    @property
    def _grace_ms(self) -> int:
        return int(self._grace_s * 1000)


class _Round:
    """One turn behind a pooler: a lock that lasts as long as a transaction, which is kept awake."""

    def __init__(self, connection: Connection, name: str, grace_s: float) -> None:
        self._connection = connection
        self._name = name
        self._grace_s = grace_s
        self._sure_until = 0.0
        self._ended = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    @property
    def mine(self) -> bool:
        return monotonic() < self._sure_until

    async def begin(self) -> None:
        began = monotonic()
        values = {"name": self._name, "grace_ms": int(self._grace_s * 1000)}
        await self._connection.set_autocommit(False)
        row = await (await self._connection.execute(_SQL["take_round_if_nobody_has"], values)).fetchone()
        if row is not None and row[0]:
            self._sure_until = began + _SURE * self._grace_s
            self._beating = asyncio.create_task(self._beat(), name=f"round {self._name}")

    async def _beat(self) -> None:
        # Not cancelled but told: a statement that is cut off may take the connection with it.
        with contextlib.suppress(psycopg.Error):
            while not await _within(self._ended, _BEAT * self._grace_s):
                began = monotonic()
                await self._connection.execute(_SQL["beat"])
                self._sure_until = began + _SURE * self._grace_s

    async def end(self) -> None:
        """What was done is done, also where the lock was lost on the way."""
        self._ended.set()
        if self._beating is not None:
            await asyncio.gather(self._beating, return_exceptions=True)
        self._sure_until = 0.0
        with contextlib.suppress(psycopg.Error):
            await self._connection.rollback()


async def _within(event: asyncio.Event, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def _listen(connection: Connection, seconds: float) -> None:
    """Wait, and raise as soon as the connection ends."""
    async for _ in connection.notifies(timeout=seconds):
        pass
