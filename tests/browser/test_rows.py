"""The grid of rows in a browser: every row by its number, filters, selections, and one row in full."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.browser import WatchedPage, serious_issues, watched_page
from tests.support.cli import request_line
from tests.support.console import PRICE, open_work, start_batch, start_requests, work_of
from tests.support.images import archive, png
from tests.support.jobs import job_of, start_job, table, until_state
from tests.support.mock_process import MockProcess
from tests.support.server import ServerProcess
from tests.support.thorough import thorough
from tests.support.wait import wait_until

MANY = 1_000_000 if thorough() else 20_000
MAX_HEAP_BYTES = 50_000_000
MAX_DOM_ROWS = 100
ROW_PX = 28
BOUND = "MAX_PX = 8_000_000;"
SCROLL_TO = "share => { const grid = document.querySelector('.grid'); grid.scrollTop = share * grid.scrollHeight; }"


@pytest.fixture(scope="module")
def done(server: ServerProcess) -> str:
    """A job of 120 rows: of ten one fails, and one is not found."""
    name = start_job(server, table(120), PRICE, filename="rows.csv")
    until_state(server, name, "DONE")
    return name


def row(page: Page, number: int) -> Locator:
    """The row of the grid that shows this row of the work, once it is loaded."""
    return page.locator(f"#grid-row-{number - 1}:not([aria-busy])")


def active(page: Page) -> Locator:
    return page.locator(".grid-row[data-active]")


def test_rows_have_input_result_and_status(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done)
    head = page.get_by_role("columnheader")
    fixed, given, made = ("Select", "Row", "Status"), ("sku", "product_title", "note"), ("price", "currency")
    expect(head).to_have_text([*fixed, *given, *made, "Error", "Attempts", "Updated"])
    expect(row(page, 3)).to_contain_text(re.compile("3.*Done.*3.*Chair 3.*6.*EUR"))
    expect(row(page, 5)).to_contain_text(re.compile("Failed.*sold out"))
    expect(row(page, 10)).to_contain_text("Not found")
    assert serious_issues(page) == []


def test_keys_reach_every_row_of_a_large_job(browser: Browser, server: ServerProcess) -> None:
    """Opening, the end, the middle, by keyboard, by scrollbar and by wheel, in bounded memory."""
    lines = b"\n".join(b"%d,Chair %d" % (number, number) for number in range(1, MANY + 1))
    with server.frozen_workers(), watched_page(browser, server.url) as watched:
        name = start_job(server, b"sku,title\n" + lines, PRICE, filename="many.csv", timeout_s=600)
        server.ask("POST", f"/api/jobs/{name}/pause")
        wait_until(lambda: job_of(server, name)["ingest"]["done"], 600)
        page = watched.page
        open_work(page, server, name)
        expect(row(page, 1)).to_contain_text("Chair 1")
        page.get_by_role("grid").focus()
        page.keyboard.press("End")
        expect(row(page, MANY)).to_contain_text(f"Chair {MANY}")
        expect(active(page)).to_have_attribute("id", f"grid-row-{MANY - 1}")
        page.keyboard.press("PageUp")
        page.keyboard.press("ArrowUp")
        expect(active(page)).not_to_have_attribute("id", f"grid-row-{MANY - 1}")
        page.keyboard.press("/")
        page.keyboard.type(f"{MANY // 2:,}")
        page.keyboard.press("Enter")
        expect(row(page, MANY // 2)).to_contain_text(f"Chair {MANY // 2}")
        expect(active(page)).to_have_attribute("id", f"grid-row-{MANY // 2 - 1}")
        page.keyboard.press("Home")
        expect(row(page, 1)).to_contain_text("Chair 1")
        page.evaluate(SCROLL_TO, 1)
        expect(row(page, MANY)).to_contain_text(f"Chair {MANY}")
        page.evaluate(SCROLL_TO, 0)
        expect(row(page, 1)).to_contain_text("Chair 1")
        page.get_by_role("grid").hover()
        page.mouse.wheel(0, 280)  # ten rows, however many rows a pixel of the scrollbar stands for
        expect(page.locator(".grid-rows .grid-row").first).to_have_attribute("id", "grid-row-10")
        for step in range(40):  # all over it
            page.evaluate(SCROLL_TO, (step * 7 % 40) / 40)
            expect(page.locator(".grid-rows .grid-row[aria-busy]")).to_have_count(0)
        assert page.locator(".grid-row").count() < MAX_DOM_ROWS
        session = page.context.new_cdp_session(page)
        session.send("HeapProfiler.collectGarbage")
        assert session.send("Runtime.getHeapUsage")["usedSize"] < MAX_HEAP_BYTES
        assert page.locator("[data-figure=total]").inner_text() == f"{work_of(server, name)['total']:,}"
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Cancel it").click()
        expect(page.locator(".heading")).to_contain_text("Cancelled")


def test_a_scrollbar_that_stands_for_more_than_it_shows(page: Page, server: ServerProcess) -> None:
    """Beyond 285,714 rows a pixel of the scrollbar is several of the rows'. Here the bound is that of 1,000 rows."""

    def shrink(route: Route) -> None:
        answer = route.fetch()
        module = answer.text()
        assert BOUND in module
        route.fulfill(response=answer, body=module.replace(BOUND, f"MAX_PX = {1_000 * ROW_PX};"))

    page.route("**/parts/grid_scroll.js", shrink)
    rows = 5_000
    lines = b"\n".join(b"%d,Chair %d" % (number, number) for number in range(1, rows + 1))
    with server.frozen_workers():
        name = start_job(server, b"sku,title\n" + lines, PRICE, filename="scaled.csv")
        wait_until(lambda: job_of(server, name)["ingest"]["done"], 60)
        open_work(page, server, name)
        expect(row(page, 1)).to_contain_text("Chair 1")
        assert page.evaluate("document.querySelector('.grid').scrollHeight") < 1_010 * ROW_PX
        grid = page.get_by_role("grid")
        grid.focus()
        page.keyboard.press("End")
        expect(row(page, rows)).to_contain_text(f"Chair {rows}")
        expect(row(page, rows)).to_be_in_viewport(ratio=0.9)
        page.keyboard.press("ArrowUp")
        expect(active(page)).to_have_attribute("id", f"grid-row-{rows - 2}")
        page.keyboard.press("/")
        page.keyboard.type("2,500")
        page.keyboard.press("Enter")
        expect(row(page, 2_500)).to_be_in_viewport(ratio=0.9)
        share = page.evaluate("(grid => grid.scrollTop / grid.scrollHeight)(document.querySelector('.grid'))")
        assert 0.45 < share < 0.55, "the scrollbar follows"
        page.keyboard.press("ArrowDown")
        expect(active(page)).to_have_attribute("id", "grid-row-2500")
        page.evaluate(SCROLL_TO, 1)
        expect(row(page, rows)).to_be_in_viewport(ratio=0.9)
        page.evaluate(SCROLL_TO, 0.5)
        expect(page.locator(".grid-rows .grid-row:not([aria-busy])").first).to_have_attribute(
            "id", re.compile("grid-row-25..")
        )
        page.evaluate(SCROLL_TO, 0)
        expect(row(page, 1)).to_be_in_viewport(ratio=0.9)
        grid.hover()
        page.mouse.wheel(0, 10 * ROW_PX)
        expect(page.locator(".grid-rows .grid-row").first).to_have_attribute("id", "grid-row-10")
        assert server.ask("POST", f"/api/jobs/{name}/cancel").status == 200


