"""One server with a worker and a mock upstream, and one browser, for all tests of the console in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from playwright.sync_api import Browser, Page, expect
from psycopg.conninfo import make_conninfo

from tests.support.browser import DEADLINE_MS, WatchedPage, chromium, watched_page
from tests.support.jobs import CONFIG, jobs_server
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.server import ServerProcess

expect.set_options(timeout=DEADLINE_MS)

SETTINGS = """
pending_dashboard = true
webhook_allow = ["127.0.0.1"]
"""


@contextmanager
def fresh_database(server: str) -> Iterator[str]:
    name = f"console_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE template_penstock STRATEGY file_copy".encode())
        yield make_conninfo(server, dbname=name)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture(scope="package")
def upstream() -> Iterator[MockProcess]:
    with start_mock_process("--seed", "7") as mock:
        yield mock


@pytest.fixture(scope="package")
def console_database(server_18: str) -> Iterator[str]:
    """The database of the server that tests share: what one leaves there, others see."""
    with fresh_database(server_18) as database:
        yield database


@pytest.fixture(scope="package")
def server(
    tmp_path_factory: pytest.TempPathFactory, console_database: str, upstream: MockProcess
) -> Iterator[ServerProcess]:
    """Without keys: one user, who may do everything. Knows the processor `price` and the provider `default`."""
    directory: Path = tmp_path_factory.mktemp("console")
    with jobs_server(
        directory, "--base-url", upstream.base_url, database=console_database, config_text=SETTINGS + CONFIG
    ) as running:
        yield running


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def watched(browser: Browser, server: ServerProcess) -> Iterator[WatchedPage]:
    """A page of the shared server; the test fails if anything is wrong with it that the test did not allow."""
    with watched_page(browser, server.url) as page:
        yield page


@pytest.fixture
def page(watched: WatchedPage) -> Page:
    return watched.page


@pytest.fixture
def show(page: Page, server: ServerProcess) -> Callable[[str], Page]:
    """Opens a page of the console by its route, such as `/sessions`."""

    def open_page(route: str) -> Page:
        page.goto(f"{server.url}/console/#{route}")
        return page

    return open_page
