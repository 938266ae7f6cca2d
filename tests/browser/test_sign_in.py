"""A server with keys: signing in and out, what each role sees, keys made and revoked, and pages of other sites."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import WatchedPage, serious_issues, watched_page
from tests.support.tenants import TenantGround, tenant_ground


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, server_18: str) -> Iterator[TenantGround]:
    # Its keys are made by asyncio.run, which needs a thread without a running loop: the browser's runs in this one.
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        made = tenant_ground(tmp_path_factory.mktemp("keys"), server_18, "--set", "key_cache_s=0.2")
        yield thread.submit(stack.enter_context, made).result()


@pytest.fixture
def visitor(browser: Browser, ground: TenantGround) -> Iterator[WatchedPage]:
    with watched_page(browser, ground.server.url) as watched:
        watched.allow("status of 401")
        yield watched


def sign_in(page: Page, ground: TenantGround, tenant: str, route: str = "/") -> None:
    page.goto(f"{ground.server.url}/console/#{route}")
    page.get_by_label("API key", exact=True).fill(ground.keys[tenant])
    page.keyboard.press("Enter")
    expect(page.get_by_label("API key", exact=True)).to_have_count(0)


def test_a_key_becomes_a_cookie_that_scripts_cannot_read(visitor: WatchedPage, ground: TenantGround) -> None:
    page = visitor.page
    page.goto(f"{ground.server.url}/console/#/sessions?x=1")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert serious_issues(page) == []
    page.get_by_label("API key", exact=True).fill("sk-penstock-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("API key", exact=True).fill(ground.keys["alice"])
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Sessions", exact=True)).to_be_visible()
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert ground.keys["alice"] not in cookie["value"]
    assert page.evaluate("() => document.cookie") == ""
    pages = page.get_by_role("navigation", name="Pages")
    expect(pages.get_by_role("link", name="Webhooks")).to_be_visible()
    for admins in ("Workers", "Providers", "Keys"):
        expect(pages.get_by_role("link", name=admins)).to_have_count(0)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.goto(f"{ground.server.url}/console/#/")
    expect(page.get_by_label("API key", exact=True)).to_be_visible()


def test_an_admin_makes_and_revokes_a_key(visitor: WatchedPage, browser: Browser, ground: TenantGround) -> None:
    page = visitor.page
    sign_in(page, ground, "root", "/keys")
    page.get_by_role("button", name="New key").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Owner").fill("carol")
    dialog.get_by_label("Name").fill("laptop")
    dialog.get_by_label("Expires").select_option(label="In 7 days")
    assert serious_issues(page) == []
    dialog.get_by_role("button", name="Make the key").click()
    secret = page.locator("[data-secret]").inner_text()
    page.get_by_role("button", name="I have kept it").click()
    row = page.get_by_role("row").filter(has_text="carol")
    expect(row).to_contain_text("Good")
    expect(row).to_contain_text("in 6 d")
    assert serious_issues(page) == []
    with watched_page(browser, ground.server.url) as other:
        other.allow("status of 401|ERR_INCOMPLETE_CHUNKED_ENCODING")  # by the revocation
        other.page.goto(f"{ground.server.url}/console/")
        other.page.get_by_label("API key", exact=True).fill(secret)
        other.page.keyboard.press("Enter")
        expect(other.page.get_by_role("heading", name="Work", exact=True)).to_be_visible()
        row.get_by_role("button", name="Revoke laptop").click()
        dialog.get_by_role("button", name="Revoke").click()
        expect(row).to_contain_text("Revoked")
        # Its open page notices: the stream of ticks ends with the key.
        expect(other.page.get_by_label("API key", exact=True)).to_be_visible()


ATTACK = """<!doctype html><title>elsewhere</title>
<form id="form" method="post" action="{target}" enctype="text/plain" target="answer"><input name="a" value="b"></form>
<iframe name="answer"></iframe><iframe src="{console}"></iframe>
<script type="module">
const said = [];
const send = async (name, options) => {{
  try {{ said.push([name, (await fetch("{target}", {{credentials: "include", ...options}})).status]); }}
  catch {{ said.push([name, "refused"]); }}
}};
await send("simple", {{method: "POST", mode: "no-cors", body: "{{}}"}});
await send("json", {{method: "POST", headers: {{"content-type": "application/json"}}, body: "{{}}"}});
await send("header", {{method: "POST", headers: {{"x-penstock-console": "1"}}}});
await send("get", {{method: "GET", mode: "no-cors"}});
document.getElementById("form").submit();
document.title = JSON.stringify(said);
</script>"""


@contextmanager
def site(page: str, host: str) -> Iterator[str]:
    """Another origin with this page: `localhost` is another site than 127.0.0.1, another port of it is the same."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_page_of_another_origin_changes_nothing_and_shows_nothing(
    browser: Browser, ground: TenantGround, host: str
) -> None:
    hook = {"event_types": ["batch.failed"], "name": "kept", "url": "http://127.0.0.1:9/hook"}
    kept = ground.ok("alice", "POST", "/v1/webhook_endpoints", hook)["id"]
    target = f"{ground.server.url}/v1/webhook_endpoints/{kept}/rotate_secret"
    hint = ground.ok("alice", "GET", f"/v1/webhook_endpoints/{kept}")["signing_secret_hint"]
    with (
        watched_page(browser, ground.server.url) as watched,
        site(ATTACK.format(target=target, console=f"{ground.server.url}/console/"), host) as elsewhere,
    ):
        watched.allow("")
        page = watched.page
        sign_in(page, ground, "alice")
        answers: dict[str, list[int]] = {}
        page.on("response", lambda answer: answers.setdefault(answer.url, []).append(answer.status))
        page.goto(elsewhere)
        expect(page).to_have_title(re.compile("simple"))
        expect(page.frame_locator("iframe").nth(0).locator("body")).to_contain_text("error", ignore_case=True)
        expect(page.frame_locator("iframe").nth(1).get_by_role("heading", name="Work", exact=True)).to_have_count(0)
        assert answers[target], "nothing reached the server: the test tests nothing"
        assert set(answers[target]) <= {401, 403, 405}, answers[target]
    assert ground.ok("alice", "GET", f"/v1/webhook_endpoints/{kept}")["signing_secret_hint"] == hint


def test_signing_out_ends_the_other_tabs_of_the_browser(visitor: WatchedPage, ground: TenantGround) -> None:
    page = visitor.page
    sign_in(page, ground, "alice")
    other = page.context.new_page()
    other.goto(f"{ground.server.url}/console/")
    expect(other.locator(".live")).to_have_text("Live")
    page.get_by_role("button", name="Sign out").click()
    expect(other.get_by_label("API key", exact=True)).to_be_visible()
    expect(other.locator(".live")).to_have_count(0)