def test_a_filter_and_the_open_row_are_in_the_address(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done)
    page.get_by_label("Status").select_option("ERROR")
    grid = page.get_by_role("grid")
    expect(grid.get_by_role("row").filter(has_text="Failed")).to_have_count(12)
    expect(page).to_have_url(re.compile(r"\?status=ERROR$"))
    grid.get_by_role("row").nth(2).click()
    drawer = page.get_by_role("complementary", name="Row 15")
    expect(drawer).to_contain_text("sold out")
    expect(page).to_have_url(re.compile(r"\?status=ERROR&row=15$"))
    page.reload()
    expect(page.get_by_role("complementary", name="Row 15")).to_contain_text("sold out")
    page.keyboard.press("Escape")
    expect(page.get_by_role("complementary")).to_have_count(0)
    page.get_by_role("button", name="Clear").click()
    expect(row(page, 1)).to_be_visible()
    page.get_by_label("Status").select_option("SKIPPED")
    expect(page.get_by_role("heading", name="No row fits this filter")).to_be_visible()
    page.get_by_role("button", name="Show all rows").click()
    expect(row(page, 1)).to_be_visible()


def test_selected_rows_are_run_again(page: Page, server: ServerProcess) -> None:
    name = start_job(server, table(60), PRICE, filename="selected.csv")
    until_state(server, name, "DONE")
    open_work(page, server, name)
    expect(row(page, 1)).to_be_visible()
    for key in ("j", "j", "x"):
        page.keyboard.press(key)
    for _ in range(2):  # from row 2 to row 4
        page.get_by_role("grid").press("Shift+ArrowDown")
    row(page, 10).locator(".grid-check").click()
    expect(page.locator(".rows-tools")).to_contain_text("4 rows selected")
    expect(page.locator(".grid-row[aria-selected=true]")).to_have_count(4)
    page.get_by_role("button", name="Run again").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Give them all their attempts again").check()
    dialog.get_by_role("button", name="Run again").click()
    expect(page.get_by_text("4 rows put back to run again.")).to_be_visible()
    expect(page.locator(".grid-row[aria-selected=true]")).to_have_count(0)
    until_state(server, name, "DONE")
    assert work_of(server, name)["counts"]["done"] == 48


