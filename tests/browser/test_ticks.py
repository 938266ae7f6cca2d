"""The stream of ticks in a browser: one in a tab, and none while it is hidden."""

from __future__ import annotations

from playwright.sync_api import Page, Request, expect

from tests.support.browser import SET_HIDDEN
from tests.support.console import PRICE, open_work
from tests.support.jobs import start_job, table, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until


def test_one_stream_that_ends_while_the_tab_is_hidden(page: Page, server: ServerProcess) -> None:
    begun: list[Request] = []
    ended: list[Request] = []
    page.on("request", lambda request: begun.append(request) if "/api/ticks" in request.url else None)
    page.on("requestfailed", lambda request: ended.append(request) if "/api/ticks" in request.url else None)

    def streams(count: int) -> None:
        def reached() -> bool:
            page.wait_for_timeout(10)  # events come in while Playwright waits for something
            return len(begun) - len(ended) == count

        wait_until(reached, 20)

    name = start_job(server, table(2), PRICE, filename="streamed.csv")
    page.goto(f"{server.url}/console/")
    expect(page.locator(".live")).to_have_text("Live")
    open_work(page, server, name)
    expect(page.locator(".live")).to_have_text("Live")
    streams(1)
    assert "work=" in begun[-1].url
    page.evaluate(SET_HIDDEN, True)
    streams(0)
    until_state(server, name, "DONE")
    page.evaluate(SET_HIDDEN, False)
    streams(1)
    expect(page.locator("[data-figure=settled]")).to_have_text("2")
