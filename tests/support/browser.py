"""Pages of the console in a real Chromium, watched: what a user must never meet fails the test.

    page.goto(f"{server.url}/console/")

A page error, an error in the browser's console, a violation of the content security policy and a request to another
origin are noted as they happen; `WatchedPage.check` fails if there are any that the test did not allow.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

CHROMIUM = "/usr/bin/chromium"
"""Debian's: `scripts/system-packages` installs it."""
# The sandbox needs privileges that containers lack. The others keep the browser itself from calling anywhere.
FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    # A process kept ready for the next site costs more than starting one when it is wanted.
    "--disable-features=SpareRendererForSitePerProcess",
    "--disable-gpu",
    "--process-per-site",
    "--disable-sync",
    "--no-first-run",
)
AXE = Path(__file__).parents[1] / "browser" / "vendor" / "axe.min.js"
DEADLINE_MS = 20_000
"""How long a locator or an expectation waits, on a machine that does much else."""
SERIOUS = {"serious", "critical"}

# Violations of the policy are told to the page alone; the console has them as errors too, in words of the browser.
_TELL_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  penstockViolation(`${event.effectiveDirective}: ${event.blockedURI} (${event.sourceFile}:${event.lineNumber})`));
"""
_RUN_AXE = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations.map(
  ({id, impact, help, nodes}) => ({id, impact, help, nodes: nodes.map((node) => node.html.slice(0, 200))}))"""

SET_HIDDEN = """hidden => {
  Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}"""
"""To be evaluated: the tab is hidden or looked at from here on."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window. While it runs, this thread has a running event loop: `asyncio.run` must wait."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


class WatchedPage:
    """What went wrong on a page of one server."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self._origin = origin
        self._problems: list[str] = []
        self._allowed: list[re.Pattern[str]] = []
        page.set_default_timeout(DEADLINE_MS)
        page.set_default_navigation_timeout(DEADLINE_MS)
        page.on("pageerror", lambda error: self._problems.append(f"page error: {error.stack or error}"))
        page.on("console", self._hear)
        page.on("request", self._see)
        page.expose_function("penstockViolation", lambda text: self._problems.append(f"policy violation: {text}"))
        page.add_init_script(_TELL_VIOLATIONS)

    def allow(self, pattern: str) -> None:
        """Not a problem in this test, from its beginning on: what it provokes, such as the 401 of a wrong key."""
        self._allowed.append(re.compile(pattern))

    @property
    def problems(self) -> list[str]:
        return [text for text in self._problems if not any(allowed.search(text) for allowed in self._allowed)]

    def check(self) -> None:
        assert not self.problems, "\n".join(self.problems)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._problems.append(f"console error: {message.text} ({message.location.get('url')})")

    def _see(self, request: Request) -> None:
        if not request.url.startswith(("data:", f"{self._origin}/")):
            self._problems.append(f"request to another origin: {request.method} {request.url}")


@contextmanager
def watched_page(browser: Browser, url: str, **options: Any) -> Iterator[WatchedPage]:
    """A page of a browser profile of its own, for the server at this URL; checked at the end of the block."""
    parts = urlsplit(url)
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        watched = WatchedPage(context.new_page(), f"{parts.scheme}://{parts.netloc}")
        yield watched
        watched.check()
    finally:
        # A page asks on while it is closed: a route's answer that is then lost would be raised in the next test.
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")
        context.close()


def serious_issues(page: Page) -> list[str]:
    """What axe finds on the page as it is now, of what keeps people from using it."""
    # Evaluated by the debugger, which no policy of the page concerns.
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate(_RUN_AXE)
    return [
        f"{issue['id']} ({issue['impact']}): {issue['help']}: {issue['nodes'][:3]}"
        for issue in found
        if issue["impact"] in SERIOUS
    ]
