"""Threads in which uploads are read and stored, shared between owners.

An owner may use as many threads as it leaves free (`shares.py`). Inside the threads, readers keep a pace by which each
owner has the same share of one core: the interpreter has no more to give. While others call, readers leave most of
it to the event loop, which has to win it back from them many times in a request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from math import inf
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from anyio.lowlevel import RunVar
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from penstock.api.errors import disk_full
from penstock.db.embedded.reserve import has_room
from penstock.intake.pace import paced
from penstock.server.memory import Hold
from penstock.shares import Shares
from penstock.tasks import cancel_and_wait

if TYPE_CHECKING:
    from penstock.api.endpoint import Call

_T = TypeVar("_T")

# Each thread may hold a database connection of its own: few enough for the server, enough to keep it busy.
_MAX_THREADS = 12
_MAX_REST_S = 0.25
"""Longest rest of a reader between two pieces; what it owes beyond that, it rests after the next ones."""
_PARTS_BESIDE_CALLS = 5
"""One part of the interpreter is for all readers together while owners call who are not the reader's."""
_LATELY_S = 1.0
"""So long after its last call an owner counts as calling."""


class _Stopped(Exception):  # noqa: N818 - not an error
    """The work is not wanted any more."""


class UploadThreads:
    """The threads of one server."""

    def __init__(self, threads: int = _MAX_THREADS) -> None:
        self._limiter = CapacityLimiter(threads)
        self._shares = Shares(threads)
        self._last_call = self._last_of_another = ("", -inf)
        """The last call, as its owner and time; and the last one before it by another owner."""

    def note_call(self, owner: str) -> None:
        """Note that an owner calls: readers of the others leave it most of the interpreter for a moment."""
        if owner != self._last_call[0]:
            self._last_of_another = self._last_call
        self._last_call = (owner, monotonic())

    def _parts(self, owner: str) -> int:
        """Into how many parts the interpreter is split of which a reader of that owner has one."""
        last = self._last_of_another if self._last_call[0] == owner else self._last_call
        beside_calls = monotonic() - last[1] < _LATELY_S
        return self._shares.parts(owner) * (_PARTS_BESIDE_CALLS if beside_calls else 1)

    async def run(self, owner: str, work: Callable[[], _T], stop: threading.Event) -> _T:
        """Run something that blocks. It is not left behind: a cancelled caller waits for its end."""
        await self._shares.take(owner)
        try:
            return await to_thread.run_sync(partial(self._paced, owner, work, stop), limiter=self._limiter)
        finally:
            self._shares.give_back(owner)

    def _paced(self, owner: str, work: Callable[[], _T], stop: threading.Event) -> _T:
        used_before, owed_s = thread_time(), 0.0

        def pace() -> None:
            nonlocal used_before, owed_s
            # Owners have equal shares of a core, and an owner's threads equal parts of its share.
            others = self._parts(owner) - 1
            owed_s = owed_s + (thread_time() - used_before) * others if others else 0.0
            rest_s = min(owed_s, _MAX_REST_S)
            if stop.is_set() or (rest_s > 0 and stop.wait(rest_s)):
                raise _Stopped
            owed_s -= rest_s
            used_before = thread_time()

        with paced(pace):
            return work()


_threads: RunVar[UploadThreads] = RunVar("penstock uploads")


def upload_threads() -> UploadThreads:
    """Those of the server of this event loop."""
    try:
        return _threads.get()
    except LookupError:
        found = UploadThreads()
        _threads.set(found)
        return found


class UploadWork:
    """Work for one upload, in threads, for as long as its client is there.

    `receive` is the request's: once its body is whole, it tells when the client has gone. Work that is under way then
    stops at the next piece.
    """

    def __init__(
        self,
        owner: str,
        receive: Receive | None = None,
        memory: Hold | None = None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """`has_room` tells whether what is read can be stored."""
        self.memory = memory
        """Memory that the request holds."""
        self._owner = owner
        self._receive = receive
        self._has_room = has_room
        self._stop = threading.Event()

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run something that blocks. Raises ClientDisconnect if it was stopped."""
        if not self._has_room():
            raise disk_full()
        try:
            return await upload_threads().run(self._owner, work, self._stop)
        except _Stopped:
            raise ClientDisconnect from None

    async def run_for_client(self, work: Callable[[], _T]) -> _T:
        """The same, after the body is whole: stopped when the client goes."""
        if self._receive is None:
            return await self.run(work)
        left = asyncio.create_task(self._wait_until_left(self._receive), name="client of an upload")
        try:
            return await self.run(work)
        finally:
            await cancel_and_wait([left])

    async def close(self, work: Callable[[], None]) -> None:
        """Run the last of the work, which is done also after a stop."""
        await upload_threads().run(self._owner, work, threading.Event())

    def stop(self) -> None:
        """Have what is under way end soon."""
        self._stop.set()

    async def _wait_until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stop()


def upload_work(call: Call[Any, Any]) -> UploadWork:
    """Work for the upload of a call."""
    return UploadWork(call.caller.owner, call.request.receive, call.memory, partial(has_room, call.server.config))