def test_a_row_in_full(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done, "?row=5")
    drawer = page.get_by_role("complementary", name="Row 5")
    expect(drawer).to_contain_text("sold out")
    expect(drawer).to_contain_text("product_title")
    expect(drawer).to_contain_text("Chair 5")
    expect(drawer.locator(".attempts li")).not_to_have_count(0)
    assert serious_issues(page) == []
    page.keyboard.press("j")  # goes on through the rows
    expect(page.get_by_role("complementary", name="Row 6")).to_contain_text("Chair 6")
    page.get_by_role("button", name="Row before (k)").click()
    expect(page.get_by_role("complementary", name="Row 5")).to_contain_text("sold out")
    page.get_by_role("button", name="Close", exact=True).click()
    expect(page).to_have_url(re.compile(f"#/work/{done}$"))


def test_a_request_is_found_by_its_custom_id_and_copied_as_curl(page: Page, server: ServerProcess) -> None:
    lines = [request_line(f"order {number}/é", f"it's question {number}", "small") for number in range(30)]
    name = start_batch(server, "".join(json.dumps(line) + "\n" for line in lines).encode(), "by-custom-id")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_work(page, server, name)
    expect(page.locator(".heading")).to_contain_text("Done")
    expect(row(page, 2)).to_contain_text(re.compile("order 1/é.*small.*question 1"))
    page.get_by_placeholder("Find a custom id").fill("order 17/é")
    page.keyboard.press("Enter")
    found = page.locator(".grid-rows .grid-row")
    expect(found).to_have_count(1)
    expect(found).to_contain_text("18")
    found.click()
    drawer = page.get_by_role("complementary", name="Row 18")
    expect(drawer).to_contain_text("order 17/é")
    drawer.get_by_role("button", name="Copy as curl").click()
    expect(page.get_by_text("Copied.")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("curl -X POST 'http://127.0.0.1:")
    assert "/v1/chat/completions'" in copied
    assert "it'\\''s question 17" in copied
    page.get_by_role("button", name="Close", exact=True).click()
    page.get_by_placeholder("Find a custom id").fill("nobody")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="No row fits this filter")).to_be_visible()


