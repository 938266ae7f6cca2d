"""A server for official clients: started here, or, for clients in environments of their own, given by the environment.

This folder needs nothing but pytest and the client under test, so that `make conformance` can run it with every major
version of them.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Place:
    """Where the server is, and two users' keys."""

    url: str
    key: str
    other_key: str


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if "CONFORMANCE_URL" in os.environ:
        yield Place(os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_KEY"], os.environ["CONFORMANCE_OTHER_KEY"])
        return
    from tests.support.conformance import official_ground

    directory: Path = tmp_path_factory.mktemp("conformance")
    with official_ground(directory, request.getfixturevalue("server_18")) as ground:
        yield Place(ground.url, ground.key, ground.other_key)


class Driver:
    """One client, sync or async, called by the names of its methods: `do("files.create", ...)`."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        closing = self.client.close()
        if inspect.isawaitable(closing):
            self._loop.run_until_complete(_awaited(closing))
        self._loop.close()

    def _method(self, name: str) -> Any:
        found = self.client
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def has(self, name: str) -> bool:
        try:
            self._method(name)
        except AttributeError:
            return False
        return True

    def do(self, name: str, /, *args: Any, **options: Any) -> Any:
        """Call a method and wait for its result."""
        result = self._method(name)(*args, **options)
        return self._loop.run_until_complete(_awaited(result)) if inspect.isawaitable(result) else result

    def walk(self, name: str, /, *args: Any, **options: Any) -> list[Any]:
        """Everything a list or a stream holds, page after page."""
        result = self._method(name)(*args, **options)
        if hasattr(result, "__aiter__"):
            return self._loop.run_until_complete(_collected(result))
        if inspect.isawaitable(result):
            result = self._loop.run_until_complete(_awaited(result))
            return self._loop.run_until_complete(_collected(result)) if hasattr(result, "__aiter__") else list(result)
        return list(result)

    def streamed_lines(self, name: str, *args: Any) -> list[str]:
        """The lines of a response that is read as it comes."""
        *path, method = name.split(".")
        manager = self._method(".".join([*path, "with_streaming_response", method]))(*args)
        if hasattr(manager, "__aenter__"):
            return self._loop.run_until_complete(_lines(manager))
        with manager as response:
            return list(response.iter_lines())


async def _awaited(result: Any) -> Any:
    return await result


async def _collected(result: Any) -> list[Any]:
    return [entry async for entry in result]


async def _lines(manager: Any) -> list[str]:
    async with manager as response:
        return [line async for line in response.iter_lines()]
