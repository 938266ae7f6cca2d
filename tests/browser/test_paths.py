"""The console below another path than the root, and over a restart of its server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import watched_page
from tests.support.jobs import jobs_server, start_job, table, until_state
from tests.support.tcp_server import bind


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody else is given it while no server has it: it is bound, and never listening."""
    with bind() as reserved:
        yield reserved.getsockname()[1]


def test_below_a_path_and_over_a_restart(tmp_path: Path, browser: Browser, database_18: str, port: int) -> None:
    # The last option given counts: the same port each time.
    at = ("--root-path", "/tools/penstock", "--port", str(port))
    with jobs_server(tmp_path, *at, database=database_18) as server:
        name = start_job(server, table(40), {"processor": "price"}, filename="before.csv")
        until_state(server, name, "DONE")
        with watched_page(browser, server.url) as watched:
            page = watched.page
            page.goto(f"{server.url}/")
            expect(page).to_have_url(f"{server.url}/console/")
            expect(page.locator(".live")).to_have_text("Live")
            for link in ("Sessions", "Webhooks", "Keys", "Work"):
                page.get_by_role("navigation", name="Pages").get_by_role("link", name=link, exact=True).click()
                expect(page.get_by_role("heading", name=link, exact=True)).to_be_visible()
            page.get_by_role("link", name="before.csv").click()
            expect(page.get_by_role("grid").get_by_role("row").nth(1)).to_contain_text("Done")
            page.get_by_role("link", name="Penstock, list of work").click()
            expect(page.get_by_role("link", name="before.csv")).to_be_visible()

            # However the server's end cuts a call off: refused, reset, closed before its answer or within.
            watched.allow(r"ERR_CONNECTION_\w+|ERR_EMPTY_RESPONSE|ERR_INCOMPLETE_CHUNKED_ENCODING|status of 50")
            server.stop()
            expect(page.locator(".live")).to_have_text("Connecting")
            with jobs_server(tmp_path, *at, database=database_18, name="again") as again:
                assert again.url == server.url
                expect(page.locator(".live")).to_have_text("Live")
                start_job(again, table(40), {"processor": "price"}, filename="after.csv")
                expect(page.get_by_role("link", name="after.csv")).to_be_visible()
