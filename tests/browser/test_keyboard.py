"""A whole job without a mouse: made, tried, started, looked at, an error found and its rows run again."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.support.console import PRICE, open_work
from tests.support.jobs import start_job, table, until_state
from tests.support.server import ServerProcess

MANY = 60


def reach(page: Page, name: str, *, back: bool = False) -> None:
    """Press Tab until the focus is on what has this name."""
    wanted = page.locator("*:focus").and_(page.get_by_label(name, exact=True).or_(page.get_by_text(name, exact=True)))
    for _ in range(MANY):
        if wanted.count():
            return
        page.keyboard.press("Shift+Tab" if back else "Tab")
    raise AssertionError(f"{name} is not reached by Tab")


def test_a_job_from_file_to_repair(show: Callable[[str], Page], tmp_path: Path) -> None:
    file = tmp_path / "by-keyboard.csv"
    file.write_text("\n".join(["sku,title", *(f"{number},Chair {number}" for number in range(1, 41)), ""]))
    page = show("/")
    # From now on: a listener that comes with the key that opens the chooser may come too late for it.
    page.on("filechooser", lambda _: None)
    expect(page.get_by_role("heading", name="Work", exact=True)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator("*:focus")).to_have_text("To the content")
    page.keyboard.press("Enter")
    reach(page, "New job")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="New job")).to_be_visible()
    reach(page, "Choose a file")
    expect(page.locator("*:focus")).to_have_text("Choose a file")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(file)
    expect(page.get_by_role("region", name="First rows")).to_contain_text("Chair 10")
    reach(page, "Processor")
    page.keyboard.press("Enter")
    reach(page, "Try 10 rows")
    page.keyboard.press("Enter")
    expect(page.locator("[data-trial=DONE]")).to_contain_text("sold out")
    reach(page, "Start the job", back=True)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="by-keyboard.csv")).to_be_visible()
    expect(page.locator("main")).to_contain_text("40 of 40 rows")

    page.keyboard.press("e")
    expect(page.get_by_text("sold out").first).to_be_visible()
    reach(page, "Run this group again")
    page.keyboard.press("Enter")
    reach(page, "Run again")
    page.keyboard.press("Enter")
    expect(page.get_by_text("4 rows put back to run again.")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("Pause and resume updates")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_have_count(0)
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("p")
    expect(page.locator(".live")).to_have_text("Paused")


def test_enter_follows_links_and_presses_buttons_beside_the_grid(
    show: Callable[[str], Page], page: Page, server: ServerProcess
) -> None:
    job = start_job(server, table(12), {**PRICE, "jobType": "by-enter"}, filename="by-enter.csv")
    until_state(server, job, "DONE")
    open_work(page, server, job)
    drawer = page.get_by_role("complementary")
    expect(page.get_by_role("grid")).to_contain_text("Chair 12")
    page.keyboard.press("j")
    reach(page, "Export")
    page.keyboard.press("Enter")
    reach(page, "CSV (.csv)")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename.endswith(".csv")
    expect(drawer).to_have_count(0)
    reach(page, "Rows of by-enter.csv")
    page.keyboard.press("Enter")
    expect(drawer).to_have_accessible_name("Row 1")
    reach(page, "Next row (j)")
    page.keyboard.press("Enter")
    expect(drawer).to_have_accessible_name("Row 2")
    reach(page, "Close")
    page.keyboard.press("Enter")
    expect(drawer).to_have_count(0)
    reach(page, "Charts", back=True)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("tab=charts"))

    with server.frozen_workers():
        waiting = start_job(server, table(3), {**PRICE, "jobType": "by-enter"}, filename="waiting.csv")
        until_state(server, waiting, "QUEUED")
        server.ask("POST", f"/api/jobs/{waiting}/pause")
    show("/pending?type=by-enter")
    expect(page.get_by_role("grid").get_by_role("link", name="3", exact=True)).to_be_visible()
    page.keyboard.press("j")
    reach(page, "Go to job")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/work/{waiting}$"))
    show("/pending?type=by-enter")
    expect(page.get_by_role("grid").get_by_role("link", name="3", exact=True)).to_be_visible()
    page.keyboard.press("j")
    reach(page, "3")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/work/{waiting}\\?row=3$"))
    assert server.ask("DELETE", f"/api/jobs/{waiting}").status == 204
