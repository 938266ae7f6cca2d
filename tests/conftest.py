"""Fixtures: a real server of each supported kind, and a fresh, migrated database for each test."""

from __future__ import annotations

import gc
import os
import random
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import psutil
import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg.conninfo import make_conninfo

from penstock.db.embedded import postgres
from penstock.db.migrate import migrate
from tests.support.db import RUNNING_18
from tests.support.pooler import pooled
from tests.support.prepared import Prepared
from tests.support.thorough import be_thorough

# How long an example takes says something about the machine, nothing about the code. `--all` tries more of them.
settings.register_profile("some", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=25)
settings.register_profile("all", settings.get_profile("some"), max_examples=200)

# A database of a test's own is some 300 files: a file system in memory makes them in a fraction of the time.
IN_MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 4 << 30

DEBIAN_15 = Path("/usr/lib/postgresql/15/bin")

# What may differ between servers, and so runs on PostgreSQL 15 in every run: plans, migrations, and between them every
# statement of the engine, the sessions, the intake, the export and the erasure. `--all` runs everything there.
ON_15_TOO = {
    "plan",
    "test_migrate",
    "test_batches",
    "test_erase",
    "test_export_merged",
    "test_export_stream",
    "test_fence",
    "test_intake",
    "test_liveness",
    "test_run_again",
    "test_run",
    "test_sessions_engine",
    "test_upload_parts",
}

# A run that a test starts has the server of that test.
_names = (f"t{os.getpid()}_{number}" for number in count())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server",
        choices=["18", "15", "pooled"],
        action="append",
        help="kinds of server to run on (default: 18, and 15 where it may differ); pooled is 18 behind PgBouncer",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="also what shows the same again: every test on PostgreSQL 15, tests marked `again`, every order of a race",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="files, and the tests of each, in random order; what a test leaves open is blamed on that test",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("--all") else "some")
    if config.getoption("--all"):
        be_thorough()
    if _has_room(IN_MEMORY):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


def _has_room(place: Path) -> bool:
    """Whether the files of a run fit into it, and into the memory it takes them from."""
    if not os.access(place, os.W_OK):
        return False
    return min(shutil.disk_usage(place).free, psutil.virtual_memory().available) >= ENOUGH_BYTES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server_kind" in metafunc.fixturenames:
        path = metafunc.definition.path
        on_15_too = metafunc.config.getoption("--all") or ON_15_TOO & {path.stem, path.parent.name}
        kinds = metafunc.config.getoption("--server") or (["18", "15"] if on_15_too else ["18"])
        metafunc.parametrize("server_kind", kinds, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with the longest tests first, so that no process waits long for the last; quick ones fill the gaps."""
    if not config.getoption("--all"):
        repeats = [item for item in items if item.get_closest_marker("again")]
        config.hook.pytest_deselected(items=repeats)
        items[:] = [item for item in items if not item.get_closest_marker("again")]
    if (seed := config.getoption("--shuffle")) is not None:
        shuffle = random.Random(seed)
        shuffle.shuffle(items)
        places = {path: shuffle.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: places[item.path])
        return
    kinds = ("witness", "chaos", "race", "faults", "model", "flow")
    place = {kind: number for number, kind in enumerate(kinds)}
    items.sort(key=lambda item: min((place[part] for part in item.path.parts if part in place), default=len(kinds)))


@pytest.fixture(autouse=True)
def _nothing_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--shuffle`: a connection or socket that a test forgot warns now, and not in a later test."""
    yield
    if request.config.getoption("--shuffle") is not None:
        gc.collect()


@pytest.fixture(scope="session")
def server_18(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if RUNNING_18 in os.environ:
        yield os.environ[RUNNING_18]
        return
    yield from _served(tmp_path_factory.mktemp("pg18"), None)


@pytest.fixture(scope="session")
def server_15(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from _served(tmp_path_factory.mktemp("pg15"), DEBIAN_15)


def _served(data_dir: Path, bin_dir: Path | None) -> Iterator[str]:
    with postgres.acquire(data_dir, bin_dir=bin_dir) as server:
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            connection.execute("CREATE DATABASE template_penstock")
            # Processes die in these tests, machines do not: what was written is there without waiting for a disk.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("ALTER SYSTEM SET full_page_writes = off")
            connection.execute("SELECT pg_reload_conf()")
        migrate(make_conninfo(server.conninfo, dbname="template_penstock"))
        yield server.conninfo


@pytest.fixture(scope="session")
def pooler(server_18: str) -> Iterator[str]:
    """PgBouncer in front of the embedded server: its conninfo, without a database."""
    with pooled(server_18) as conninfo:
        yield conninfo


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Puts a PostgreSQL 18 that is already made into a data directory, for tests that are not about its making."""
    return Prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def server_kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def server(request: pytest.FixtureRequest, server_kind: str) -> str:
    """A server's conninfo: once the embedded PostgreSQL 18, once Debian's 15."""
    conninfo: str = request.getfixturevalue("server_18" if server_kind == "pooled" else f"server_{server_kind}")
    return conninfo


@pytest.fixture
def database(request: pytest.FixtureRequest, server: str, server_kind: str) -> Iterator[str]:
    """The conninfo of a database of the test's own, migrated; on each kind of server."""
    way: str = request.getfixturevalue("pooler") if server_kind == "pooled" else server
    yield from _fresh(server, way)


@pytest.fixture
def database_18(server_18: str) -> Iterator[str]:
    """The same on the embedded server alone, for tests that do not depend on the kind."""
    yield from _fresh(server_18, server_18)


@pytest.fixture(scope="module")
def shared_database_18(server_18: str) -> Iterator[str]:
    """The same for all tests of a module, for a server process that they share."""
    yield from _fresh(server_18, server_18)


def _fresh(server: str, way: str) -> Iterator[str]:
    name = next(_names)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock STRATEGY file_copy")
        yield make_conninfo(way, dbname=name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
