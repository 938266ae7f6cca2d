"""Pending rows in the console: frozen while one reads, told of changes, selected and run again."""

from __future__ import annotations

import re
from collections.abc import Callable

from playwright.sync_api import Page, expect

from tests.support.browser import serious_issues
from tests.support.jobs import start_job, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

ROWS = 300
TABLE = "\n".join(["sku,title", *(f"{number},Chair {number}" for number in range(1, ROWS + 1)), ""]).encode()


def start_paused(server: ServerProcess, job_type: str) -> str:
    """A job of which no row was claimed yet, and none will be before it is resumed."""
    with server.frozen_workers():
        job = start_job(server, TABLE, {"processor": "price", "jobType": job_type})
        until_state(server, job, "QUEUED")
        assert server.ask("POST", f"/api/jobs/{job}/pause").status == 200
    return job


def test_rows_of_all_jobs_stay_where_they_are_and_are_run_again(
    show: Callable[[str], Page], server: ServerProcess
) -> None:
    job = start_paused(server, "frozen")
    page = show("/pending?type=frozen")
    grid = page.get_by_role("grid")
    expect(page.get_by_text("100 rows so far")).to_be_visible()
    first = grid.get_by_role("row").nth(1)
    expect(first).to_contain_text("Chair 1")
    expect(first).to_contain_text("frozen")
    expect(first).to_contain_text("rows.csv")
    assert serious_issues(page) == []

    grid.focus()
    for shown in (100, 200, 300):
        page.keyboard.press("End")
        expect(grid.get_by_role("row").last).to_contain_text(f"Chair {shown}")
        expect(grid).to_have_attribute("aria-rowcount", str(min(ROWS, shown + 100) + 1))
    expect(page.get_by_text("300 rows, as they were when the list was opened")).to_be_visible()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("j")
    for _ in range(6):  # rows 5 to 10: the first is sold out, the last is not there, the others have a price
        page.keyboard.press("x")
        page.keyboard.press("j")
    expect(page.get_by_text("6 rows selected")).to_be_visible()

    assert server.ask("POST", f"/api/jobs/{job}/resume").status == 200
    until_state(server, job, "DONE")
    expect(page.get_by_role("button", name="300 changes – refresh")).to_be_visible()
    expect(first).to_contain_text("Chair 1")
    expect(first).to_contain_text("Pending")
    page.get_by_role("button", name="Run selected again").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Run 2 rows again?")
    expect(dialog).to_contain_text("4 rows are done.")
    dialog.get_by_role("button", name="Run again").click()
    expect(page.get_by_text("2 rows are put back to run again.")).to_be_visible()

    def operations() -> list[str]:
        return [each["state"] for each in server.ask("GET", f"/api/jobs/{job}/operations").json["operations"]]

    # The list, opened anew, may have met them in flight: it stays as it was then.
    wait_until(lambda: operations() == ["DONE"], 60)
    until_state(server, job, "DONE")
    page.reload()
    expect(page.get_by_text("No row fits these filters now.")).to_be_visible()


def test_filters_are_in_the_address_and_lead_to_the_job(show: Callable[[str], Page], server: ServerProcess) -> None:
    job = start_paused(server, "filtered")
    page = show("/pending")
    page.get_by_role("searchbox", name="Job type").fill("filtered")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Claimed").click()
    expect(page.get_by_text("No row fits these filters now.")).to_be_visible()
    expect(page).to_have_url(re.compile(r"#/pending\?type=filtered&status=PROCESSING$"))
    page.get_by_role("button", name="Pending", exact=True).click()
    expect(page.get_by_text("100 rows so far")).to_be_visible()
    page.get_by_label("Changed until").fill("2020-01-01T00:00")
    page.keyboard.press("Enter")
    page.get_by_label("Changed until").blur()
    expect(page.get_by_text("No row fits these filters now.")).to_be_visible()
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("searchbox", name="Job id").fill(job)
    page.keyboard.press("Enter")
    expect(page.get_by_role("grid").get_by_role("row").nth(1)).to_contain_text("Chair 1")
    page.get_by_role("grid").focus()
    page.keyboard.press("Home")
    page.get_by_role("link", name="Go to job").click()
    expect(page.get_by_role("heading", name="rows.csv")).to_be_visible()

    page.get_by_role("navigation", name="Views").get_by_role("link", name="Pending").click()
    expect(page.get_by_role("grid").get_by_role("row").nth(1)).to_contain_text("Chair 1")
    assert server.ask("DELETE", f"/api/jobs/{job}").status == 204


def test_changes_are_those_of_the_rows_that_the_filters_show(
    show: Callable[[str], Page], server: ServerProcess
) -> None:
    page = show("/pending?type=awaited")
    expect(page.locator(".live")).to_have_text("Live")
    expect(page.get_by_text("No row fits these filters now.")).to_be_visible()
    done = start_job(server, TABLE, {"processor": "price", "jobType": "other"})
    until_state(server, done, "DONE")
    job = start_paused(server, "awaited")
    expect(page.get_by_role("button", name="300 changes – refresh")).to_be_visible()
    page.get_by_role("button", name="300 changes – refresh").click()
    expect(page.get_by_text("100 rows so far")).to_be_visible()
    expect(page.get_by_role("button", name="Refresh", exact=True)).to_be_visible()
    assert server.ask("DELETE", f"/api/jobs/{job}").status == 204


def test_ids_of_rows_and_jobs_are_shown_and_copied(
    show: Callable[[str], Page], page: Page, server: ServerProcess
) -> None:
    job = start_paused(server, "named")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    show("/pending?type=named")
    row = page.get_by_role("grid").get_by_role("row").nth(1)
    tail = job[-4:]
    item = f"batch_req_{job.removeprefix('job_')}_1"
    expect(row.get_by_role("gridcell", name=f"…{tail}_1")).to_be_visible()
    expect(row.get_by_role("gridcell", name=f"{job[:8]}…{tail}")).to_be_visible()
    row.hover()
    for id_ in (item, job):
        row.get_by_role("button", name=f"Copy {id_}").click()
        expect(row.get_by_role("button", name=f"Copy {id_}").locator("svg use")).to_have_attribute(
            "href", re.compile("#check$")
        )
        assert page.evaluate("() => navigator.clipboard.readText()") == id_
    expect(page).to_have_url(re.compile("#/pending"))
    assert serious_issues(page) == []
    assert server.ask("DELETE", f"/api/jobs/{job}").status == 204


def test_what_is_being_typed_outlives_a_page_drawn_anew(show: Callable[[str], Page], server: ServerProcess) -> None:
    job = start_paused(server, "typed")
    page = show("/pending?type=typed")
    expect(page.get_by_text("100 rows so far")).to_be_visible()
    box = page.get_by_role("searchbox", name="Job id")
    box.fill(job)
    assert server.ask("POST", f"/api/jobs/{job}/resume").status == 200
    expect(page.get_by_role("button", name="300 changes – refresh")).to_be_visible()
    expect(box).to_have_value(job)
    box.press("Enter")
    expect(page).to_have_url(re.compile(f"job={job}$"))
    until_state(server, job, "DONE")
    assert server.ask("DELETE", f"/api/jobs/{job}").status == 204
