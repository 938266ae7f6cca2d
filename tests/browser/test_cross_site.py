"""S12 in a real browser: a page of another loopback origin tries everything a page can, with the user signed in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psycopg
from playwright.sync_api import Browser, expect

from tests.support.jobs import jobs_server
from tests.support.processes import Processes
from tests.support.server import ServerProcess

DEADLINE_S = 60.0
# What each try came to is written into the page, which the test reads.
_SCRIPT = """
const target = "TARGET";
const tries = {
  fetch: () => fetch(target, {method: "POST", mode: "no-cors", credentials: "include", body: "x"}),
  header: () => fetch(target, {method: "POST", credentials: "include", headers: {"X-Penstock-Console": "1"}}),
  read: () => fetch("API/me", {credentials: "include"}).then((answer) => answer.text()),
  beacon: async () => navigator.sendBeacon(target, "x"),
};
(async () => {
  const told = {};
  for (const [name, attempt] of Object.entries(tries)) {
    try { await attempt(); told[name] = "sent"; } catch (error) { told[name] = "refused"; }
  }
  document.getElementById("form").action = target;
  document.getElementById("form").submit();
  document.getElementById("told").textContent = Object.entries(told).map((pair) => pair.join("=")).join(" ");
})();
"""
_PAGE = """<!doctype html><p id="told"></p><iframe name="sink"></iframe>
<form id="form" method="post" target="sink"></form><script>SCRIPT</script>"""


@contextmanager
def foreign_site(content: str) -> Iterator[str]:
    """Another origin of this machine, with one page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    site = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=site.serve_forever)
    thread.start()
    try:
        yield f"http://localhost:{site.server_address[1]}/"
    finally:
        site.shutdown()
        thread.join()
        site.server_close()


def make_key(directory: Path, database: str) -> str:
    with Processes(directory) as processes:
        options = ("--owner", "alice", "--role", "admin", "--database-url", database)
        process = processes.penstock("keys", "keys", "create", *options)
        assert process.wait(DEADLINE_S) == 0
        return next(word for word in process.log.read_text().split() if word.startswith("sk-penstock-"))


def hooks(database: str) -> int:
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT count(*) FROM penstock.webhook_endpoints").fetchone()
        return int(row[0]) if row else -1


def try_everything(browser: Browser, server: ServerProcess, key: str | None) -> str:
    """What a foreign page was told, in a browser that is signed in, if there is a key."""
    # 127.0.0.1 and localhost are two sites: neither SameSite nor the origin lets one pass for the other.
    script = _SCRIPT.replace("TARGET", f"{server.url}/v1/webhook_endpoints").replace("API", f"{server.url}/api")
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{server.url}/console/")
        if key is not None:
            status = page.evaluate(
                """async (key) => (await fetch("/console/session", {method: "POST", body: JSON.stringify({key}),
                    headers: {"content-type": "application/json", "X-Penstock-Console": "1"}})).status""",
                key,
            )
            assert status == 204
        own = """async () => (await fetch("/api/me")).status"""
        assert page.evaluate(own) == 200
        with foreign_site(_PAGE.replace("SCRIPT", script)) as address:
            page.goto(address)
            expect(page.locator("#told")).to_contain_text("beacon")
            told = page.locator("#told").text_content() or ""
            page.frame_locator("iframe").locator("body").wait_for()
        page.goto(f"{server.url}/console/")
        assert page.evaluate(own) == 200  # still signed in: it was not for want of it that nothing was done
        return told
    finally:
        context.close()


def test_a_foreign_page_reads_and_changes_nothing(tmp_path: Path, database_18: str, browser: Browser) -> None:
    with jobs_server(tmp_path, database=database_18, workers=0) as server:
        assert try_everything(browser, server, None).split()[1:3] == ["header=refused", "read=refused"]
        assert hooks(database_18) == 0
        key = make_key(tmp_path, database_18)
        with_key = {"authorization": f"Bearer {key}"}
        assert server.ask("GET", "/api/me", headers=with_key).status == 200  # from now on, keys are asked for
        assert try_everything(browser, server, key).split()[1:3] == ["header=refused", "read=refused"]
        assert hooks(database_18) == 0
        statuses = [line.split()[5] for line in server.log.splitlines() if "POST /v1/webhook_endpoints" in line]
        assert statuses
        assert set(statuses) <= {"401", "403"}
