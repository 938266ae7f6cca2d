"""The watch over pages: each thing that must not happen is noticed."""

from __future__ import annotations

import pytest

from tests.support.browser import WatchedPage, serious_issues
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

# Each as a page would do it: from a script of its own.
WRONG = {
    "page error": "setTimeout(() => { throw new Error('broken') })",
    "console error": "console.error('broken')",
    "policy violation": "document.body.append(Object.assign(document.createElement('script'), {text: '1'}))",
    "request to another origin": "location.href = 'http://127.0.0.1:9/'",
}


@pytest.fixture
def empty(watched: WatchedPage, server: ServerProcess) -> WatchedPage:
    """The console's page under its policy, without the program."""
    watched.page.route("**/app/main.js", lambda route: route.fulfill(content_type="text/javascript", body=""))
    watched.page.goto(f"{server.url}/console/")
    return watched


@pytest.mark.parametrize("kind", WRONG)
def test_what_must_not_happen_is_noticed(empty: WatchedPage, kind: str) -> None:
    assert empty.problems == []
    empty.page.evaluate(f"() => {{ {WRONG[kind]} }}")

    def noticed() -> bool:
        empty.page.wait_for_timeout(10)  # events come in while Playwright waits for something
        return any(problem.startswith(kind) for problem in empty.problems)

    wait_until(noticed, 20)
    empty.allow("")


def test_axe_notices(empty: WatchedPage) -> None:
    empty.page.evaluate("() => document.body.append(document.createElement('button'))")
    assert [issue for issue in serious_issues(empty.page) if issue.startswith("button-name ")]
