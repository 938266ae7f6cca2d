"""Databases of two sizes, as the planner may find them: well informed, or misinformed in two ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.plan.crowd import World, Worlds, fill, fresh_database, populate
from tests.support.plans import Mode
from tests.support.thorough import thorough

# Growth shows by a factor of thirty, as it does by one of a hundred.
SMALL, LARGE = 1_000, 100_000 if thorough() else 30_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On PostgreSQL 15 the belief that misleads most, and the plan that knows least of the values: the generic one, or,
    where that is not asked for, the one that the server chooses. The others are shown with --all."""
    generic = {_statement(item) for item in items if _params(item).get("mode") == Mode.GENERIC}
    for item in items:
        params = _params(item)
        if "15" not in (params.get("any_server"), params.get("worlds", [None])[0]):
            continue
        believed = {"analysed", "informed"} & {str(value) for value in params.values()}
        mode = params.get("mode")
        if believed or mode == Mode.CUSTOM or (mode == Mode.CHOSEN and _statement(item) in generic):
            item.add_marker(pytest.mark.again)


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _statement(item: pytest.Item) -> tuple[Path, str]:
    """Which one an item is about: its file, and the name of the operation, or of the test."""
    operation = _params(item).get("operation")
    return item.path, operation.__name__ if callable(operation) else getattr(item, "originalname", item.name)


@pytest.fixture(scope="session", params=["18", "15"])
def any_server(request: pytest.FixtureRequest) -> str:
    conninfo: str = request.getfixturevalue(f"server_{request.param}")
    return conninfo


def _settings() -> Iterator[object]:
    """Which server, and what it believes. The belief that misleads most on both; more of them with --all."""
    for server in ("18", "15"):
        for statistics in ("analysed", "analysed-empty", "analysed-one-row"):
            again = (server, statistics) not in (
                ("18", "analysed"),
                ("18", "analysed-one-row"),
                ("15", "analysed-one-row"),
            )
            marks = [pytest.mark.again] if again else []
            yield pytest.param((server, statistics), marks=marks, id=f"{server}-{statistics}")


@pytest.fixture(scope="session", params=_settings())
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    kind, statistics = request.param
    server: str = request.getfixturevalue(f"server_{kind}")
    with ExitStack() as stack:
        small, large = (stack.enter_context(_world(server, statistics, lines)) for lines in (SMALL, LARGE))
        yield Worlds(statistics, small, large)


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
