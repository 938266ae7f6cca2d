"""The list of work in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.support.browser import SET_HIDDEN, WatchedPage, serious_issues
from tests.support.console import PRICE, start_requests, work_of
from tests.support.jobs import start_job, table, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until


def test_work_appears_as_it_begins_and_its_figures_are_those_of_the_api(page: Page, server: ServerProcess) -> None:
    page.goto(f"{server.url}/")
    expect(page).to_have_url(f"{server.url}/console/")
    expect(page.locator(".live")).to_have_text("Live")
    name = start_job(server, table(100), PRICE, filename="appears.csv")
    row = page.get_by_role("row").filter(has=page.locator(f'a[href="#/work/{name}"]'))
    expect(row).to_contain_text("appears.csv")
    expect(row).to_contain_text("prices")
    until_state(server, name, "DONE")
    expect(row).to_contain_text("Done")
    expect(row).to_contain_text("100 of 100")
    expect(row).to_contain_text("10 failed")
    expect(row.get_by_role("img", name="80 done, 10 failed, 10 not found")).to_be_visible()
    assert serious_issues(page) == []


def test_filters_are_in_the_address(page: Page, server: ServerProcess) -> None:
    job = start_job(server, table(3), PRICE, filename="filtered.csv")
    batch = start_requests(server, 3, "filtered-evals")
    page.goto(f"{server.url}/console/")
    rows = page.get_by_role("table", name="Jobs and batches").locator("tbody tr")
    expect(page.get_by_role("link", name="filtered.csv")).to_be_visible()
    expect(page.get_by_role("link", name="filtered-evals")).to_be_visible()
    page.get_by_role("button", name="Batches").click()
    expect(page).to_have_url(re.compile(r"#/\?kind=batch$"))
    expect(page.get_by_role("link", name="filtered.csv")).to_have_count(0)
    expect(page.locator(f'a[href="#/work/{batch}"]')).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("filtered")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"kind=batch&q=filtered$"))
    page.get_by_role("button", name="Jobs", exact=True).click()
    expect(rows).to_have_count(1)
    page.reload()
    expect(rows).to_have_count(1)
    expect(page.locator(f'a[href="#/work/{job}"]')).to_be_visible()
    page.get_by_label("State").select_option("PAUSED")
    expect(page.get_by_role("heading", name="Nothing fits these filters")).to_be_visible()
    page.get_by_role("button", name="Clear the filters").click()
    expect(page).to_have_url(re.compile(r"/console/#/$"))
    expect(page.get_by_role("link", name="filtered-evals")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_first_visit_says_what_to_do_next(watched: WatchedPage, server: ServerProcess, scheme: str) -> None:
    page = watched.page
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    nothing = json.dumps({"work": [], "next": None})
    page.route("**/api/work?*", lambda route: route.fulfill(content_type="application/json", body=nothing))
    page.route("**/api/ticks?*", lambda route: route.fulfill(content_type="text/event-stream", body=": nothing\n\n"))
    page.goto(f"{server.url}/console/")
    expect(page.get_by_role("heading", name="No work yet")).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("New job from a table"))).to_be_visible()
    expect(page.get_by_text("penstock jobs submit")).to_be_visible()
    assert serious_issues(page) == []


def pages_of_two(page: Page) -> None:
    page.route(
        "**/api/work?*", lambda route: route.continue_(url=route.request.url.replace("pageSize=50", "pageSize=2"))
    )


def test_older_work_is_fetched_page_by_page(page: Page, server: ServerProcess) -> None:
    """With pages of two, three jobs need two of them."""
    with server.frozen_workers():
        names = [start_job(server, table(1), PRICE, filename=f"older-{number}.csv") for number in range(3)]
        pages_of_two(page)
        page.goto(f"{server.url}/console/#/?q=older-")
        shown = page.get_by_role("table", name="Jobs and batches").locator("tbody tr a.name")
        expect(shown).to_have_text(["older-2.csv", "older-1.csv"])
        page.get_by_role("button", name="Show older").click()
        expect(shown).to_have_text(["older-2.csv", "older-1.csv", "older-0.csv"])
    for name in names:
        until_state(server, name, "DONE")


def test_a_refresh_keeps_the_pages_that_are_shown(page: Page, server: ServerProcess) -> None:
    names = [start_job(server, table(1), PRICE, filename=f"kept-{number}.csv") for number in range(3)]
    for name in names:
        until_state(server, name, "DONE")
    pages_of_two(page)
    page.goto(f"{server.url}/console/#/?q=kept-")
    shown = page.get_by_role("table", name="Jobs and batches").locator("tbody tr a.name")
    expect(page.locator(".live")).to_have_text("Live")
    page.get_by_role("button", name="Show older").click()
    expect(shown).to_have_count(3)
    late = start_job(server, table(1), PRICE, filename="kept-3.csv")
    page.evaluate(SET_HIDDEN, True)
    expect(page.locator(".live")).not_to_have_text("Live")
    page.evaluate(SET_HIDDEN, False)
    expect(shown).to_have_text(["kept-3.csv", "kept-2.csv", "kept-1.csv", "kept-0.csv"])
    page.keyboard.press("r")
    until_state(server, late, "DONE")
    expect(shown).to_have_count(4)


def test_work_that_begins_while_older_is_fetched_stays(page: Page, server: ServerProcess) -> None:
    for number in range(4):
        start_job(server, table(1), PRICE, filename=f"before-{number}.csv")
    pages_of_two(page)
    page.goto(f"{server.url}/console/")
    shown = page.get_by_role("table", name="Jobs and batches").locator("tbody tr a.name")
    expect(page.locator(".live")).to_have_text("Live")
    expect(shown).to_have_text(["before-3.csv", "before-2.csv"])
    held: list[Any] = []
    page.route("**/api/work?*after=*", lambda route: held.append(route))
    with page.expect_request("**/api/work?*after=*"):
        page.get_by_role("button", name="Show older").click()
    start_job(server, table(1), PRICE, filename="meanwhile.csv")
    expect(shown).to_have_text(["meanwhile.csv", "before-3.csv", "before-2.csv"])
    held[0].continue_(url=held[0].request.url.replace("pageSize=50", "pageSize=2"))
    expect(shown).to_have_text(["meanwhile.csv", "before-3.csv", "before-2.csv", "before-1.csv", "before-0.csv"])


def test_a_card_of_running_work_is_in_lines(watched: WatchedPage, server: ServerProcess) -> None:
    page = watched.page
    page.set_viewport_size({"width": 390, "height": 844})
    counts = {"done": 21_466, "failed": 223, "notFound": 0, "skipped": 0, "inFlight": 64, "retrying": 0, "pending": 0}
    entry: dict[str, Any] = {
        "id": "job_1",
        "kind": "job",
        "name": "products.csv",
        "fileName": "products.csv",
        "jobType": "categories",
    }
    entry |= {"state": "RUNNING", "owner": "ann", "createdAt": "2026-01-01T00:00:00Z", "endedAt": None, "changes": ""}
    figures = {"total": 200_000, "counts": counts, "ratePerSecond": 251, "etaSeconds": 660, "etaRange": None}
    page.route("**/api/work?*", lambda route: route.fulfill(json={"work": [{**entry, **figures}], "next": None}))
    page.route("**/api/ticks?*", lambda route: route.fulfill(content_type="text/event-stream", body=": nothing\n\n"))
    page.goto(f"{server.url}/console/")
    expect(page.get_by_text("products.csv")).to_be_visible()

    def place(name: str) -> tuple[float, float]:
        """Its top and its right edge."""
        found = page.locator(f"tbody .work-{name}").bounding_box()
        assert found is not None
        return found["y"], found["x"] + found["width"]

    assert place("rate")[0] == place("eta")[0] > place("state")[0]
    assert abs(place("created time")[1] - place("progress")[1]) <= 1


def test_keys_move_through_the_list_and_open_work(page: Page, server: ServerProcess) -> None:
    name = start_job(server, table(2), PRICE, filename="by-keys.csv")
    page.goto(f"{server.url}/console/#/?q=by-keys")
    expect(page.get_by_role("link", name="by-keys.csv")).to_be_visible()
    page.keyboard.press("j")
    expect(page.get_by_role("link", name="by-keys.csv")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/work/{name}$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("by-keys.csv")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Next row")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("p")
    expect(page.locator(".live")).to_have_text("Paused")
    page.keyboard.press("p")
    expect(page.locator(".live")).to_have_text("Live")
    wait_until(lambda: work_of(server, name)["state"] == "DONE", 60)


def test_commands_of_a_first_visit_are_for_this_server(page: Page, server: ServerProcess) -> None:
    nothing = json.dumps({"work": [], "next": None})
    page.route("**/api/work?*", lambda route: route.fulfill(content_type="application/json", body=nothing))
    page.route("**/api/ticks?*", lambda route: route.fulfill(content_type="text/event-stream", body=": nothing\n\n"))
    page.goto(f"{server.url}/console/")
    commands = page.locator(".welcome pre")
    expect(commands).to_have_count(2)
    submit, client = commands.all_inner_texts()
    assert f"--server {server.url} " in submit
    assert "--provider" not in submit, "the one of --base-url is the default"
    assert f'base_url="{server.url}/v1", api_key="none"' in client
    me = server.ask("GET", "/api/me").json | {"providers": [{"name": "shop", "models": ["big-*", "tiny"]}]}
    page.route("**/api/me", lambda route: route.fulfill(json=me))
    page.reload()
    expect(commands.first).to_contain_text("--provider shop --model tiny ")


def test_work_is_found_by_the_id_that_its_page_shows(page: Page, server: ServerProcess) -> None:
    name = start_job(server, table(2), PRICE, filename="by-id.csv")
    page.goto(f"{server.url}/console/#/?q={name}")
    expect(page.locator(".work-name a")).to_have_text(["by-id.csv"])


def test_escape_closes_the_menu_of_a_narrow_screen(page: Page, server: ServerProcess) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{server.url}/console/")
    page.get_by_role("button", name="Menu").click()
    expect(page.get_by_role("link", name="Sessions")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("link", name="Sessions")).to_be_hidden()


def test_work_that_begins_between_the_list_and_the_first_tick_is_shown(page: Page, server: ServerProcess) -> None:
    start_job(server, table(1), PRICE, filename="there-before.csv")
    held: list[Route] = []
    page.route("**/api/ticks?*", lambda route: held.append(route))
    with page.expect_request("**/api/ticks?*"):
        page.goto(f"{server.url}/console/")
    shown = page.get_by_role("table", name="Jobs and batches").locator("tbody tr a.name")
    expect(shown.first).to_have_text("there-before.csv")
    until_state(server, start_job(server, table(1), PRICE, filename="in-between.csv"), "DONE")
    held[0].continue_()
    expect(page.locator(".live")).to_have_text("Live")
    expect(shown.first).to_have_text("in-between.csv")
    expect(shown.nth(1)).to_have_text("there-before.csv")


NOTE_TICKS = """
globalThis.ticks = [];
globalThis.EventSource = class extends EventSource {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", ({data}) => ticks.push(data));
  }
};
"""


def test_ticks_that_come_before_the_list_are_kept_until_it_is_there(page: Page, server: ServerProcess) -> None:
    start_job(server, table(1), PRICE, filename="read-before.csv")
    read = server.ask("GET", "/api/work?pageSize=50").json
    late = start_job(server, table(1), PRICE, filename="told-first.csv")
    until_state(server, late, "DONE")
    held: list[Route] = []
    page.add_init_script(NOTE_TICKS)
    page.route("**/api/work?*", lambda route: held.append(route))
    with page.expect_request("**/api/work?*"):
        page.goto(f"{server.url}/console/")
    page.wait_for_function("id => ticks.some((tick) => tick.includes(id))", arg=late)
    held[0].fulfill(json=read)
    shown = page.get_by_role("table", name="Jobs and batches").locator("tbody tr a.name")
    expect(shown.first).to_have_text("told-first.csv")
    expect(shown.nth(1)).to_have_text("read-before.csv")


def test_older_work_that_moves_up_into_the_ticks_is_not_new(page: Page, server: ServerProcess) -> None:
    found: dict[str, Any] = work_of(server, start_job(server, table(1), PRICE, filename="any.csv"))

    def entry(number: int) -> dict[str, Any]:
        return found | {"id": f"job_{number:032x}", "name": f"job {number}", "fileName": None}

    def event(numbers: Iterable[int], *gone: int) -> str:
        tick = {"work": [entry(number) for number in numbers], "gone": [entry(number)["id"] for number in gone]}
        return f"data: {json.dumps(tick)}\n\n"

    newest = range(60, 10, -1)
    ticks = "".join(["retry: 3600000\n\n", event(newest), event([10], 55), event([61])])
    listed = {"work": [entry(number) for number in newest], "next": "batch_" + f"{11:032x}"}
    page.route("**/api/work?*", lambda route: route.fulfill(json=listed))
    page.route("**/api/ticks?*", lambda route: route.fulfill(content_type="text/event-stream", body=ticks))
    page.goto(f"{server.url}/console/")
    shown = page.get_by_role("table", name="Jobs and batches").locator("tbody tr a.name")
    expect(shown).to_have_text([f"job {number}" for number in (61, *newest) if number != 55])
