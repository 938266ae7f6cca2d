"""A new job in the console: a file dropped, its rows looked at, what is done with each, a trial, the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from openpyxl import Workbook
from playwright.sync_api import Page, Route, expect

from tests.support.batch_api import jsonl
from tests.support.browser import WatchedPage, serious_issues
from tests.support.server import ServerProcess

ROWS = ["SKU;Product Title;Note", *(f"{number};Chair {number};" for number in range(1, 26)), ""]
DROP = """(zone, content) => {
  const data = new DataTransfer();
  data.items.add(new File([content], "chairs.csv", {type: "text/csv"}));
  const untaken = ["dragover", "drop"].map((type) =>
    zone.dispatchEvent(new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true})));
  return untaken.some((each) => each);
}"""
"""Answers whether the browser would have opened the file."""


def choose(page: Page, name: str, content: bytes) -> None:
    page.get_by_label("File", exact=True).set_input_files({"name": name, "mimeType": "", "buffer": content})


def test_a_prompt_over_a_dropped_table(show: Callable[[str], Page], server: ServerProcess) -> None:
    page = show("/new")
    expect(page.get_by_text("Drop a file here")).to_be_visible()
    assert serious_issues(page) == []
    page.locator(".drop").evaluate(DROP, "\n".join(ROWS))
    rows = page.get_by_role("region", name="First rows")
    expect(rows.get_by_role("row")).to_have_count(11)
    expect(rows).to_contain_text("Chair 10")
    rows.get_by_label("Name of product_title").fill("Title")
    rows.get_by_label("Name of product_title").blur()
    rows.get_by_label("Keep note").click()
    rows.get_by_label("Type of sku").select_option("text")
    page.get_by_label("Model").fill("small")
    page.get_by_label("Prompt", exact=True).fill("What is ")
    page.get_by_role("group", name="Insert a column").get_by_role("button", name="title", exact=True).click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("What is {{ title }}")
    request = page.get_by_label("First request")
    expect(request).to_contain_text("POST /v1/chat/completions")
    expect(request).to_contain_text('"What is Chair 1"')
    assert serious_issues(page) == []

    page.get_by_role("button", name="Try 10 rows").click()
    trial = page.locator("[data-trial=DONE]")
    expect(trial.get_by_role("row")).to_have_count(11)
    expect(trial).to_contain_text("echo: What is Chair 10")
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_role("heading", name="chairs.csv")).to_be_visible()
    expect(page.locator("main")).to_contain_text("25 of 25 rows")
    job = page.url.rsplit("/", 1)[1]
    item = server.ask("GET", f"/api/jobs/{job}/items?from=25&pageSize=1").json["items"][0]
    assert item["input"] == {"sku": "25", "title": "Chair 25"}
    assert item["result"]["answer"].startswith("echo: What is Chair 25")


def test_what_is_wrong_is_said_before_anything_is_sent(show: Callable[[str], Page]) -> None:
    page = show("/new")
    choose(page, "chairs.csv", "\n".join(ROWS).encode())
    page.get_by_label("Model").fill("small")
    page.get_by_label("Prompt", exact=True).fill("{{ colour }}")
    expect(page.get_by_label("First request")).to_contain_text("colour")
    expect(page.get_by_role("button", name="Start the job")).to_be_disabled()
    page.get_by_role("button", name="Definition").click()
    page.get_by_label("Definition", exact=True).fill("{")
    expect(page.get_by_text("The definition is no JSON")).to_be_visible()
    choose(page, "broken.csv", b"a,b\n1,2,3\n")
    expect(page.get_by_label("Rows", exact=True).get_by_role("alert").first).to_be_visible()


def test_a_processor_over_a_sheet_of_a_workbook(
    show: Callable[[str], Page], server: ServerProcess, tmp_path: Path
) -> None:
    book = Workbook()
    book.active.title = "Notes"  # type: ignore[union-attr]
    book.active.append(["text"])  # type: ignore[union-attr]
    sheet = book.create_sheet("Articles")
    for row in (["sku"], [1], [2], [3]):
        sheet.append(row)
    book.save(tmp_path / "shop.xlsx")
    page = show("/new")
    choose(page, "shop.xlsx", (tmp_path / "shop.xlsx").read_bytes())
    page.get_by_label("Sheet").select_option("Articles")
    expect(page.get_by_role("region", name="First rows").get_by_role("row")).to_have_count(4)
    page.get_by_role("button", name="Processor").click()
    page.get_by_role("button", name="Start the job").click()
    expect(page.locator("main")).to_contain_text("3 of 3 rows")
    job = page.url.rsplit("/", 1)[1]
    items = server.ask("GET", f"/api/jobs/{job}/items?from=1").json["items"]
    assert [item["result"]["price"] for item in items] == [2, 4, 6]


def test_requests_are_run_as_they_are(show: Callable[[str], Page], server: ServerProcess) -> None:
    page = show("/new")
    choose(page, "evals.jsonl", jsonl(5))
    expect(page.get_by_role("heading", name="These are requests")).to_be_visible()
    page.get_by_role("button", name="Run the batch").click()
    expect(page.locator("main")).to_contain_text("5 of 5")
    batch = page.url.rsplit("/", 1)[1]
    assert server.ask("GET", f"/v1/batches/{batch}").json["status"] == "completed"


def test_a_refused_upload_is_explained(show: Callable[[str], Page], watched: WatchedPage) -> None:
    watched.allow("status of 4")
    page = show("/new")
    choose(page, "chairs.csv", "\n".join(ROWS).encode())
    page.get_by_role("button", name="Processor").click()
    page.get_by_text("More: type, limits, priority").click()
    page.get_by_label("Priority").fill("999")
    page.get_by_role("button", name="Start the job").click()
    expect(page.get_by_label("Run", exact=True).get_by_role("alert")).to_contain_text("priority")


def test_a_file_that_is_dropped_beside_the_zone_is_taken(show: Callable[[str], Page]) -> None:
    page = show("/new")
    assert page.get_by_role("heading", name="New job").evaluate(DROP, "\n".join(ROWS)) is False
    expect(page.get_by_text("chairs.csv")).to_be_visible()
    expect(page.get_by_role("region", name="First rows")).to_contain_text("Chair 10")
    prompt = page.get_by_label("Prompt", exact=True)
    prompt.fill("What is it?")
    assert prompt.evaluate(DROP, "a\n1\n") is False
    expect(page.get_by_role("region", name="First rows").get_by_role("row")).to_have_count(2)
    expect(prompt).to_have_value("What is it?")


def test_a_provider_comes_with_its_own_models(show: Callable[[str], Page], page: Page) -> None:
    def with_providers(route: Route) -> None:
        told = route.fetch().json()
        told["providers"] = [
            {"name": "first", "models": ["small", "large"]},
            {"name": "second", "models": ["mini", "nano"]},
            {"name": "third", "models": ["*"]},
        ]
        route.fulfill(json=told)

    page.route("**/api/me", with_providers)
    show("/new")
    choose(page, "chairs.csv", "\n".join(ROWS).encode())
    model = page.get_by_label("Model")
    expect(model).to_have_value("small")
    model.select_option("large")
    page.get_by_label("Provider").select_option("second")
    expect(model).to_have_value("mini")
    page.get_by_label("Provider").select_option("third")
    expect(model).to_have_value("")


def sent_bytes(page: Page) -> int:
    """What a trial of ten rows uploads; returns when it is done."""
    with page.expect_request(lambda request: request.url.endswith("/api/jobs")) as asked:
        page.get_by_role("button", name="Try 10 rows").click()
    expect(page.locator("[data-trial=DONE]").get_by_role("row")).to_have_count(11)
    return int(asked.value.all_headers()["content-length"])


def test_a_trial_uploads_the_beginning_of_a_table(show: Callable[[str], Page], server: ServerProcess) -> None:
    page = show("/new")
    lines = [f'{number},"Chair\n{number}, ""oak"""' for number in range(1, 30_001)]
    content = "\n".join(["sku,title", *lines, ""]).encode()
    choose(page, "chairs.csv", content)
    page.get_by_role("button", name="Processor").click()
    assert sent_bytes(page) < 300_000 < len(content)
    job = page.get_by_role("link", name="Open").get_attribute("href")
    assert job is not None
    item = server.ask("GET", f"/api/jobs/{job.rsplit('/', 1)[1]}/items?from=10").json["items"][0]
    assert item["input"] == {"sku": 10, "title": 'Chair\n10, "oak"'}


