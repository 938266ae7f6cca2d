"""Rows that change under the reader's eyes: whoever had them run again, and however many are in view."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, Route, expect

from tests.support.browser import watched_page
from tests.support.console import PRICE, open_work, start_requests, work_of
from tests.support.jobs import start_job, table, until_state
from tests.support.mock_process import MockProcess
from tests.support.server import Answered, ServerProcess
from tests.support.wait import wait_until

CHAT = {"processor": {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ sku }}"}}
# The time limits of reads, in a test's hands: they end when it says so.
HOLD_LIMITS = """
const limits = [];
AbortSignal.timeout = () => {
  const limit = new AbortController();
  limits.push(limit);
  return limit.signal;
};
globalThis.reachLimits = () => limits.forEach((limit) => limit.abort(new DOMException("", "TimeoutError")));
"""
MORE_THAN_A_PAGE = {"width": 1280, "height": 2_800}


def status(page: Page, number: int) -> Locator:
    return page.locator(f"#grid-row-{number - 1}").get_by_role("gridcell").nth(2)


def drawer_status(page: Page, number: int) -> Locator:
    return page.get_by_role("complementary", name=f"Row {number}").locator("h2 .chip")


@contextmanager
def failing(upstream: MockProcess) -> Iterator[None]:
    """Every call fails for the length of the block."""
    upstream.set(error_rate=1)
    try:
        yield
    finally:
        upstream.set(error_rate=0)


def start_failed(server: ServerProcess, upstream: MockProcess, kind: str) -> str:
    """Work of which all three rows have failed, and would not if they were run again."""
    with failing(upstream):
        name = start_requests(server, 3, "failed") if kind == "batch" else start_job(server, b"sku\n1\n2\n3\n", CHAT)
        wait_until(lambda: work_of(server, name)["state"] == "DONE", 30)
    assert work_of(server, name)["counts"]["failed"] == 3
    return name


def run_again(server: ServerProcess, name: str) -> Answered:
    """Have all failures run again, as another reader would."""
    if name.startswith("batch_"):
        answer = server.ask("POST", f"/v1/batches/{name}/retry", {})
    else:
        answer = server.ask("POST", f"/api/jobs/{name}/reprocess", {"scope": "job", "resetAttempts": True})
    assert answer.status in (200, 202), answer.content
    return answer


@pytest.mark.parametrize("kind", ["job", "batch"])
def test_a_row_run_again_is_shown_with_its_new_outcome(
    page: Page, server: ServerProcess, upstream: MockProcess, kind: str
) -> None:
    name = start_failed(server, upstream, kind)
    open_work(page, server, name, "?row=1")
    expect(status(page, 1)).to_have_text("Failed")
    expect(drawer_status(page, 1)).to_have_text("Failed")
    page.get_by_role("complementary").get_by_role("button", name="Run again").click()
    dialog = page.get_by_role("dialog")
    if kind == "job":
        dialog.get_by_label("Give them all their attempts again").check()
    dialog.get_by_role("button", name="Run again").click()
    expect(status(page, 1)).to_have_text("Done")
    expect(drawer_status(page, 1)).to_have_text("Done")
    expect(status(page, 2)).to_have_text("Failed")


@pytest.mark.parametrize("kind", ["job", "batch"])
def test_rows_that_somebody_else_runs_again_are_followed(
    page: Page, server: ServerProcess, upstream: MockProcess, kind: str
) -> None:
    """In a list of failures they stay where they are, with what they are now; `r` lists anew."""
    name = start_failed(server, upstream, kind)
    open_work(page, server, name, "?status=ERROR&row=3")
    for number in (1, 2, 3):
        expect(status(page, number)).to_have_text("Failed")
    expect(drawer_status(page, 3)).to_have_text("Failed")
    run_again(server, name)
    for number in (1, 2, 3):
        expect(status(page, number)).to_have_text("Done")
    expect(drawer_status(page, 3)).to_have_text("Done")
    page.keyboard.press("r")
    expect(page.get_by_role("heading", name="No row fits this filter")).to_be_visible()


def test_a_refresh_reads_rows_and_the_open_row_while_updates_are_paused(
    page: Page, server: ServerProcess, upstream: MockProcess
) -> None:
    name = start_failed(server, upstream, "batch")
    open_work(page, server, name, "?row=2")
    expect(status(page, 1)).to_have_text("Failed")
    expect(drawer_status(page, 2)).to_have_text("Failed")
    page.keyboard.press("p")
    expect(page.locator(".live")).to_have_text("Paused")
    run_again(server, name)
    wait_until(lambda: work_of(server, name)["counts"]["done"] == 3, 30)
    page.keyboard.press("r")
    expect(status(page, 1)).to_have_text("Done")
    expect(drawer_status(page, 2)).to_have_text("Done")
    page.keyboard.press("p")


def test_every_row_in_view_is_kept_current(browser: Browser, server: ServerProcess) -> None:
    """On a tall screen there are more than one answer brings, and large rows come a few at a time."""
    with watched_page(browser, server.url, viewport=MORE_THAN_A_PAGE) as watched:
        page = watched.page

        def shorten(route: Route) -> None:
            """As the server does when rows are large."""
            answer = route.fetch()
            found = answer.json()
            route.fulfill(response=answer, json={**found, "items": found["items"][:50]})

        page.route("**/items?*", shorten)
        with server.frozen_workers():
            name = start_job(server, table(84), PRICE, filename="tall.csv")
            until_state(server, name, "QUEUED", "RUNNING")
            open_work(page, server, name)
            expect(status(page, 84)).to_have_text(re.compile("Pending|Claimed"))
        for number in (49, 59, 71, 84):
            expect(status(page, number)).to_have_text("Done")


def test_rows_that_ended_while_they_were_out_of_view_are_read_again(page: Page, server: ServerProcess) -> None:
    with server.frozen_workers():
        name = start_job(server, table(300), PRICE, filename="away.csv")
        until_state(server, name, "QUEUED", "RUNNING")
        open_work(page, server, name)
        expect(status(page, 1)).to_have_text(re.compile("Pending|Claimed"))
        page.get_by_role("grid").focus()
        page.keyboard.press("End")
        expect(status(page, 299)).to_have_text(re.compile("Pending|Claimed"))
    until_state(server, name, "DONE")
    expect(status(page, 299)).to_have_text("Done")
    expect(page.locator("[data-figure=settled]")).to_have_text("300")
    page.keyboard.press("Home")
    expect(status(page, 1)).to_have_text("Done")


def test_a_tab_asks_for_no_row_that_cannot_have_changed(page: Page, server: ServerProcess) -> None:
    """While the rest of a job runs, rows that have ended are not asked for, until some are put back to run again."""
    name = start_job(server, table(5), PRICE, filename="quiet.csv")
    until_state(server, name, "DONE")
    now = work_of(server, name)
    waiting: list[list[dict[str, Any]]] = []

    def answer(route: Route) -> None:
        events = "".join(f"data: {json.dumps({**now, **each})}\n\n" for each in (waiting.pop() if waiting else []))
        route.fulfill(content_type="text/event-stream", body=f"retry: 3600000\n\n{events}")

    asked: list[Request] = []
    page.route("**/api/ticks?*", answer)
    page.on("request", lambda request: asked.append(request) if "/items" in request.url else None)
    page.clock.install()

    def tick(*events: dict[str, Any]) -> None:
        """Let a stream tell these, and let time pass, of which nothing but the page's clock knows."""
        for _ in range(2):  # off and on again: a stream that is opened is told
            page.keyboard.press("p")
            page.clock.run_for(50)
            waiting[:] = [[*events]]
        expect(page.get_by_role("heading", level=1)).to_have_text(events[-1]["name"])
        page.clock.run_for(5_000)

    open_work(page, server, name, "?row=1")
    page.clock.run_for(1_000)
    expect(status(page, 5)).to_have_text("Failed")
    expect(drawer_status(page, 1)).to_have_text("Done")
    begun = len(asked)
    tick(*({"changes": f"others {number}", "name": "others move"} for number in range(8)))
    assert len(asked) == begun
    tick({"changes": "again", "reruns": now.get("reruns", 0) + 1, "name": "run again"})
    expect(status(page, 5)).to_have_text("Failed")
    assert len(asked) == begun + 2, [request.url for request in asked]
    assert [urlsplit(request.url).path.rsplit("/", 1)[-1] for request in asked[begun:]].count("items") == 1
    assert parse_qs(urlsplit(asked[begun].url).query).get("from", ["1"]) == ["1"]


