"""Fixtures: a real server of each supported kind, and a fresh, migrated database for each test."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.db import embedded
from penstock.db.migrate import migrate

DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")

_names = (f"t{number}" for number in count())


@pytest.fixture(scope="session")
def server_18(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _served(tmp_path_factory.mktemp("pg18"), None)


@pytest.fixture(scope="session")
def server_15(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _served(tmp_path_factory.mktemp("pg15"), DEBIAN_15)


def _served(data_dir: Path, bin_dir: Path | None) -> Iterator[str]:
    with embedded.acquire(data_dir, bin_dir=bin_dir) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            connection.execute("CREATE DATABASE template_penstock")
        migrate(make_conninfo(server.conninfo, dbname="template_penstock"))
        yield server.conninfo


@pytest.fixture(params=["18", "15"])
def server(request: pytest.FixtureRequest) -> str:
    """A server's conninfo: once the embedded PostgreSQL 18, once Debian's 15."""
    conninfo: str = request.getfixturevalue(f"server_{request.param}")
    return conninfo


@pytest.fixture
def database(server: str) -> Iterator[str]:
    """The conninfo of a database of the test's own, migrated; on each kind of server."""
    yield from _fresh(server)


@pytest.fixture
def database_18(server_18: str) -> Iterator[str]:
    """The same on the embedded server alone, for tests that do not depend on the kind."""
    yield from _fresh(server_18)


def _fresh(server: str) -> Iterator[str]:
    name = next(_names)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock")
        yield make_conninfo(server, dbname=name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
