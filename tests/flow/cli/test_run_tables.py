"""`penstock run` over tables: rows in, a sheet of all of them out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import openpyxl
import pytest

from tests.support.cli import Finished, call_count, opened, run_cli, start_cli
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.prepared import Prepared
from tests.support.wait import wait_until

FUNCTION = """
import penstock

def price(item):
    sku = item.body["sku"]
    if sku % 10 == 0:
        raise penstock.NotFound("no such article")
    if sku % 10 == 5:
        raise penstock.Fail("sold out", code="sold_out")
    if sku % 10 == 7:
        raise penstock.Skip("not for sale")
    return {"price": sku * 2, "currency": "EUR"}
"""
QUICK = ("--set", "retry_base_s=0.001")


@pytest.fixture
def site(tmp_path: Path, prepared: Prepared) -> Path:
    """A directory with a database and a module `prices`."""
    prepared(tmp_path / ".penstock")
    (tmp_path / "prices.py").write_text(FUNCTION)
    return tmp_path


@pytest.fixture
def mock() -> Iterator[MockProcess]:
    with start_mock_process() as upstream:
        yield upstream


def write_table(path: Path, rows: int) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["SKU", "Product Title", "Note"])
        for number in range(1, rows + 1):
            writer.writerow([number, f"  Chair {number} ", "=1+1" if number == 1 else ""])
    return path


def read_sheet(path: Path) -> list[list[object]]:
    sheet = openpyxl.load_workbook(path).worksheets[0]
    assert all(cell.data_type != "f" for row in sheet.iter_rows() for cell in row)
    return [list(row) for row in sheet.iter_rows(values_only=True)]


def test_a_function_for_each_row(site: Path) -> None:
    write_table(site / "rows.csv", 40)
    ended = run_cli("run", "rows.csv", "--processor", "prices:price", "-o", "out.xlsx", "--json", *QUICK, cwd=site)
    figures = ended.expect(3).summary
    assert [figures[name] for name in ("total", "completed", "failed", "not_found", "skipped")] == [40, 28, 4, 4, 4]
    header, *rows = read_sheet(site / "out.xlsx")
    assert header == ["sku", "product_title", "note", "price", "currency", "status", "attempts", "error"]
    assert [row[0] for row in rows] == list(range(1, 41))
    assert rows[0] == [1, "Chair 1", "=1+1", 2, "EUR", "DONE", 1, None]
    assert rows[4] == [5, "Chair 5", None, None, None, "ERROR", 1, "sold out"]
    assert rows[6] == [7, "Chair 7", None, None, None, "SKIPPED", 1, "not for sale"]
    assert rows[9] == [10, "Chair 10", None, None, None, "NOT_FOUND", 2, "no such article"]


def test_the_same_command_writes_every_format(site: Path) -> None:
    write_table(site / "rows.csv", 9)
    for name in ("out.csv", "out.jsonl.gz", "out.jsonl"):
        run_cli("run", "rows.csv", "--processor", "prices:price", "-o", name, *QUICK, cwd=site).expect(3)
    plain = (site / "out.csv").read_bytes()
    run_cli("run", "rows.csv", "--processor", "prices:price", "-o", "out.csv", "--bom", *QUICK, cwd=site).expect(3)
    assert (site / "out.csv").read_bytes() == b"\xef\xbb\xbf" + plain
    with opened(site / ".penstock") as connection:
        assert connection.execute("SELECT count(*) FROM penstock.batches").fetchone() == (1,)
    cells = list(csv.reader(io.StringIO(plain.decode(), newline="")))
    assert cells[1] == ["1", "Chair 1", "'=1+1", "2", "EUR", "DONE", "1", ""]
    lines = [json.loads(line) for line in (site / "out.jsonl").read_text("utf-8").splitlines()]
    assert lines[0]["note"] == "=1+1"
    assert [list(line) for line in lines] == [cells[0]] * 9


def test_a_prompt_for_each_row(site: Path, mock: MockProcess) -> None:
    write_table(site / "rows.csv", 12)
    ask = ("--base-url", mock.base_url, "--model", "small", "--prompt", "Which category is {{ product_title }}?")
    run_cli("run", "rows.csv", *ask, "--limit", "5", "-o", "out.csv", cwd=site).expect(0)
    assert call_count(mock) == 5
    with (site / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["sku"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert all("Which category is Chair" in row["answer"] for row in rows)


def test_no_row_is_called_twice(site: Path, mock: MockProcess) -> None:
    """Neither for a trial over the first rows, nor in a table that grew or was saved again."""
    book = openpyxl.Workbook()

    def save(*titles: str) -> None:
        for title in titles:
            book.worksheets[0].append([title])
        book.save(site / "rows.xlsx")

    def run(*options: str, code: int = 0) -> Finished:
        ask = ("--base-url", mock.base_url, "--model", "small", "--prompt", "Which category is {{ title }}?")
        return run_cli("run", "rows.xlsx", *ask, "-o", "out.csv", *options, cwd=site).expect(code)

    def titles() -> list[str]:
        with (site / "out.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert all(f"Which category is {row['title']}?" in row["answer"] for row in rows)
        return [row["title"] for row in rows]

    save("title", "lamp", "chair", "table", "sofa")
    run("--limit", "1")
    assert "has the first 1 row of it" in run("--limit", "2").stderr
    assert call_count(mock) == 2
    assert "4 rows, 4 completed" in run().stdout
    assert titles() == ["lamp", "chair", "table", "sofa"]
    assert call_count(mock) == 4
    save()  # other bytes, the same rows
    assert "writing its results again" in run().stderr
    save("desk")
    assert "which has 4 of its first 4 results" in run(code=2).stderr
    assert "5 rows, 5 completed" in run("--continue").stdout
    assert titles() == ["lamp", "chair", "table", "sofa", "desk"]
    run()
    assert call_count(mock) == 5
    jobs = run_cli("ls", "--json", cwd=site).expect(0).summary["jobs"]
    assert [job["jobType"] for job in jobs] == ["rows from row 5", "rows from row 3", "rows from row 2", "rows"]
    run("--new", "--limit", "1")
    assert call_count(mock) == 6


def test_a_dry_run_shows_the_first_request_and_sends_nothing(site: Path, mock: MockProcess) -> None:
    write_table(site / "rows.csv", 2)
    ask = ("--base-url", mock.base_url, "--model", "small", "--prompt", "What is {{ product_title }}?", "--dry-run")
    shown = run_cli("run", "rows.csv", *ask, cwd=site).expect(0).stdout
    path, _, body = shown.partition("\n")
    assert path == "POST /v1/chat/completions"
    assert json.loads(body)["messages"] == [{"role": "user", "content": "What is Chair 1?"}]
    assert call_count(mock) == 0


def test_a_killed_run_goes_on(site: Path) -> None:
    with start_mock_process("--latency", "20ms") as slow:
        write_table(site / "rows.csv", 600)
        ask = ("--base-url", slow.base_url, "--model", "small", "--prompt", "{{ sku }}", "--concurrency", "8")
        command = ("run", "rows.csv", *ask, "-o", "out.csv")
        with start_cli(*command, cwd=site) as process:
            wait_until(lambda: call_count(slow) > 100, 60)
            process.kill()
        run_cli(*command, cwd=site).expect(0)
    with (site / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["sku"] for row in rows] == [str(number) for number in range(1, 601)]
    assert {row["status"] for row in rows} == {"DONE"}
    with opened(site / ".penstock") as connection:
        assert connection.execute("SELECT count(*) FROM penstock.outcomes").fetchone() == (600,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("rows.csv", "-o", "x.csv", "--base-url", "http://127.0.0.1:9/v1"), "what is to be done with each row"),
        (("rows.csv", "-o", "x.txt", "--processor", "prices:price"), "names no format of sheets"),
        (("rows.csv", "-o", "x.csv", "--processor", "prices:price", "--model", "m"), "--model without --prompt"),
        (("rows.csv", "-o", "x.csv", "--processor", "prices:price", "--prompt", "a", "--model", "m"), "--prompt with"),
        (("rows.csv", "--processor", "prices:price"), "-o is missing"),
        (("rows.jsonl", "-o", "x.jsonl", "--processor", "prices:price", "--limit", "3"), "is no table"),
        (
            ("rows.csv", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--prompt", "{{ tile }}", "--dry-run"),
            "there is no column 'tile'; the columns are sku, product_title, note",
        ),
        (
            ("rows.csv", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--prompt", "{{ sku ", "--dry-run"),
            "processor.prompt",
        ),
        (
            ("rows.csv", "--base-url", "http://127.0.0.1:9/v1", "--model", "m", "--prompt", "x", "--sheet", "2"),
            "rows.csv has no sheets",
        ),
        (("rows.csv", "-o", "x.csv", "--processor", "prices:price", "--delimiter", ";;"), "not one character"),
        (("rows.csv", "--processor", "prices:lost", "--dry-run"), "prices has no 'lost'"),
        (("lost.csv", "--processor", "prices:price", "--dry-run"), "lost.csv: cannot be read: No such file"),
        (("rows.jsonl", "-o", "x.xlsx", "--base-url", "http://127.0.0.1:9/v1"), "what is to be done with each row"),
    ],
)
def test_what_does_not_fit_is_said(
    tmp_path: Path, shared_database_18: str, options: tuple[str, ...], words: str
) -> None:
    (tmp_path / "prices.py").write_text(FUNCTION)
    write_table(tmp_path / "rows.csv", 3)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    run_cli("run", *options, "--database-url", shared_database_18, cwd=tmp_path).refuses(2, words)


def test_a_ragged_row_stores_nothing(site: Path) -> None:
    (site / "rows.csv").write_text("a,b\n1,2\n3\n")
    run_cli("run", "rows.csv", "--processor", "prices:price", "-o", "out.csv", cwd=site).refuses(2, "row 2")
    with opened(site / ".penstock") as connection:
        assert connection.execute("SELECT count(*) FROM penstock.files WHERE state = 'ready'").fetchone() == (0,)


def test_a_column_that_is_not_there_stores_nothing(site: Path, mock: MockProcess) -> None:
    write_table(site / "rows.csv", 3)
    ask = ("--base-url", mock.base_url, "--model", "small", "--prompt", "{{ titel }}", "-o", "out.csv")
    run_cli("run", "rows.csv", *ask, cwd=site).refuses(2, "rows.csv: row 1", "no column 'titel'", "product_title")
    assert call_count(mock) == 0
    assert not (site / "out.csv").exists()
    with opened(site / ".penstock") as connection:
        assert connection.execute("SELECT count(*) FROM penstock.files WHERE state = 'ready'").fetchone() == (0,)


def test_objects_of_json_lines_are_rows_where_a_sheet_is_asked_for(site: Path) -> None:
    (site / "rows.jsonl").write_text('{"SKU": 1}\n{"SKU": 2, "odd": [1]}\n')
    ended = run_cli("run", "rows.jsonl", "--processor", "prices:price", "-o", "out.csv", *QUICK, cwd=site).expect(0)
    assert "2 rows, 2 completed" in ended.stdout
    rows = (site / "out.csv").read_text("utf-8").splitlines()
    assert rows == ["sku,odd,price,currency,status,attempts,error", "1,,2,EUR,DONE,1,", "2,[1],4,EUR,DONE,1,"]