def test_images_are_shown(page: Page, server: ServerProcess) -> None:
    content = archive(("a.png", png(3, 2)), ("b.png", png(5, 4)))
    with server.frozen_workers():
        name = start_job(server, content, PRICE, filename="pictures.zip")
        wait_until(lambda: job_of(server, name)["ingest"]["done"], 60)
        open_work(page, server, name, "?row=2")
        picture = page.get_by_role("img", name="Image of row 2")
        expect(picture).to_be_visible()
        expect(page.get_by_role("complementary", name="Row 2")).to_contain_text("5 × 4")
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 5
        server.ask("POST", f"/api/jobs/{name}/cancel")


def test_hostile_content_is_text(watched: WatchedPage, server: ServerProcess) -> None:
    """Markup, scripts, marks that turn text around, large cells, emoji and NUL: in names, cells, types and errors."""
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    texts = [evil, "\u202egnitupmoc", "a\u0000b", "👩‍👩‍👧‍👦 familiar", "x" * 1_000_000]
    lines = [json.dumps({"sku": at + 1, "text": text}) for at, text in enumerate(texts)]
    spec = {"processor": "price", "jobType": evil[:60]}
    name = start_job(server, "\n".join(lines).encode(), spec, filename=f"{evil.replace('/', '')}.jsonl")
    until_state(server, name, "DONE")
    page = watched.page
    page.goto(f"{server.url}/console/")
    expect(page.locator(f'a[href="#/work/{name}"]')).to_contain_text("<img src=x")
    open_work(page, server, name)
    expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x onerror=")
    expect(row(page, 1)).to_contain_text("<img src=x onerror=")
    expect(row(page, 2)).to_contain_text("[RLO]gnitupmoc")
    expect(row(page, 3)).to_contain_text("a␀b")
    expect(row(page, 4)).to_contain_text("👩‍👩‍👧‍👦 familiar")
    row(page, 5).click()
    drawer = page.get_by_role("complementary", name="Row 5")
    expect(drawer.get_by_role("button", name=re.compile("Show all"))).to_be_visible()
    assert len(page.locator(".grid").inner_text()) < 10_000, "a large cell is not sent to the grid"
    for number in range(1, 4):
        page.keyboard.press("k")
        expect(page.get_by_role("complementary", name=f"Row {5 - number}")).to_contain_text("text")
    expect(page).not_to_have_title("owned")
    assert page.locator("img[src=x], .grid b, h1 img").count() == 0


def test_rows_change_while_they_are_looked_at(page: Page, server: ServerProcess) -> None:
    with server.frozen_workers():
        name = start_job(server, table(30), PRICE, filename="moving.csv")
        open_work(page, server, name)
        expect(row(page, 1)).to_contain_text(re.compile("Pending|Claimed"))
    expect(row(page, 1)).to_contain_text("Done")
    expect(row(page, 10)).to_contain_text("Not found")
    expect(page.locator("[data-figure=settled]")).to_have_text("30")


def test_a_filtered_list_goes_on_from_where_it_stops(page: Page, server: ServerProcess, done: str) -> None:
    """A list is kept up to 5,000 rows; what follows is another list, from the next row on."""
    (item,) = server.ask("GET", f"/api/jobs/{done}/items?pageSize=1&statuses=DONE").json["items"]

    def answer(route: Route) -> None:
        start = int(parse_qs(urlsplit(route.request.url).query)["from"][0])
        stop = min(start + 2_500, 5_011)
        items = [{**item, "row": row} for row in range(start, stop)]
        route.fulfill(json={"items": items, "next": str(stop) if stop < 5_011 else None})

    page.route("**/items?*statuses=DONE*", answer)
    open_work(page, server, done, "?status=DONE")
    expect(page.get_by_text("2,500 shown, more below")).to_be_visible()
    page.get_by_role("grid").focus()
    page.keyboard.press("End")
    page.get_by_role("button", name="Go on from row 5,001").click()
    expect(page).to_have_url(re.compile("from=5001"))
    expect(page.get_by_text("10 shown from row 5,001 on")).to_be_visible()
    expect(page.get_by_role("grid").get_by_role("row").nth(1)).to_contain_text("5,001")
    expect(page.get_by_role("button", name="Go on from row")).to_have_count(0)


