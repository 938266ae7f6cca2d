"""Content of strangers on every page: shown as text, run nowhere; and no page that keeps people out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.browser import serious_issues
from tests.support.jobs import start_job, until_state
from tests.support.server import ServerProcess
from tests.support.thorough import thorough

MARKUP = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
HOSTILE = f"{MARKUP}\u202egnp.exe\U0001f600"
MODEL = "small\u202egnp"
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
UNSEEN = "a\u200bb\u200cc\u200dd\u200ee\u200ff\u061cg\ufeffh"
SPEC = {"processor": {"type": "chat", "provider": "default", "model": "small", "prompt": "{{ text }}"}}


@pytest.fixture(scope="module")
def job(server: ServerProcess) -> Iterator[str]:
    """A job with hostile names, cells, answers and errors, and one cell of a megabyte."""
    cells = [HOSTILE, "javascript:alert(1)", "x" * 1_000_000, "\u2066\u2067 mirrored \u2069", UNSEEN + FAMILY]
    rows = "\n".join(json.dumps({"text": cell, MARKUP: cell[:50]}) for cell in cells).encode()
    name = start_job(server, rows, {**SPEC, "jobType": HOSTILE[:90]}, filename='a"><img src=x>.jsonl')
    until_state(server, name, "DONE")
    server.ask("PUT", f"/v1/sessions/{quote(MARKUP.replace('/', '|'), safe='')}", {})
    hook = {"event_types": ["batch.failed"], "name": MARKUP, "url": "http://127.0.0.1:9/%3Cscript%3E"}
    made = server.ask("POST", "/v1/webhook_endpoints", hook)
    assert made.status == 200
    yield name
    server.ask("DELETE", f"/v1/webhook_endpoints/{made.json['id']}")


ROUTES = (
    *("/", "/work/{job}", "/work/{job}?row=1", "/work/{job}?tab=charts", "/work/{job}?tab=errors"),
    *("/work/{job}?tab=pending", "/work/{job}?tab=details", "/new", "/pending", "/sessions"),
    *("/workers", "/providers", "/webhooks", "/keys", "/nowhere"),
)
# The others are looked at in tests of their own, with all that may stand on them.
WITH_AXE = {"/work/{job}?row=1", "/webhooks", "/nowhere"}


def test_it_is_text_everywhere(show: Callable[[str], Page], job: str) -> None:
    page = show("/")
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    for route in ROUTES:
        page.goto("about:blank")
        page = show(route.format(job=job))
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.locator(".skeleton")).to_have_count(0)
        assert page.locator("main img[src=x], main script").count() == 0, route
        assert page.title() != "run", route
        if route in WITH_AXE or thorough():
            assert serious_issues(page) == [], route
    assert dialogs == []
    page = show(f"/work/{job}?row=1")
    expect(page.get_by_role("complementary")).to_contain_text("[RLO]gnp.exe")
    page = show("/webhooks")
    expect(page.get_by_role("row").filter(has_text=MARKUP)).to_be_visible()


def test_marks_that_cannot_be_seen_are_shown(show: Callable[[str], Page], page: Page, job: str) -> None:
    show(f"/work/{job}?row=5")
    drawer = page.get_by_role("complementary")
    expect(drawer).to_contain_text("a[ZWSP]b[ZWNJ]c[ZWJ]d[LRM]e[RLM]f[ALM]g[BOM]h" + FAMILY)

    def answer_work(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "model": MODEL, "provider": MODEL})

    page.route("**/api/ticks?*", lambda route: route.fulfill(content_type="text/event-stream", body=": nothing\n\n"))
    page.route(f"**/api/work/{job}", answer_work)
    page.goto("about:blank")
    show(f"/work/{job}?tab=details")
    expect(page.get_by_role("definition").filter(has_text="small[RLO]gnp")).to_have_count(2)
    assert MODEL not in page.content()

    def answer(route: Route) -> None:
        told = route.fetch().json()
        told["data"][0]["models"] = [MODEL]
        told["unserved"] = [{"pool": MODEL, "models": [MODEL]}]
        route.fulfill(json=told)

    page.route("**/v1/providers", answer)
    show("/providers")
    expect(page.get_by_text("Work for small[RLO]gnp waits for small[RLO]gnp")).to_be_visible()
    expect(page.get_by_label("Provider default").locator("header")).to_contain_text("small[RLO]gnp")
    assert MODEL not in page.content()


ORDINARY = {
    "Persian": "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 PDF\u200c\u0647\u0627 20\u200c\u0633\u0627\u0644",
    "Malayalam": "\u0d05\u0d35\u0d28\u0d4d\u200d",
    "Sinhala": "\u0dc1\u0dca\u200d\u0dbb\u0dd3",
    "Bengali": "\u09b0\u200d\u09cd\u09af\u09be\u09ae",
    "Hebrew": "\u05e9\u05dc\u05d5\u05dd C++\u200e, \u05e2\u05d5\u05dc\u05dd!\u200f",
    "Arabic": "\u0661\u0662\u061c-\u0663 \u0633\u0644\u0627\u0645",
}


def test_ordinary_text_of_every_script_stays_as_it_is_but_for_names(
    show: Callable[[str], Page], page: Page, server: ServerProcess
) -> None:
    """Joiners and marks of direction are part of how these are spelled. In a name they would hide a difference."""
    named = ORDINARY["Persian"]
    rows = [{"text": text, "turned": f"{text}\u202ex"} for text in ORDINARY.values()]
    name = start_job(server, "\n".join(map(json.dumps, rows)).encode(), {**SPEC, "jobType": named}, filename="r.jsonl")
    until_state(server, name, "DONE")
    show(f"/work/{name}?row=1")
    expect(page.locator(".heading")).to_contain_text(named.replace("\u200c", "[ZWNJ]"))
    for number, text in enumerate(ORDINARY.values(), 1):
        expect(page.get_by_role("complementary", name=f"Row {number}")).to_contain_text(f"{text}[RLO]x")
        cells = page.locator(f"#grid-row-{number - 1}").get_by_role("gridcell")
        expect(cells.filter(has_text=re.compile(f"^{re.escape(text)}$"))).to_have_count(1)
        page.keyboard.press("j")
