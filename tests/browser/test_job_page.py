"""The page of one job or batch in a browser: figures, actions, charts, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from uuid import uuid4

import pytest
from playwright.sync_api import Page, Route, expect

import penstock
from tests.support.batch_api import jsonl
from tests.support.browser import WatchedPage, serious_issues
from tests.support.cli import run_cli
from tests.support.console import PRICE, open_work, start_batch, work_of
from tests.support.jobs import start_job, table, until_state
from tests.support.mock_process import MockProcess
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

ROWS = 200


@pytest.fixture(scope="module")
def done(server: ServerProcess) -> str:
    """A job of 200 rows, of which 20 have failed and 20 were not found."""
    name = start_job(server, table(ROWS), PRICE, filename="catalogue.csv")
    until_state(server, name, "DONE")
    return name


def test_figures_in_the_header_are_those_of_the_api(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done)
    told = work_of(server, done)
    expect(page.locator("[data-figure=total]")).to_have_text(f"{told['total']:,}")
    for name in ("done", "failed", "notFound", "inFlight", "pending"):
        expect(page.locator(f"[data-count={name}]")).to_have_text(f"{told['counts'][name]:,}")
    expect(page.locator("[data-figure=settled]")).to_have_text(str(ROWS))
    expect(page.get_by_role("heading", level=1)).to_have_text("catalogue.csv")
    expect(page.locator(".heading")).to_contain_text("Done")


def test_details_name_the_function_of_a_job(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done, "?tab=details")
    facts = page.locator("main dl.facts")
    expect(facts).to_contain_text("Functionprice")
    expect(facts).not_to_contain_text("Model")


def test_charts_share_a_cursor(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done, "?tab=charts")
    expect(page.locator(".plot canvas")).to_have_count(4)
    first = page.locator(".plot .u-over").first
    box = first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    for number in range(4):  # each shows the cursor at the same place
        expect(page.locator(".plot").nth(number).locator(".u-cursor-x")).to_be_visible()
    page.keyboard.press("t")  # drawn anew in the other colours
    expect(page.locator(".plot canvas")).to_have_count(4)
    assert serious_issues(page) == []


def test_charts_stand_still_while_updates_are_paused(page: Page, server: ServerProcess, done: str) -> None:
    page.clock.install()
    open_work(page, server, done, "?tab=charts")
    expect(page.locator(".plot canvas")).to_have_count(4)
    page.keyboard.press("p")
    expect(page.locator(".live")).to_have_text("Paused")
    read: list[str] = []
    page.on("request", lambda request: read.append(request.url) if "/samples" in request.url else None)
    page.clock.run_for(10_000)
    expect(page.locator(".live")).to_have_text("Paused")
    assert read == []
    page.keyboard.press("p")
    expect(page.locator(".live")).to_have_text("Live")
    with page.expect_request("**/samples*"):
        page.clock.run_for(3_000)


def a_limit(**changes: object) -> dict[str, object]:
    found: dict[str, object] = {"calls": 40, "floor": 1, "ceiling": 256, "perSecond": None, "gate": None}
    # At noon it is the same day in nearly every time zone.
    found |= {"gateUntil": None, "gateCode": None, "gateMessage": None, "movedAt": "2026-01-01T12:00:00Z"}
    return found | changes


def test_the_limit_is_told_with_its_last_large_move_until_the_end(page: Page, server: ServerProcess, done: str) -> None:
    state = "RUNNING"

    def answer(route: Route) -> None:
        told = route.fetch().json()
        told |= {"state": state, "limit": a_limit(why="32 → 45: headroom; 3/s → 2/s: 429 ×12")}
        route.fulfill(json=told)

    page.route("**/api/ticks?*", lambda route: route.fulfill(content_type="text/event-stream", body=": nothing\n\n"))
    page.route(f"**/api/work/{done}", answer)
    open_work(page, server, done)
    tile = page.locator(".tiles > div").filter(has_text="Calls at a time")
    expect(tile).to_contain_text("40 of 256")
    expect(tile).to_contain_text("last large move: 32 → 45, headroom; 3/s → 2/s: 429 ×12, 1 Jan 2026")
    state = "DONE"
    page.keyboard.press("r")
    expect(tile).not_to_contain_text("move")
    expect(tile).not_to_contain_text("headroom")


def test_charts_show_figures_that_come_after_the_end(page: Page, server: ServerProcess, done: str) -> None:
    """Workers write the figures of a second when it is over: the last ones can come after the job has ended."""
    written = False
    page.route("**/samples*", lambda route: route.continue_() if written else route.fulfill(json={"samples": []}))
    open_work(page, server, done, "?tab=charts")
    expect(page.get_by_text("No figures for this time")).to_be_visible()
    written = True
    expect(page.locator(".plot canvas")).to_have_count(4)


def test_a_group_of_errors_is_run_again(page: Page, server: ServerProcess) -> None:
    name = start_job(server, table(40), PRICE, filename="errors.csv")
    until_state(server, name, "DONE")
    open_work(page, server, name)
    page.keyboard.press("e")
    expect(page).to_have_url(re.compile("tab=errors"))
    groups = page.get_by_role("table", name="Groups of errors").locator("tbody tr")
    expect(groups).to_have_count(2)
    sold_out = groups.filter(has_text="sold_out")
    expect(sold_out).to_contain_text("4")
    expect(sold_out).to_contain_text("sold out")
    assert serious_issues(page) == []
    sold_out.get_by_role("link").click()
    grid = page.get_by_role("grid")
    expect(grid.get_by_role("row").filter(has_text="Failed")).to_have_count(4)
    page.go_back()
    sold_out.get_by_role("button", name="Run this group again").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Run 4 rows again?")
    dialog.get_by_label("Give them all their attempts again").check()
    dialog.get_by_role("button", name="Run again").click()
    expect(page.get_by_text("4 rows put back to run again.")).to_be_visible()
    page.get_by_role("link", name="Details").click()
    operations = page.get_by_role("table", name="Operations").locator("tbody tr")
    expect(operations).to_have_count(1)
    expect(operations).to_contain_text("done")
    until_state(server, name, "DONE")
    assert work_of(server, name)["counts"]["failed"] == 4  # sold out, still


def test_groups_of_errors_stay_when_they_are_read_again(page: Page, server: ServerProcess, done: str) -> None:
    read: list[str] = []

    def answer(route: Route) -> None:
        older = "after=" in route.request.url
        read.append("older" if older else "first")
        group = {
            "fingerprint": "ab" if older else "cd",
            "code": "older" if older else f"read-{read.count('first')}-times",
            "status": None,
            "count": 20,
            "firstSeen": "2026-01-01T00:00:00Z",
            "lastSeen": "2026-01-01T00:00:00Z",
            "sample": {"row": 1, "message": "no"},
        }
        route.fulfill(json={"errors": [group], "next": None if older else "20_cd"})

    page.route("**/errors?*", answer)
    open_work(page, server, done, "?tab=errors")
    groups = page.get_by_role("table", name="Groups of errors").locator("tbody tr")
    page.get_by_role("button", name="Show more").click()
    expect(groups.nth(1)).to_contain_text("older")
    expect(groups.first).to_contain_text("read-2-times")  # once more after the page was opened, whatever happens
    # They are read again, as figures that move make them.
    with server.frozen_workers():
        again = {"scope": "job", "statuses": ["ERROR"]}
        assert server.ask("POST", f"/api/jobs/{done}/reprocess", again, key=uuid4().hex).status == 202
        expect(page.locator("[data-count=failed]")).to_have_text("0")
        expect(groups.first).to_contain_text(re.compile(r"read-(?!2-)\d+-times"))
        expect(groups).to_have_count(2)
    until_state(server, done, "DONE")


def test_an_operation_is_stopped(page: Page, server: ServerProcess) -> None:
    name = start_job(server, table(40), {**PRICE, "maxConcurrency": 1}, filename="stopped.csv")
    until_state(server, name, "DONE")
    open_work(page, server, name, "?tab=details")
    with server.frozen_workers():  # one row waits for them, and there is no room for another
        page.get_by_role("button", name="Run failures again").click()
        page.get_by_role("button", name="Run again").click()
        strip = page.get_by_role("status").filter(has_text="Putting rows back")
        expect(strip).to_contain_text("1 put back")
        operations = page.get_by_role("table", name="Operations").locator("tbody tr")
        expect(operations.get_by_role("button", name="Stop")).to_be_visible()
        assert serious_issues(page) == []
        strip.get_by_role("button", name="Stop").click()
        expect(page.get_by_text("1 row had been put back and runs again.")).to_be_visible()
        expect(strip).to_have_count(0)
        expect(operations).to_contain_text("cancelled")
    until_state(server, name, "DONE")


def test_a_job_is_paused_goes_on_and_is_cancelled(page: Page, server: ServerProcess) -> None:
    with server.frozen_workers():
        name = start_job(server, table(ROWS), PRICE, filename="steered.csv")
        open_work(page, server, name)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator(".heading")).to_contain_text("Paused")
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Nothing more of steered.csv is started.")
        dialog.get_by_role("button", name="Back").click()
        expect(dialog).to_have_count(0)
        assert work_of(server, name)["state"] not in ("CANCELLED", "CANCELLING")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Cancel it").click()
        expect(page.locator(".heading")).to_contain_text(re.compile("Cancel(led|ling)"))
    wait_until(lambda: work_of(server, name)["state"] == "CANCELLED", 60)
    expect(page.locator(".heading")).to_contain_text("Cancelled")
    # What was never run can be run now.
    page.get_by_role("button", name="Run failures again").click()
    page.get_by_role("button", name="Run again").click()
    until_state(server, name, "DONE")
    expect(page.locator(".heading")).to_contain_text("Done")
    expect(page.locator("[data-figure=settled]")).to_have_text(str(ROWS))


def test_a_batch_is_paused_goes_on_and_fails_in_part(page: Page, server: ServerProcess) -> None:
    lines = [json.loads(line) for line in jsonl(20).splitlines()]
    for line in lines[:3]:
        del line["body"]["messages"]
    with server.frozen_workers():
        name = start_batch(server, "".join(json.dumps(line) + "\n" for line in lines).encode(), "steered-evals")
        # The list has the rows that there are when it opens.
        wait_until(lambda: work_of(server, name)["total"] == 20, 60)
        open_work(page, server, name, "?tab=pending")
        expect(page.get_by_text("20 rows, as they were")).to_be_visible()
        expect(page.get_by_role("grid", name="Pending rows").get_by_role("row").nth(1)).to_contain_text("Pending")
        page.get_by_role("link", name="Rows").click()
        page.get_by_role("button", name="Pause").click()
        expect(page.locator(".heading")).to_contain_text("Paused")
        expect(page.get_by_role("grid").get_by_role("row").nth(1)).to_contain_text(re.compile("Pending|Claimed"))
        page.get_by_role("button", name="Resume").click()
        expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.locator(".heading")).to_contain_text("Done")
    expect(page.get_by_role("grid").get_by_role("row").nth(4)).to_contain_text("Done")
    page.keyboard.press("e")
    group = page.get_by_role("table", name="Groups of errors").locator("tbody tr")
    expect(group).to_contain_text("HTTP 400")
    group.get_by_role("link").click()
    expect(page.get_by_role("grid").get_by_role("row").filter(has_text="Failed")).to_have_count(3)
    page.go_back()
    group.get_by_role("button", name="Run this group again").click()
    page.get_by_role("dialog").get_by_role("button", name="Run again").click()
    expect(page.get_by_text("The failed requests are run again.")).to_be_visible()
    wait_until(lambda: work_of(server, name)["state"] == "DONE", 60)
    expect(group).to_contain_text("3")


def test_sheets_are_exported(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done)
    for kind, first in (("csv", b"sku,"), ("xlsx", b"PK"), ("jsonl", b"{")):
        page.get_by_role("button", name="Export").click()
        with page.expect_download() as downloading:
            page.get_by_role("link", name=f".{kind}").click()
        download = downloading.value
        assert download.suggested_filename == f"{done}.{kind}"
        content = download.path().read_bytes()
        assert content.startswith(first), content[:40]
        if kind != "xlsx":
            assert content.count(b"\n") == ROWS + (kind == "csv")


def test_work_is_deleted(page: Page, server: ServerProcess) -> None:
    name = start_job(server, table(2), PRICE, filename="deleted.csv")
    until_state(server, name, "DONE")
    open_work(page, server, name)
    expect(page.get_by_role("grid")).to_contain_text("Chair 2")  # asked for once it is gone, they are an error
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page).to_have_url(re.compile(r"/console/#/$"))
    expect(page.locator(f'a[href="#/work/{name}"]')).to_have_count(0)
    assert server.ask("GET", f"/api/work/{name}").status == 404


def test_a_refusal_is_told_where_it_was_asked(watched: WatchedPage, server: ServerProcess) -> None:
    watched.allow("status of 409")
    page = watched.page
    with server.frozen_workers():
        name = start_job(server, table(2), PRICE, filename="refused.csv")
        open_work(page, server, name)
        page.get_by_role("button", name="Cancel").click()
        refusal = json.dumps({"error": {"message": "It is being moved.", "code": None}})
        page.route("**/cancel", lambda route: route.fulfill(status=409, body=refusal))
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Cancel it").click()
        expect(dialog.get_by_role("alert")).to_have_text("It is being moved.")
        page.unroute("**/cancel")
        dialog.get_by_role("button", name="Cancel it").click()
        expect(dialog).to_have_count(0)


def test_an_address_of_nothing_says_so(watched: WatchedPage, server: ServerProcess) -> None:
    watched.allow("404")
    page = watched.page
    page.goto(f"{server.url}/console/#/work/job_{'0' * 32}")
    expect(page.get_by_role("heading", name="It cannot be shown")).to_be_visible()
    page.get_by_role("link", name="To the list of work").click()
    expect(page).to_have_url(re.compile(r"#/$"))
    expect(page.get_by_role("heading", name="Work", exact=True)).to_be_visible()
    page.goto(f"{server.url}/console/#/nowhere")
    expect(page.get_by_text("There is no page /nowhere")).to_be_visible()


def test_the_page_fits_a_narrow_screen(page: Page, server: ServerProcess, done: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    for query in ("", "?tab=charts", "?tab=errors", "?tab=pending", "?tab=details"):
        open_work(page, server, done, query)
        expect(page.get_by_role("navigation", name="Views")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, query
        assert serious_issues(page) == []


def test_a_batch_whose_file_is_refused_says_why(page: Page, server: ServerProcess) -> None:
    first, second = jsonl(2).splitlines()
    name = start_batch(server, b"\n".join([first, first, b"nonsense", second]), "refused-evals")
    wait_until(lambda: work_of(server, name)["state"] == "FAILED", 60)
    open_work(page, server, name)
    refusal = page.get_by_role("main").get_by_role("alert")
    expect(refusal).to_contain_text("The file was refused, and nothing of it was run.")
    expect(refusal.get_by_role("listitem")).to_have_count(2)
    expect(refusal).to_contain_text("line 2: custom_id:")
    expect(refusal).to_contain_text("line 3: This line is not parseable as valid JSON.")
    assert serious_issues(page) == []


def test_rows_that_a_cancelled_job_never_ran_are_called_so_everywhere(page: Page, server: ServerProcess) -> None:
    with server.frozen_workers():
        # A claim that was under way when the workers stopped takes one row.
        name = start_job(server, table(5), {**PRICE, "maxConcurrency": 1}, filename="never-run.csv")
        wait_until(lambda: work_of(server, name)["total"] == 5, 60)
        server.ask("POST", f"/api/jobs/{name}/pause")
        server.ask("POST", f"/api/jobs/{name}/cancel")
    wait_until(lambda: work_of(server, name)["state"] == "CANCELLED", 60)
    open_work(page, server, name)
    left = work_of(server, name)["counts"]["cancelled"]
    assert left >= 4
    page.locator(".legend").get_by_role("link", name="Cancelled").click()
    expect(page.get_by_label("Status").locator("option:checked")).to_have_text(f"Cancelled ({left})")
    expect(page.locator(".grid-row[data-index] .chip")).to_have_text(["Cancelled"] * left)
    page.locator(".grid-row[data-index]").first.click()
    expect(page.get_by_role("complementary").get_by_role("heading", level=2)).to_contain_text("Cancelled")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Pending", exact=True).last.click()
    expect(page.get_by_role("main")).to_contain_text(f"{left} rows were never run.")
    expect(page.get_by_role("link", name="Show them")).to_be_visible()


def test_a_halted_model_is_told_with_what_to_do_and_times_are_told_in_full(
    page: Page, server: ServerProcess, done: str
) -> None:
    def answer(route: Route) -> None:
        told = route.fetch().json()
        limit = a_limit() | {"gate": "halted", "gateCode": "invalid_api_key", "gateMessage": "HTTP 401: no such key"}
        route.fulfill(json=told | {"state": "RUNNING", "limit": limit, "etaSeconds": 91, "etaRange": [77, 104]})

    page.route("**/api/ticks?*", lambda route: route.fulfill(content_type="text/event-stream", body=": nothing\n\n"))
    page.route(f"**/api/work/{done}", answer)
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        open_work(page, server, done)
        notice = page.get_by_role("main").get_by_role("alert")
        expect(notice).to_contain_text("is not called: HTTP 401: no such key")
        expect(notice.get_by_role("link", name="Providers")).to_be_visible()
        span = page.locator(".tile-more").filter(has_text="1 min 17 s to 1 min 44 s")
        assert span.evaluate("one => one.scrollWidth <= one.clientWidth && one.scrollHeight <= one.clientHeight")


def picky(number: int) -> int:
    if number == 2:
        raise penstock.Fail("hopeless")
    return number


def begin_run(folder: Path, database: str, upstream: MockProcess) -> str:
    good, bad = (json.loads(line) for line in jsonl(2).splitlines())
    del bad["body"]["messages"]
    source = folder / "requests.jsonl"
    source.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    where = ("--base-url", upstream.base_url, "--database-url", database, "--json")
    name: str = run_cli("run", source, "-o", folder / "answers.jsonl", *where, cwd=folder).expect(3).summary["batch"]
    return name


@pytest.mark.parametrize("kind", ["run", "map"])
def test_a_run_that_nothing_works_off_says_who_goes_on_with_it(
    page: Page, server: ServerProcess, console_database: str, upstream: MockProcess, tmp_path: Path, kind: str
) -> None:
    if kind == "run":
        name = begin_run(tmp_path, console_database, upstream)
        goes_on = "the penstock run command that began it goes on with it."
    else:
        list(penstock.map(picky, [1, 2], name="picky", database_url=console_database))
        name = server.ask("GET", "/api/work?pageSize=1").json["work"][0]["id"]
        goes_on = "the program with penstock.map(name='picky') that began it goes on with it."
    open_work(page, server, name)
    expect(page.locator(".heading")).to_contain_text("Done")
    expect(page.get_by_role("main")).not_to_contain_text("Nothing works it off")
    page.get_by_role("button", name="Run failures again").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Nothing works it off now: {goes_on}")
    dialog.get_by_role("button", name="Run again").click()
    notice = page.locator(".notices").get_by_role("status")
    expect(notice).to_contain_text(f"The failed requests wait to be run again.Nothing works it off now: {goes_on}")
    expect(page.get_by_role("main").get_by_role("status")).to_contain_text(goes_on)
    assert serious_issues(page) == []
    server.ask("POST", f"/api/work/{name}/cancel")
    expect(page.get_by_role("main")).not_to_contain_text("Nothing works it off")
