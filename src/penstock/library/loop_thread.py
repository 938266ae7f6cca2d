"""An event loop for callers who have none."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from threading import Event, Thread
from typing import Any, TypeVar

import uvloop

_T = TypeVar("_T")


class LoopThread:
    """Event loop on a thread of its own, for callers who have none."""

    def __enter__(self) -> LoopThread:
        self._loop = uvloop.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="penstock-map", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def call(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Await the function's result on the loop. An interrupt cancels it and waits for its end; another one leaves it
        as it is."""
        tasks: list[asyncio.Task[_T]] = []
        ended = Event()

        async def call() -> _T:
            return await function(*args)

        def start() -> None:
            tasks.append(self._loop.create_task(call()))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()

    @contextlib.contextmanager
    def entered(self, manager: contextlib.AbstractAsyncContextManager[_T]) -> Iterator[_T]:
        """The manager, entered and left on the loop."""
        stack = contextlib.AsyncExitStack()
        value = self.call(stack.enter_async_context, manager)
        try:
            yield value
        except BaseException as error:
            self.call(stack.__aexit__, type(error), error, error.__traceback__)
            raise
        else:
            self.call(stack.aclose)
