"""The console below another path than the root, and over a restart of its server."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.support.browser import watched_page
from tests.support.jobs import jobs_server, start_job, table, until_state


def test_below_a_path_and_over_a_restart(tmp_path: Path, browser: Browser, database_18: str) -> None:
    at = ("--root-path", "/tools/penstock")
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

            watched.allow("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED_ENCODING|ERR_CONNECTION_RESET|status of 50")
            server.stop()
            expect(page.locator(".live")).to_have_text("Connecting")
            # The last option given counts: the same port again.
            with jobs_server(tmp_path, *at, "--port", str(server.port), database=database_18, name="again") as again:
                assert again.url == server.url
                expect(page.locator(".live")).to_have_text("Live")
                start_job(again, table(40), {"processor": "price"}, filename="after.csv")
                expect(page.get_by_role("link", name="after.csv")).to_be_visible()
