"""Every order of a few transactions: each runs its statement at one point and commits at a later one.

A statement that has to wait is recognised by the server's own word for it (`pg_blocking_pids`), never by time. Its
commit then takes place as soon as it is no longer blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import Any

import psycopg

from penstock.db import arrays
from penstock.db.pool import Connection
from tests.support.thorough import thorough

DEADLINE_S = 30.0
# Nothing here tests the disk, and a deadlock should be told at once.
_OPTIONS = "-c synchronous_commit=off -c deadlock_timeout=100ms -c plan_cache_mode=force_generic_plan"

Statement = Callable[[Connection], Awaitable[Any]]
Order = tuple[int, ...]


def orders(sessions: int, *, scenes: bool = False) -> list[Order]:
    """A session's first mention runs its statement, the second commits.

    Of two sessions there are four in which they meet (one after the other is what every other test does), and each pair
    of moves has two of them, one for either to begin; a pair that meets in many scenes has one in each. Of three there
    are ninety, and each test has its own twelfth. `make races` has all.
    """
    found = _all(sessions)
    if thorough():
        return found
    meeting = [order for order in found if _meet(order)]
    test = os.environ["PYTEST_CURRENT_TEST"]
    if sessions > 2:
        return sorted(_chance(test).sample(meeting, len(meeting) // 12))
    drawn = [_chance(test).choice([order for order in meeting if order[0] == first]) for first in (0, 1)]
    return [_chance(test).choice(drawn)] if scenes else drawn


@cache
def _chance(test: str) -> random.Random:
    """A test's own, the same in every run: each pair of moves gets other orders."""
    return random.Random(test)


def orders_of_twins() -> list[Order]:
    """The orders in which two sessions meet that do the same: which of them begins makes no difference."""
    return [order for order in _all(2) if order[0] == 0 and _meet(order)]


def _all(sessions: int) -> list[Order]:
    return sorted(set(permutations([number for number in range(sessions) for _ in range(2)])))


def _meet(order: Order) -> bool:
    """Whether any of them runs its statement while another has not committed."""
    return any(first != second for first, second in zip(*[iter(order)] * 2, strict=True))


@dataclass
class Play:
    """What happened in one order."""

    answers: list[Any]
    events: list[tuple[str, int]] = field(default_factory=list)
    """('start' | 'blocked' | 'commit', session), as they happened."""

    def at(self, event: str, session: int) -> int:
        return self.events.index((event, session))

    def was_blocked(self, session: int) -> bool:
        return ("blocked", session) in self.events


@dataclass
class _Session:
    number: int
    connection: Connection
    task: asyncio.Task[Any] | None = None
    to_commit: bool = False
    committed: bool = False


class Interleaver:
    """Some connections that take turns, and one that watches them."""

    def __init__(self, connections: Sequence[Connection], observer: Connection) -> None:
        self._connections = list(connections)
        self.observer = observer

    @contextlib.asynccontextmanager
    async def spare(self) -> AsyncIterator[Connection]:
        """One of the connections for a while, each statement its own transaction."""
        connection = self._connections.pop()
        try:
            yield connection
        finally:
            self._connections.append(connection)

    async def play(self, order: Order, statements: Sequence[Statement]) -> Play:
        sessions = [_Session(number, self._connections[number]) for number in range(len(statements))]
        play = Play([None] * len(statements))
        try:
            async with asyncio.timeout(DEADLINE_S):
                for number in order:
                    await self._turn(sessions[number], statements[number], play)
                    await self._come_to_rest(sessions, play)
                while not all(session.committed for session in sessions):
                    await self._come_to_rest(sessions, play)
        except BaseException:
            await _give_up(sessions)
            raise
        return play

    async def _turn(self, session: _Session, statement: Statement, play: Play) -> None:
        if session.task is not None:
            session.to_commit = True
            return
        await session.connection.execute("BEGIN")
        play.events.append(("start", session.number))
        session.task = asyncio.ensure_future(statement(session.connection))

    async def _come_to_rest(self, sessions: Sequence[_Session], play: Play) -> None:
        """Until every statement under way has ended or waits for another session, and whoever may has committed."""
        while True:
            ready = [session for session in sessions if _may_commit(session)]
            for session in ready:
                await self._commit(session, play)
            under_way = [session for session in sessions if session.task is not None and not session.task.done()]
            blocked = await self._blocked(under_way)
            for session in blocked:
                if not play.was_blocked(session.number):
                    play.events.append(("blocked", session.number))
            at_rest = all(session in blocked or _is_idle(session) for session in sessions)
            if not ready and at_rest:
                return

    async def _commit(self, session: _Session, play: Play) -> None:
        assert session.task is not None
        play.answers[session.number] = await session.task
        await session.connection.execute("COMMIT")
        session.committed = True
        play.events.append(("commit", session.number))

    async def _blocked(self, sessions: Sequence[_Session]) -> list[_Session]:
        if not sessions:
            return []
        cursor = await self.observer.execute(
            "SELECT pid FROM unnest(%s::int4[]) AS pid WHERE cardinality(pg_blocking_pids(pid)) > 0",
            [[session.connection.info.backend_pid for session in sessions]],
        )
        pids = {pid for (pid,) in await cursor.fetchall()}
        # One that ended between the question and now is not blocked any more.
        return [
            session
            for session in sessions
            if session.connection.info.backend_pid in pids and session.task is not None and not session.task.done()
        ]


def _is_idle(session: _Session) -> bool:
    """It waits for its next turn."""
    return session.task is None or session.committed or (session.task.done() and not session.to_commit)


def _may_commit(session: _Session) -> bool:
    return session.to_commit and not session.committed and session.task is not None and session.task.done()


async def _give_up(sessions: Sequence[_Session]) -> None:
    for session in sessions:
        if session.task is not None and not session.committed:
            session.task.cancel()
            with contextlib.suppress(BaseException):
                await session.task
            with contextlib.suppress(psycopg.Error):
                await session.connection.rollback()


@contextlib.asynccontextmanager
async def interleaver(conninfo: str, sessions: int) -> AsyncIterator[Interleaver]:
    async with contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(
                await psycopg.AsyncConnection.connect(conninfo, autocommit=True, prepare_threshold=1, options=_OPTIONS)
            )
            for _ in range(sessions + 1)
        ]
        for connection in connections:
            arrays.register(connection)
        yield Interleaver(connections[:-1], connections[-1])


def named(order: Order, names: Sequence[str]) -> str:
    """An order as a person reads it: `claim, cancel, cancel commits, claim commits`."""
    return ", ".join(_points(order, names))


def _points(order: Order, names: Sequence[str]) -> Iterator[str]:
    seen: set[int] = set()
    for number in order:
        yield f"{names[number]} commits" if number in seen else names[number]
        seen.add(number)
