"""Handlers that wait, for as long as their caller is there: for a session's answer, or for work of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from penstock.api.errors import ApiError
from penstock.api.follow import wait_until_left
from penstock.server.waiters import Waiter, Waiters
from penstock.sessions.answers import RequestRow
from penstock.tasks import cancel_and_wait

_T = TypeVar("_T")


async def while_caller_stays(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do some work for a caller whose body is whole. It is cancelled when the caller leaves, or its key ends: raises
    ClientDisconnect."""
    working = asyncio.create_task(work)
    left = asyncio.create_task(wait_until_left(receive))
    try:
        await asyncio.wait((working, left), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        left.cancel()
        if not working.done():
            await cancel_and_wait([working])


class AnswerWait:
    """Wait of a handler for a request: ends when its waiter has news, its caller leaves, or the server stops."""

    def __init__(self, waiters: Waiters, waiter: Waiter, receive: Receive) -> None:
        self._waiters = waiters
        self._waiter = waiter
        self._receive = receive

    def __enter__(self) -> Self:
        self._left = asyncio.create_task(wait_until_left(self._receive))
        self._left.add_done_callback(lambda _: self._waiter.changed.set())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.cancel()

    async def wait_for_change(self, until: float) -> bool:
        """Wait for news until this time of the monotonic clock. False if there was none, or the server is stopping.

        Raises ClientDisconnect if the caller has gone.
        """
        waiter = self._waiter
        if not self._waiters.stopping.is_set() and not self._left.done():
            timer = asyncio.get_running_loop().call_later(max(0.0, until - monotonic()), waiter.changed.set)
            try:
                await waiter.changed.wait()
            finally:
                timer.cancel()
        if waiter.row is not None or waiter.pieces:
            waiter.changed.clear()
            return True
        if waiter.gone:
            raise ApiError(404, "The request is gone: its session was deleted.", code="session_deleted")
        if self._left.done():
            raise ClientDisconnect
        return False

    async def wait_for_answer(self, until: float) -> RequestRow | None:
        """Wait for the answer until this time of the monotonic clock. None if it did not come."""
        while self._waiter.row is None:
            if not await self.wait_for_change(until):
                return None
        return self._waiter.row
