"""Jobs over the API: rows in, results and a sheet out, also when processes die on the way."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openpyxl
import psycopg
import pytest

from tests.support.cli import ask, slow_down_rows
from tests.support.jobs import items_of, job_of, jobs_server, post_job, start_job, table, until_state
from tests.support.mock_process import start_mock_process
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

PRICE = {"processor": "price", "jobType": "prices"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    """For tests that look at their own job alone."""
    with jobs_server(tmp_path_factory.mktemp("jobs"), database=shared_database_18) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    with jobs_server(tmp_path, database=database_18) as running:
        yield running


@pytest.fixture
def idle(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    """A server that works nothing off."""
    with jobs_server(tmp_path, database=database_18, workers=0) as running:
        yield running


def export(server: ServerProcess, name: str, query: str) -> bytes:
    answer = server.ask("POST", f"/api/jobs/{name}/export?{query}")
    assert answer.status == 200, answer.content
    return answer.content


def test_from_a_table_to_a_sheet(server: ServerProcess) -> None:
    name = start_job(server, table(40), PRICE)
    job = until_state(server, name, "DONE")
    figures = [job[key] for key in ("total", "processed", "failed", "notFound", "skipped", "inFlight", "pending")]
    assert figures == [40, 40, 4, 4, 0, 0, 0]
    assert (job["jobType"], job["filename"], job["client"]) == ("prices", "rows.csv", "127.0.0.1")
    assert job["ingest"] == {"done": True, "rows": 40, "problem": None}
    assert job["columns"] == ["sku", "product_title", "note"]
    items = items_of(server, name, page_size=7)
    assert [item["row"] for item in items] == list(range(1, 41))
    assert items[0]["input"] == {"sku": 1, "product_title": "Chair 1", "note": "=1+1"}
    assert items[0]["result"] == {"price": 2, "currency": "EUR"}
    assert (items[4]["status"], items[4]["error"]) == ("ERROR", "sold out")
    assert (items[9]["status"], items[9]["attempts"]) == ("NOT_FOUND", 2)

    for status in ("DONE", "ERROR", "NOT_FOUND"):
        assert [item["row"] for item in items_of(server, name, 3, f"&statuses={status}")] == [
            item["row"] for item in items if item["status"] == status
        ]
    assert not items_of(server, name, 3, "&statuses=PENDING,PROCESSING,SKIPPED")

    sheet = export(server, name, "format=csv")
    assert export(server, name, "format=csv&bom=true") == b"\xef\xbb\xbf" + sheet
    rows = list(csv.DictReader(io.StringIO(sheet.decode())))
    for row, item in zip(rows, items, strict=True):
        assert (row["sku"], row["status"]) == (str(item["input"]["sku"]), item["status"])
        assert row["price"] == str((item["result"] or {}).get("price", ""))
    assert rows[0]["note"] == "'=1+1"
    book = openpyxl.load_workbook(io.BytesIO(export(server, name, "format=xlsx")))
    cells = [list(row) for row in book.worksheets[0].iter_rows(values_only=True)]
    assert cells[0] == ["sku", "product_title", "note", "price", "currency", "status", "attempts", "error"]
    assert cells[1] == [1, "Chair 1", "=1+1", 2, "EUR", "DONE", 1, None]
    lines = [json.loads(line) for line in export(server, name, "format=jsonl").splitlines()]
    assert [list(line.values()) for line in lines] == [list(row) for row in cells[1:]]


@pytest.mark.parametrize("kind", ["xlsx", "jsonl"])
def test_other_kinds_of_tables(server: ServerProcess, kind: str) -> None:
    if kind == "xlsx":
        book, file = openpyxl.Workbook(), io.BytesIO()
        book.worksheets[0].append(["SKU", "Bought"])
        book.worksheets[0].append([3, "2024-05-01"])
        book.save(file)
        content = file.getvalue()
    else:
        content = b'{"SKU": 3, "Bought": "2024-05-01"}\n'
    name = start_job(server, content, PRICE, filename=f"rows.{kind}")
    until_state(server, name, "DONE")
    (item,) = items_of(server, name)
    assert item["input"] == {"sku": 3, "bought": "2024-05-01"}
    assert item["result"]["price"] == 6


def test_a_prompt_for_each_row(tmp_path: Path, database_18: str) -> None:
    with (
        start_mock_process() as mock,
        jobs_server(tmp_path, "--base-url", mock.base_url, database=database_18) as server,
    ):
        prompt = {"type": "chat", "provider": "default", "model": "small", "prompt": "What is {{ product_title }}?"}
        name = start_job(server, table(5), {"processor": prompt})
        until_state(server, name, "DONE")
        answers = [item["result"]["answer"] for item in items_of(server, name)]
    assert all(f"What is Chair {number}?" in answer for number, answer in enumerate(answers, 1))


def test_pause_resume_cancel(idle: ServerProcess) -> None:
    name = start_job(idle, table(10), PRICE)
    until_state(idle, name, "QUEUED")
    for move, state in (("pause", "PAUSED"), ("pause", "PAUSED"), ("resume", "QUEUED"), ("cancel", "CANCELLED")):
        answer = idle.ask("POST", f"/api/jobs/{name}/{move}")
        assert (answer.status, answer.json["state"]) == (200, state), move
    assert idle.ask("POST", f"/api/jobs/{name}/resume").status == 409
    assert {item["status"] for item in items_of(idle, name)} == {"PENDING"}
    assert len(items_of(idle, name, 3, "&status=PENDING")) == 10
    assert idle.ask("GET", f"/api/jobs/{name}/items?statuses=SLEEPING").status == 400


def test_jobs_are_listed_newest_first(idle: ServerProcess) -> None:
    names = [start_job(idle, table(number), PRICE) for number in (1, 2, 3)]
    found: list[Any] = []
    after: str | None = ""
    while after is not None:
        page = idle.ask("GET", f"/api/jobs?pageSize=2{after and '&after=' + after}").json
        found += page["jobs"]
        after = page["next"]
    assert [job["id"] for job in found] == names[::-1]


def test_a_deleted_job_is_gone(idle: ServerProcess, database_18: str) -> None:
    name = start_job(idle, table(10), PRICE)
    until_state(idle, name, "QUEUED")
    assert idle.ask("DELETE", f"/api/jobs/{name}").status == 204
    for method, path in (("GET", ""), ("GET", "/items"), ("POST", "/pause"), ("POST", "/export"), ("DELETE", "")):
        assert idle.ask(method, f"/api/jobs/{name}{path}").status == 404
    with psycopg.connect(database_18, autocommit=True) as connection:
        for place in ("templates", "file_chunks", "outcomes", "jobs", "job_columns", "files", "batches"):
            wait_until(partial(_is_empty, connection, place), 30)


def _is_empty(connection: psycopg.Connection, place: str) -> bool:
    return ask(connection, f"SELECT count(*) FROM penstock.{place}") == 0


def test_a_job_asked_for_twice_under_a_key_is_one(idle: ServerProcess) -> None:
    key = {"idempotency-key": "once"}
    first, again = (post_job(idle, table(3), PRICE, headers=key) for _ in range(2))
    assert first.json == again.json
    for content, spec in ((table(4), PRICE), (table(3), {**PRICE, "priority": 1})):
        refused = post_job(idle, content, spec, headers=key)
        assert (refused.status, refused.json["error"]["code"]) == (409, "idempotency_conflict")
    assert len(idle.ask("GET", "/api/jobs").json["jobs"]) == 1
    # The key stays the job's, also when its input is gone.
    files = idle.ask("GET", "/v1/files?purpose=job").json["data"]
    assert idle.ask("DELETE", f"/v1/files/{files[0]['id']}").status == 200
    assert post_job(idle, table(3), PRICE, headers=key).status == 409


@pytest.mark.parametrize(
    ("content", "spec", "words"),
    [
        (b"a,b\n1,2\n3\n", PRICE, "rows.csv: row 2 (line 3): 1 cell; the header has 2"),
        (b"a,b\n1,2\n3\n", PRICE, "has 2. Give every row as many cells as the header"),
        (b"a,b\n", PRICE, "holds no rows. Expected a header and a row for each item below it."),
        (table(1), {"processor": "nobody"}, "there is no processor 'nobody'; there are: price."),
        (table(1), {"processor": {"type": "chat", "provider": "x", "model": "m", "prompt": "a"}}, "no provider 'x'"),
        (table(1), {"processor": {"type": "chat", "provider": "x", "model": "m", "prompt": "{{"}}, "processor.prompt"),
        (table(1), {}, "Object missing required field `processor`"),
        (table(1), {**PRICE, "columns": {"keep": ["colour"]}}, "colour"),
        (table(1), "{", "it is not JSON"),
    ],
)
def test_what_cannot_be_taken_is_said_and_leaves_nothing(
    server: ServerProcess, shared_database_18: str, content: bytes, spec: Any, words: str
) -> None:
    queries = ("SELECT count(*) FROM penstock.files WHERE state = 'ready'", "SELECT count(*) FROM penstock.batches")
    with psycopg.connect(shared_database_18, autocommit=True) as connection:
        before = [ask(connection, query) for query in queries]
        refused = post_job(server, content, spec)
        assert refused.status == 400, refused.content
        assert words in refused.json["error"]["message"]
        assert [ask(connection, query) for query in queries] == before


def test_more_rows_than_a_job_may_have_are_too_large(tmp_path: Path, database_18: str) -> None:
    with jobs_server(tmp_path, "--set", "max_rows=2", database=database_18, workers=0) as server:
        refused = post_job(server, b"a\n1\n2\n3\n", PRICE)
    assert (refused.status, refused.json["error"]["code"]) == (413, "file_too_large")
    assert "more than 2 rows (max_rows). Split the file" in refused.json["error"]["message"]


def test_an_ingest_that_dies_goes_on_elsewhere(tmp_path: Path, database_18: str) -> None:
    """Killed in the middle of the rows, with workers at those that are there: every row once, none twice."""
    rows = 12_000
    liveness = ("--set", "heartbeat_interval_s=0.3", "--set", "heartbeat_grace_s=2")
    with psycopg.connect(database_18, autocommit=True) as connection:
        slow_down_rows(connection, 0.3)
        with jobs_server(tmp_path, *liveness, database=database_18, name="first") as first:
            name = start_job(first, table(rows), PRICE)
            wait_until(lambda: job_of(first, name)["ingest"]["rows"] > 0, 30)
            assert job_of(first, name)["state"] == "INGESTING"
            first.process.kill()
        stored = ask(connection, "SELECT rows FROM penstock.jobs")
        assert 0 < stored < rows
        with jobs_server(tmp_path, *liveness, database=database_18, name="second") as second:
            job = until_state(second, name, "DONE")
            assert (job["total"], job["ingest"]["rows"]) == (rows, rows)
            items = items_of(second, name)
        assert [item["input"]["sku"] for item in items] == list(range(1, rows + 1))
        assert ask(connection, "SELECT count(*) FROM penstock.outcomes") == rows


def test_a_small_job_does_not_wait_for_the_rows_of_a_large_one(own_server: ServerProcess, database_18: str) -> None:
    # The workers have started: the large job does not wait for that.
    until_state(own_server, start_job(own_server, table(1), PRICE), "DONE")
    with psycopg.connect(database_18, autocommit=True) as connection:
        slow_down_rows(connection, 0.5)
        large = start_job(own_server, table(20_000), PRICE)
        wait_until(lambda: job_of(own_server, large)["ingest"]["rows"] > 0, 30)
        until_state(own_server, start_job(own_server, table(3), PRICE), "DONE")
        assert job_of(own_server, large)["state"] == "INGESTING"


def test_an_ingest_goes_on_after_the_database_broke_off(own_server: ServerProcess, database_18: str) -> None:
    rows = 8_000
    broken = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    with psycopg.connect(database_18, autocommit=True) as connection:
        slow_down_rows(connection, 0.2)
        name = start_job(own_server, table(rows), PRICE)
        wait_until(lambda: job_of(own_server, name)["ingest"]["rows"] > 0, 30)
        connection.execute(f"{broken} AND pid <> pg_backend_pid()".encode())
        assert ask(connection, "SELECT rows FROM penstock.jobs") < rows
        wait_until(lambda: own_server.ask("GET", f"/api/jobs/{name}").status == 200, 30)
        job = until_state(own_server, name, "DONE")
    assert (job["total"], job["ingest"]["rows"]) == (rows, rows)
    assert [item["input"]["sku"] for item in items_of(own_server, name)] == list(range(1, rows + 1))


def test_a_job_cancelled_while_it_was_read_is_read_on(own_server: ServerProcess, database_18: str) -> None:
    rows = 8_000
    with psycopg.connect(database_18, autocommit=True) as connection:
        slow_down_rows(connection, 0.2)
        name = start_job(own_server, table(rows), PRICE)
        wait_until(lambda: job_of(own_server, name)["ingest"]["rows"] > 0, 30)
        assert own_server.ask("POST", f"/api/jobs/{name}/cancel").status == 200
        until_state(own_server, name, "CANCELLED")
        wait_until(lambda: ask(connection, "SELECT count(*) FROM penstock.jobs WHERE ingested_at IS NULL") == 0, 30)
        wait_until(lambda: ask(connection, "SELECT state = 'cancelled' FROM penstock.batches"), 30)
        assert ask(connection, "SELECT rows FROM penstock.jobs") < rows
        refused = own_server.ask("POST", f"/api/jobs/{name}/reprocess", {"scope": "job"})
        assert (refused.status, "add PENDING" in refused.json["error"]["message"]) == (409, True)
        wish = {"scope": "job", "statuses": ["PENDING"]}
        assert own_server.ask("POST", f"/api/jobs/{name}/reprocess", wish).status == 202
        job = until_state(own_server, name, "DONE")
    assert (job["total"], job["processed"], job["ingest"]["rows"]) == (rows, rows, rows)
    assert [item["input"]["sku"] for item in items_of(own_server, name)] == list(range(1, rows + 1))


def test_rows_whose_definition_is_of_another_version_fail_and_say_so(tmp_path: Path, database_18: str) -> None:
    """What an older version took, and this one does not, ends no worker."""
    prompt = {"type": "chat", "provider": "default", "model": "small", "prompt": "What is {{ product_title }}?"}
    taken_before = {**prompt, "prompt": "{% if sku in [" + "1," * 3_000 + "1] %}{{ sku }}{% endif %}"}
    with (
        start_mock_process() as mock,
        jobs_server(tmp_path, "--base-url", mock.base_url, database=database_18) as server,
    ):
        with server.frozen_workers():
            name = start_job(server, table(3), {"processor": prompt})
            with psycopg.connect(database_18) as connection:
                connection.execute("UPDATE penstock.jobs SET spec = %s", [json.dumps({"processor": taken_before})])
        assert until_state(server, name, "DONE")["failed"] == 3
        for item in items_of(server, name):
            assert "a block has more than 4,096 characters" in item["error"]
        row = server.ask("GET", f"/api/jobs/{name}/items/1").json
        assert (row["errorCode"], row["request"]) == ("refused_definition", None)
        after = start_job(server, table(3), {"processor": prompt})
        assert until_state(server, after, "DONE")["failed"] == 0