def test_a_trial_of_long_rows_uploads_them_all(show: Callable[[str], Page]) -> None:
    page = show("/new")
    lines = [f"{number},{'x' * 60_000}" for number in range(1, 13)]
    content = "\n".join(["sku,title", *lines, ""]).encode()
    choose(page, "long.csv", content)
    page.get_by_role("button", name="Processor").click()
    assert sent_bytes(page) > len(content)


def test_what_stands_in_the_way_is_named_and_a_look_at_the_trial_keeps_what_was_written(
    show: Callable[[str], Page],
) -> None:
    page = show("/new")
    choose(page, "chairs.csv", "\n".join(ROWS).encode())
    page.get_by_label("Model").fill("small")
    prompt = page.get_by_label("Prompt", exact=True)
    run = page.get_by_label("Run", exact=True)
    expect(run).to_contain_text("A model and a prompt are needed first.")
    prompt.fill("What is {{ nothing }}?")
    expect(run).to_contain_text("Correct what is said above first.")
    prompt.fill("What is {{ sku }}?")
    run.get_by_role("button", name="Try 10 rows").click()
    with page.context.expect_page() as opened:
        run.get_by_role("link", name="Open").click()
    expect(opened.value.get_by_role("heading", level=1)).to_have_text("chairs.csv")
    opened.value.close()
    expect(prompt).to_have_value("What is {{ sku }}?")


def test_a_table_of_many_columns(show: Callable[[str], Page]) -> None:
    """All of them can be put into a prompt; the grid says how many it does not draw."""
    page = show("/new")
    names = ["sku", *(f"c{number}" for number in range(1, 60))]
    choose(page, "wide.csv", "\n".join([",".join(names), ",".join("1" * 60), ""]).encode())
    expect(page.get_by_role("group", name="Insert a column").get_by_role("button")).to_have_text(names)
    page.get_by_role("button", name="Processor").click()
    page.get_by_role("button", name="Start the job").click()
    heads = page.get_by_role("grid").get_by_role("columnheader")
    expect(heads.filter(has_text="+ 20 more")).to_have_count(1)
    expect(heads.filter(has_text="price")).to_have_count(1)