def test_reads_that_are_never_answered_are_told_of_and_tried_again(page: Page, server: ServerProcess) -> None:
    """A proxy may drop a connection and say nothing: rows in view and the open row go on at the next move."""
    stuck: set[str] | None = None

    def answer(route: Route) -> None:
        if stuck is None:
            route.continue_()
        else:
            stuck.add(urlsplit(route.request.url).path.rsplit("/", 1)[-1])

    page.add_init_script(HOLD_LIMITS)
    page.route(re.compile(r"/items(/1)?(\?|$)"), answer)
    with server.frozen_workers():
        name = start_job(server, table(4), PRICE, filename="stuck.csv")
        until_state(server, name, "QUEUED", "RUNNING")
        open_work(page, server, name, "?row=1")
        expect(status(page, 1)).to_have_text(re.compile("Pending|Claimed"))
        expect(drawer_status(page, 1)).to_have_text(re.compile("Pending|Claimed"))
        stuck = set()
    until_state(server, name, "DONE")
    expect(page.locator("[data-figure=settled]")).to_have_text("4")
    told = page.get_by_text("The server has not answered")
    wait_until(lambda: page.evaluate("true") and stuck == {"items", "1"}, 30)
    page.evaluate("reachLimits()")
    expect(told).to_have_count(2)
    expect(status(page, 1)).to_have_text(re.compile("Pending|Claimed"))
    stuck = None
    page.evaluate("reachLimits()")
    (first, *_) = server.ask("GET", f"/api/jobs/{name}/items").json["items"]
    wish = {"scope": "items", "itemIds": [first["id"]], "statuses": ["DONE"]}
    assert server.ask("POST", f"/api/jobs/{name}/reprocess", wish).status == 202
    expect(status(page, 1)).to_have_text("Done")
    expect(drawer_status(page, 1)).to_have_text("Done")
    expect(told).to_have_count(0)
