"""Databases of two sizes, as the planner may find them: well informed, or misinformed in two ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.plan.crowd import World, Worlds, fill, fresh_database, populate

SMALL, LARGE = 1_000, 100_000


@pytest.fixture(scope="session", params=["18", "15"])
def any_server(request: pytest.FixtureRequest) -> str:
    conninfo: str = request.getfixturevalue(f"server_{request.param}")
    return conninfo


@pytest.fixture(scope="session", params=["analysed", "analysed-empty", "analysed-one-row"])
def worlds(request: pytest.FixtureRequest, any_server: str) -> Iterator[Worlds]:
    with ExitStack() as stack:
        small, large = (stack.enter_context(_world(any_server, request.param, lines)) for lines in (SMALL, LARGE))
        yield Worlds(request.param, small, large)


@contextmanager
def _world(server: str, statistics: str, lines: int) -> Iterator[World]:
    with fresh_database(server) as session:
        if statistics == "analysed-one-row":
            fill(session, 1)
        if statistics != "analysed":
            session.execute("ANALYZE")
        world = populate(session, lines)
        if statistics == "analysed":
            session.execute("ANALYZE")
        yield world