def test_keys_act_on_rows_that_are_shown_alone(page: Page, server: ServerProcess, done: str) -> None:
    """The row that was active in one list is not in the next."""
    open_work(page, server, done)
    expect(row(page, 1)).to_be_visible()
    for _ in range(20):
        page.keyboard.press("j")
    expect(active(page)).to_have_attribute("id", "grid-row-19")
    page.get_by_label("Status").select_option("ERROR")
    expect(page.get_by_text("12 shown")).to_be_visible()
    page.get_by_role("grid").focus()
    page.keyboard.press("x")
    page.keyboard.press("Enter")
    page.keyboard.press("j")
    expect(active(page)).to_have_attribute("id", "grid-row-0")
    expect(page.get_by_role("complementary")).to_have_count(0)
    expect(page.locator(".rows-tools")).not_to_contain_text("selected")
    page.keyboard.press("x")
    expect(page.locator(".rows-tools")).to_contain_text("1 row selected")


def test_shift_selects_with_letters_as_with_arrows(page: Page, server: ServerProcess, done: str) -> None:
    open_work(page, server, done)
    expect(row(page, 1)).to_be_visible()
    for key in ("j", "j", "x", "Shift+KeyJ", "Shift+KeyJ"):
        page.keyboard.press(key)
    expect(page.locator(".rows-tools")).to_contain_text("3 rows selected")
    page.keyboard.press("Escape")
    expect(page.locator(".rows-tools")).not_to_contain_text("selected")
    page.keyboard.press("x")
    page.keyboard.press("Shift+KeyK")
    expect(page.locator(".rows-tools")).to_contain_text("2 rows selected")


def test_slash_searches_a_batch_and_jumps_in_a_job(page: Page, server: ServerProcess, done: str) -> None:
    batch = start_requests(server, 3, "searched")
    open_work(page, server, batch)
    page.keyboard.press("/")
    expect(page.get_by_placeholder("Find a custom id")).to_be_focused()
    open_work(page, server, done)
    expect(row(page, 1)).to_contain_text("Chair 1")
    page.keyboard.press("/")
    expect(page.get_by_placeholder("Jump to row")).to_be_focused()


def test_selected_rows_of_a_batch_are_run_again_where_they_can(
    page: Page, server: ServerProcess, upstream: MockProcess
) -> None:
    """Of a batch, failures are run again; what has not failed is left out and told of."""
    upstream.set(error_rate=1)
    try:
        name = start_requests(server, 4, "selected")
        wait_until(lambda: work_of(server, name)["state"] == "DONE", 30)
    finally:
        upstream.set(error_rate=0)
    retried = server.ask("POST", f"/v1/batches/{name}/retry", {"custom_ids": ["r0"]})
    assert retried.status == 200, retried.content
    wait_until(lambda: work_of(server, name)["counts"]["done"] == 1, 30)
    open_work(page, server, name)
    again = page.locator(".rows-tools").get_by_role("button", name="Run again")
    expect(row(page, 1)).to_contain_text("Done")
    row(page, 1).locator(".grid-check").click()
    again.click()
    expect(page.get_by_text("None of the selected rows can be run again.")).to_be_visible()
    row(page, 3).locator(".grid-check").click(modifiers=["Shift"])
    expect(page.locator(".rows-tools")).to_contain_text("3 rows selected")
    again.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Run 2 of 3 selected rows again?")
    dialog.get_by_role("button", name="Run again").click()
    for number in (2, 3):
        expect(row(page, number)).to_contain_text("Done")
    assert work_of(server, name)["counts"] | {"done": 3, "failed": 1} == work_of(server, name)["counts"]


def test_selected_rows_of_a_job_that_wait_are_left_out(page: Page, server: ServerProcess) -> None:
    name = start_job(server, table(4), PRICE, filename="waiting.csv")
    until_state(server, name, "DONE")
    (first, *_) = server.ask("GET", f"/api/jobs/{name}/items").json["items"]
    with server.frozen_workers():
        wish = {"scope": "items", "itemIds": [first["id"]], "statuses": ["DONE"]}
        assert server.ask("POST", f"/api/jobs/{name}/reprocess", wish).status == 202
        open_work(page, server, name)
        expect(row(page, 1)).to_contain_text("Pending")
        row(page, 1).locator(".grid-check").click()
        row(page, 3).locator(".grid-check").click(modifiers=["Shift"])
        page.locator(".rows-tools").get_by_role("button", name="Run again").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Run 2 of 3 selected rows again?")
        dialog.get_by_role("button", name="Run again").click()
        expect(page.get_by_text("2 rows put back to run again.")).to_be_visible()
    until_state(server, name, "DONE")


