"""Sessions in the console: the list, one session's requests in order, cancelling, unblocking, deleting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from playwright.sync_api import Page, expect

from tests.support.browser import WatchedPage, serious_issues
from tests.support.mock_process import MockProcess
from tests.support.server import ServerProcess
from tests.support.wait import wait_until


def send(server: ServerProcess, key: str, text: str, *, wait: bool = True) -> Any:
    body = {"model": f"model of {key}", "messages": [{"role": "user", "content": text}]}
    headers = {} if wait else {"prefer": "respond-async"}
    answer = server.ask(
        "POST",
        f"/v1/sessions/{quote(key)}/requests",
        {"endpoint": "/v1/chat/completions", "body": body},
        headers=headers,
    )
    assert answer.status in (200, 202), answer.content
    return answer.json


def test_requests_in_order_cancel_and_delete(
    show: Callable[[str], Page], server: ServerProcess, upstream: MockProcess
) -> None:
    send(server, "chat 1", "the first question")
    upstream.set(latency="3600s")
    try:
        calls = upstream.stats()["calls"]
        send(server, "chat 1", "the second, which nobody answers", wait=False)
        # The upstream has it, and answers as slowly as it was told when it came.
        wait_until(lambda: upstream.stats()["calls"] != calls, 20)
    finally:
        upstream.set(latency=0)
    for text in ("the third", "the fourth"):
        send(server, "chat 1", text, wait=False)

    page = show("/sessions")
    row = page.get_by_role("row").filter(has_text="chat 1")
    expect(row).to_contain_text("Answering")
    assert serious_issues(page) == []
    row.get_by_role("link", name="chat 1").click()

    requests = page.get_by_role("table", name="Requests").locator("tbody tr")
    expect(requests).to_have_count(4)
    expect(requests.nth(3)).to_contain_text("echo: the first question")
    expect(requests.nth(2)).to_contain_text("In flight")
    expect(page.get_by_text("Request 2 is being answered")).to_be_visible()
    requests.nth(1).get_by_role("button", name="Cancel request 3").click()
    expect(requests.nth(1)).to_contain_text("Cancelled")
    page.get_by_role("button", name="Waiting").click()
    expect(requests).to_have_count(1)
    page.get_by_role("button", name="All").click()
    page.get_by_role("button", name="Open request 1").click()
    drawer = page.get_by_label("Request", exact=True).first
    expect(drawer).to_contain_text('"echo: the first question')
    asked = drawer.get_by_role("region", name="Question")
    expect(asked).to_contain_text("/v1/chat/completions")
    expect(asked).to_contain_text('"content": "the first question"')
    assert serious_issues(page) == []
    page.keyboard.press("Escape")

    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_role("heading", name="Sessions", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="chat 1")).to_have_count(0)
    assert server.ask("GET", "/v1/sessions/chat%201").status == 404


def fail(server: ServerProcess, upstream: MockProcess, key: str) -> None:
    upstream.set(error_rate=1)
    try:
        assert send(server, key, "refused")["status"] == "failed"
    finally:
        upstream.set(error_rate=0)


def test_a_blocked_session_goes_on(show: Callable[[str], Page], server: ServerProcess, upstream: MockProcess) -> None:
    server.ask("PUT", "/v1/sessions/blocked", {"on_dead_head": "block"})
    fail(server, upstream, "blocked")
    page = show("/sessions/blocked")
    # Whoever decides knows what was asked.
    page.get_by_role("button", name="Open request 1").click()
    expect(page.get_by_role("region", name="Question")).to_contain_text('"content": "refused"')
    page.keyboard.press("Escape")
    blocked = page.get_by_text("stands still until someone decides")
    requests = page.get_by_role("table", name="Requests").locator("tbody tr")
    page.get_by_role("button", name="Run it again").click()
    expect(requests.nth(0)).to_contain_text("echo: refused")
    expect(blocked).to_have_count(0)
    fail(server, upstream, "blocked")
    page.get_by_role("button", name="Go on with the next").click()
    expect(page.get_by_text("The session goes on with the next request.")).to_be_visible()
    expect(blocked).to_have_count(0)
    expect(requests.nth(0)).to_contain_text("Failed")
    assert server.ask("GET", "/v1/sessions/blocked").json["status"] == "open"


def test_a_session_is_found_by_its_key(show: Callable[[str], Page], server: ServerProcess) -> None:
    server.ask("PUT", "/v1/sessions/needle", {})
    page = show("/sessions")
    page.get_by_role("searchbox").fill("needle")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="needle")).to_be_visible()
    expect(page.get_by_text("This session has no requests yet.")).to_be_visible()
    page.get_by_role("main").get_by_role("link", name="Sessions").click()
    expect(page.get_by_role("heading", name="Sessions", exact=True)).to_be_visible()


def test_a_session_that_is_none_says_so_once_with_a_way_on(watched: WatchedPage, server: ServerProcess) -> None:
    watched.allow("404")
    page = watched.page
    page.goto(f"{server.url}/console/#/sessions/none")
    expect(page.get_by_role("heading", name="It cannot be shown")).to_be_visible()
    expect(page.get_by_text("No such Session object: none")).to_have_count(1)
    page.get_by_role("link", name="To the list of sessions").click()
    expect(page.get_by_role("heading", name="Sessions", exact=True)).to_be_visible()
