"""`penstock jobs` and a job's `penstock export`, whole: the real program, a real `penstock serve`, a mock upstream."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import openpyxl
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.cli import Finished, finish, interrupt, run_cli, start_cli
from tests.support.jobs import job_of, jobs_server, table
from tests.support.mock_process import MockProcess, start_mock_process
from tests.support.prepared import Prepared
from tests.support.server import ServerProcess
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def mock() -> Iterator[MockProcess]:
    with start_mock_process() as process:
        yield process


@pytest.fixture(scope="module")
def database(server_18: str) -> Iterator[str]:
    """One database for the module: its jobs do not disturb each other."""
    with psycopg.connect(server_18, autocommit=True) as connection:
        connection.execute("CREATE DATABASE jobs_cli TEMPLATE template_penstock")
        yield make_conninfo(server_18, dbname="jobs_cli")
        connection.execute("DROP DATABASE jobs_cli WITH (FORCE)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, database: str, mock: MockProcess) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("serve")
    with jobs_server(directory, "--base-url", mock.base_url, database=database) as running:
        yield running


class Desk:
    """A directory with a table, and the commands as one types them there."""

    def __init__(self, directory: Path, *where: str) -> None:
        self.directory = directory
        self._where = where

    def __call__(self, *args: str | Path) -> Finished:
        return run_cli(*args, *self._where, cwd=self.directory)

    def submit(self, *args: str | Path) -> str:
        """The id of a new job."""
        return self("jobs", "submit", *args).expect(0).stdout.strip()


@pytest.fixture
def desk(tmp_path: Path, server: ServerProcess) -> Desk:
    (tmp_path / "rows.csv").write_bytes(table(40))
    return Desk(tmp_path, "--server", server.url)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_table_goes_through_and_comes_back(desk: Desk) -> None:
    submitted = desk("jobs", "submit", "rows.csv", "--processor", "price", "--type", "prices").expect(0)
    name = submitted.stdout.strip()
    assert name.startswith("job_")
    assert f"penstock jobs watch {name}" in submitted.stderr
    assert f"penstock export {name} -o sheet.xlsx" in submitted.stderr
    watched = desk("jobs", "watch", name[-8:]).expect(3)
    assert "DONE after" in watched.stdout
    assert "40 rows, 32 done, 4 failed, 4 not found" in watched.stdout

    shown = desk("jobs", "show", name).expect(0).stdout
    for words in (f"{name}  DONE", "type       prices", "file       rows.csv", "row 5: sold out", "sku, product_title"):
        assert words in shown, shown
    listed = next(line for line in desk("jobs", "ls").expect(0).stdout.splitlines() if line.startswith(name))
    assert listed.split()[1:5] == ["DONE", "40/40", "8", "failed"]
    assert listed.endswith("prices  rows.csv")

    for output in ("sheet.csv", "sheet.jsonl.gz", "sheet.xlsx"):
        exported = desk("export", name, "-o", output).expect(0).stdout
        assert exported.startswith(f"  sheet  {output}  (40 rows, 32 done")
    rows = rows_of((desk.directory / "sheet.csv").read_text("utf-8"))
    assert [row["sku"] for row in rows] == [str(number) for number in range(1, 41)]
    assert rows_of(desk("export", name[-8:], "-o", "-").expect(0).stdout) == rows
    desk("export", name, "-o", "marked.csv", "--bom").expect(0)
    marked = (desk.directory / "marked.csv").read_bytes()
    assert marked == b"\xef\xbb\xbf" + (desk.directory / "sheet.csv").read_bytes()
    lines = gzip.decompress((desk.directory / "sheet.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line)["status"] for line in lines] == [row["status"] for row in rows]
    sheet = openpyxl.load_workbook(desk.directory / "sheet.xlsx").worksheets[0]
    assert [row[0] for row in sheet.iter_rows(min_row=2, values_only=True)] == list(range(1, 41))


def test_failures_run_again(desk: Desk, server: ServerProcess) -> None:
    name = desk.submit("rows.csv", "--processor", "price")
    desk("jobs", "watch", name).expect(3)
    again = desk("jobs", "retry", name, "--status", "error").expect(0)
    assert again.stdout.startswith(f"{name}  op_")
    operation = again.stdout.split()[1]
    path = f"/api/jobs/{name}/operations/{operation}"
    wait_until(lambda: server.ask("GET", path).json["state"] == "DONE", 30)
    assert server.ask("GET", path).json["requeued"] == 4
    assert "4 failed, 4 not found" in desk("jobs", "watch", name).expect(3).stdout


def test_rows_are_shown_page_by_page(desk: Desk) -> None:
    name = json.loads(desk("jobs", "submit", "rows.csv", "--processor", "price", "--wait", "--json").expect(3).stdout)
    first = desk("jobs", "items", name["id"]).expect(0)
    row = " ".join(first.stdout.splitlines()[1].split())
    assert row == "1 DONE 1 sku=1 product_title=Chair 1 note==1+1 -> price=2 currency=EUR"
    assert len(first.stdout.splitlines()) == 21
    assert "--from 21" in first.stderr
    failed = desk("jobs", "items", name["id"], "--status", "error,not_found", "--all").expect(0)
    assert "sold out" in failed.stdout
    assert [line.split()[0] for line in failed.stdout.splitlines()[1:]] == [
        "5",
        "10",
        "15",
        "20",
        "25",
        "30",
        "35",
        "40",
    ]
    lines = desk("jobs", "items", name["id"], "--json", "--all").expect(0).stdout.splitlines()
    assert [json.loads(line)["row"] for line in lines] == list(range(1, 41))
    desk("jobs", "items", name["id"], "--status", "lost").refuses(2, "expected one or more of", "DONE")


def test_a_prompt_with_a_schema_in_one_command(desk: Desk) -> None:
    properties = {"category": {"type": "string"}, "b": {"type": "integer"}, "a": {"type": "integer"}}
    (desk.directory / "schema.json").write_text(json.dumps({"type": "object", "properties": properties}))
    ask = ("--model", "small", "--prompt", "Which category is {{ product_title }}?", "--schema", "schema.json")
    ended = desk("jobs", "submit", "rows.csv", *ask, "-o", "sheet.csv", "--json").expect(0)
    told = ended.summary
    assert told["state"] == "DONE"
    assert told["results"] == {"job": told["id"], "complete": True, "output": "sheet.csv"}
    rows = rows_of((desk.directory / "sheet.csv").read_text("utf-8"))
    assert list(rows[0])[3:6] == ["category", "b", "a"]
    assert all("Which category is Chair" in row["category"] for row in rows)


def test_a_spec_says_all(desk: Desk) -> None:
    (desk.directory / "spec.json").write_text('{"processor": "price", "columns": {"keep": ["sku"]}, "jobType": "old"}')
    told = desk("jobs", "submit", "rows.csv", "--spec", "spec.json", "--type", "new", "--wait", "--json").expect(3)
    assert (told.summary["jobType"], told.summary["columns"]) == ("new", ["sku"])


def test_pause_resume_cancel_rm(desk: Desk, server: ServerProcess) -> None:
    (desk.directory / "many.csv").write_bytes(table(5_000))
    with server.frozen_workers():
        name = desk.submit("many.csv", "--processor", "price")
        paused = desk("jobs", "pause", name).expect(0)
        assert f"{name}  PAUSED" in paused.stdout
        assert f"penstock jobs resume {name}" in paused.stderr
        assert "PAUSED" in desk("jobs", "watch", name).expect(4).stdout
        assert desk("jobs", "resume", name, "--json").expect(0).summary["state"] in ("INGESTING", "QUEUED", "RUNNING")
        so_far = desk("export", name, "-o", "part.csv").expect(0)
        assert "so far" in so_far.stderr
        assert "CANCELLED" in desk("jobs", "cancel", name).expect(0).stdout
    desk("jobs", "watch", name).expect(3)
    desk("jobs", "resume", name).refuses(1, "Cannot resume a job that is CANCELLED", "penstock jobs show")
    assert desk("jobs", "rm", name).expect(0).stdout == f"{name}  deleted\n"
    for command in (("jobs", "show", name), ("export", name, "-o", "gone.csv")):
        desk(*command).refuses(1, "No such", name, "penstock jobs ls")


def test_watching_ends_with_an_interrupt_and_the_job_goes_on(desk: Desk, server: ServerProcess) -> None:
    with server.frozen_workers():
        name = desk.submit("rows.csv", "--processor", "price")
        with start_cli("jobs", "watch", name, "--json", "--server", server.url, cwd=desk.directory) as watching:
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["id"] == name
            interrupt(watching)
            finish(watching).expect(130)
    wait_until(lambda: job_of(server, name)["state"] == "DONE", 60)
    changes = desk("jobs", "watch", name, "--json").expect(3).stdout.splitlines()
    assert json.loads(changes[-1])["exit_code"] == 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("jobs", "submit", "rows.csv"), "what is to be done with each row?"),
        (("jobs", "submit", "rows.csv", "--processor", "price", "--prompt", "x", "--model", "m"), "Give one of"),
        (("jobs", "submit", "rows.csv", "--processor", "lost"), "there is no processor 'lost'; there are: price"),
        (("jobs", "submit", "rows.csv", "--processor", "price", "--provider", "x"), "--provider without --prompt"),
        (("jobs", "submit", "rows.csv", "--prompt", "x", "--model", "m", "--provider", "lost"), "no provider 'lost'"),
        (("jobs", "submit", "rows.csv", "--prompt", "{{ a ", "--model", "m"), "processor.prompt"),
        (
            ("jobs", "submit", "rows.csv", "--prompt", "{{ tile }}", "--model", "m"),
            "row 1: prompt: line 1: there is no",
        ),
        (("jobs", "submit", "rows.csv", "--spec", "rows.csv"), "--spec rows.csv: not JSON"),
        (("jobs", "submit", "lost.csv", "--processor", "price"), "lost.csv: cannot be read: No such file"),
        (("jobs", "submit", ".", "--processor", "price"), "is a directory"),
        (("jobs", "submit", "ragged.csv", "--processor", "price"), "row 2"),
        (("jobs", "submit", "rows.csv", "--processor", "price", "-o", "sheet.txt"), "names no format of sheets"),
        (("jobs", "submit", "rows.csv", "--processor", "price", "-o", "rows.csv"), "overwrite the input"),
        (("jobs", "show", "nothing"), "'nothing' is not a job id"),
        (("jobs", "show", "job_abc"), "no job has an id like 'job_abc'"),
        (("export", "job_abc", "-o", "sheet.csv"), "no job has an id like 'job_abc'"),
    ],
)
def test_what_does_not_fit_is_said(desk: Desk, command: tuple[str, ...], words: str) -> None:
    (desk.directory / "ragged.csv").write_text("a,b\n1,2\n3\n")
    desk(*command).refuses(2, words)


def test_with_no_server_the_data_is_worked_on_and_nothing_is_worked_off(tmp_path: Path, prepared: Prepared) -> None:
    data = prepared(tmp_path / ".penstock")
    (data / "penstock.toml").write_text('[[processors]]\nname = "price"\nfunction = "prices:price"\n')
    (tmp_path / "rows.csv").write_bytes(table(3))
    desk = Desk(tmp_path)
    desk("jobs", "submit", "rows.csv", "--processor", "price", "--wait").refuses(2, "no server runs on this data")
    submitted = desk("jobs", "submit", "rows.csv", "--processor", "price").expect(0)
    assert "Nothing works it off until a server runs" in submitted.stderr
    name = submitted.stdout.strip()
    assert "penstock serve" in desk("jobs", "show", name).expect(0).stderr
    assert name in desk("jobs", "ls").expect(0).stdout
    desk("jobs", "rm", name).expect(0)