def test_a_large_selection_is_run_again_with_few_requests(page: Page, server: ServerProcess) -> None:
    """What is known of rows is not asked for, and the rest by the thousand: an owner's requests are counted."""
    rows = 1_200
    name = start_job(server, table(rows), PRICE, filename="large.csv")
    until_state(server, name, "DONE")
    asked: list[str] = []

    def ask_again(what: str) -> None:
        asked.clear()
        page.locator(".rows-tools").get_by_role("button", name="Run again").click()
        expect(page.get_by_role("dialog")).to_contain_text(f"Run {what} again?")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)

    # What the grid reads for itself has longer cells.
    own = re.compile(r"/items\?.*cellBytes=16$")
    page.on("request", lambda request: asked.append(request.url) if own.search(request.url) else None)
    open_work(page, server, name)
    row(page, 1).locator(".grid-check").click()
    page.get_by_role("grid").press("Shift+End")
    expect(row(page, rows)).to_be_visible()
    ask_again("1,200 selected rows")
    assert len(asked) <= 2, asked

    page.get_by_label("Status").select_option("ERROR")
    expect(page.get_by_text("60 shown, more below")).to_be_visible()
    page.get_by_role("grid").get_by_role("row").nth(1).locator(".grid-check").click()
    for _ in range(2):  # to the end of what is listed, and of all
        page.get_by_role("grid").press("Shift+End")
        expect(page.get_by_text("120 shown")).to_be_visible()
    expect(page.get_by_text("120 shown", exact=True)).to_be_visible()  # and no more below
    expect(page.locator(".rows-tools")).to_contain_text("120 rows selected")
    expect(page.locator(".grid-row[aria-busy]")).to_have_count(0)
    expect(page.locator(".live")).to_have_text("Live")
    ask_again("120 selected rows")
    assert asked == []

    (failed, *_) = server.ask("GET", f"/api/jobs/{name}/items?pageSize=1&statuses=ERROR").json["items"]
    wish = {"scope": "items", "itemIds": [failed["id"]], "statuses": ["ERROR"], "resetAttempts": True}
    with page.expect_response(re.compile("/items")):  # what is in view is read again, the rest is not
        assert server.ask("POST", f"/api/jobs/{name}/reprocess", wish).status == 202
    until_state(server, name, "DONE")
    ask_again("120 selected rows")
    assert len(asked) <= 3, asked


def test_rows_of_a_message_batch_are_not_run_again(page: Page, server: ServerProcess) -> None:
    params = {"model": "small", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    requests = [{"custom_id": f"m{number}", "params": params} for number in range(3)]
    made = server.ask("POST", "/v1/messages/batches", {"requests": requests})
    assert made.status == 200, made.content
    open_work(page, server, made.json["id"])
    expect(row(page, 3)).to_be_visible()
    row(page, 1).locator(".grid-check").click()
    expect(page.locator(".rows-tools")).to_contain_text("1 row selected")
    expect(page.get_by_role("button", name="Run again")).to_have_count(0)


def test_values_within_values_are_shown(page: Page, server: ServerProcess) -> None:
    line = {"sku": 1, "note": {"text": "oak", "lang": "en"}, "number": 12345678901234567890}
    name = start_job(server, json.dumps(line).encode(), PRICE, filename="nested.jsonl")
    until_state(server, name, "DONE")  # before its row is stored there is none to open
    open_work(page, server, name, "?row=1")
    drawer = page.get_by_role("complementary", name="Row 1")
    expect(drawer).to_contain_text('"lang": "en"')
    expect(drawer).to_contain_text("12345678901234567890")
    expect(drawer).not_to_contain_text("[object Object]")
