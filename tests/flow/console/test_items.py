"""Rows as the grid and the drawer show them: of jobs and of batches, cut short, found by custom id, with everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.support.batch_api import ENDPOINT
from tests.support.images import png
from tests.support.jobs import CONFIG, jobs_server, start_job, until_state
from tests.support.mock_process import start_mock_process
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

DEADLINE_S = 60.0
LINES = 2_300
# The upstream rejects one in five, which ones goes by ids: of so many, none at all once in billions of runs.
JOB_ROWS = 100
LONG = "ö" * 5_000
CHAT = {"type": "chat", "provider": "fake", "model": "m", "prompt": "Say {{ word }}, {{ word }}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("items")
    with start_mock_process("--reject-rate", "0.2", "--seed", "7") as upstream:
        provider = f'[[providers]]\nname = "fake"\nbase_url = "{upstream.base_url}"\nmodels = ["*"]\n'
        with jobs_server(directory, database=shared_database_18, config_text=CONFIG + provider) as running:
            yield running


@pytest.fixture(scope="module")
def batch(server: ServerProcess) -> str:
    """Requests for two models, in turn, whose custom ids tell nothing of their place."""
    name = start_batch(server, LINES)
    wait_until(lambda: get(server, f"/api/work/{name}")["state"] == "DONE", DEADLINE_S)
    return name


def start_batch(server: ServerProcess, count: int) -> str:
    lines = [
        {
            "custom_id": f"id{number:x}-x",
            "method": "POST",
            "url": ENDPOINT,
            "body": {
                "model": f"m{number % 2}",
                "messages": [{"role": "user", "content": LONG if number == 3 else "hi"}],
            },
        }
        for number in range(1, count + 1)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    put = server.ask("PUT", "/v1/files?purpose=batch", content, headers={"content-type": "text/plain"})
    asked = {"endpoint": ENDPOINT, "completion_window": "24h", "input_file_id": put.json["id"]}
    name: str = server.ask("POST", "/v1/batches", asked).json["id"]
    return name


@pytest.fixture(scope="module")
def job(server: ServerProcess) -> str:
    content = "\n".join(["word", *map(word_of, range(1, JOB_ROWS + 1)), ""]).encode()
    name = start_job(server, content, {"processor": CHAT, "maxAttempts": 1}, filename="words.csv")
    until_state(server, name, "DONE")
    return name


def word_of(row: int) -> str:
    return LONG if row == 2 else f"word {row}"


def get(server: ServerProcess, path: str) -> Any:
    answer = server.ask("GET", path)
    assert answer.status == 200, answer.content
    return answer.json


def test_requests_of_a_batch_are_rows(server: ServerProcess, batch: str) -> None:
    page = get(server, f"/api/jobs/{batch}/items?from=1001&pageSize=60")
    assert [item["row"] for item in page["items"]] == list(range(1001, 1061))
    assert page["next"] == "1061"
    assert page["items"][0]["customId"] == "id3e9-x"
    assert page["items"][0]["input"]["model"] == "m1"
    assert {item["status"] for item in page["items"]} == {"DONE", "ERROR"}
    last = get(server, f"/api/jobs/{batch}/items?from={LINES - 4}&pageSize=60")
    assert ([item["row"] for item in last["items"]], last["next"]) == (list(range(LINES - 4, LINES + 1)), None)
    failed = get(server, f"/api/jobs/{batch}/items?status=ERROR&pageSize=5")
    assert [item["status"] for item in failed["items"]] == ["ERROR"] * 5
    assert all(item["error"] for item in failed["items"])
    assert get(server, f"/api/jobs/{batch}/items?status=PENDING")["items"] == []


@pytest.mark.parametrize(("name", "column"), [("batch", "messages"), ("job", "word")])
def test_long_cells_are_cut(server: ServerProcess, request: pytest.FixtureRequest, name: str, column: str) -> None:
    work = request.getfixturevalue(name)
    row = 3 if name == "batch" else 2
    whole = get(server, f"/api/jobs/{work}/items?from={row}&pageSize=1")["items"][0]
    short = get(server, f"/api/jobs/{work}/items?from={row}&pageSize=1&cellBytes=201")["items"][0]
    assert (whole["cut"], short["cut"]) == (False, True)
    assert LONG in json.dumps(whole["input"][column], ensure_ascii=False)
    assert "ö" * 100 + "…" in json.dumps(short["input"][column], ensure_ascii=False)
    assert len(json.dumps(short, ensure_ascii=False).encode()) < 3_000


def test_a_row_is_found_by_its_custom_id(server: ServerProcess, batch: str, job: str) -> None:
    found = get(server, f"/api/jobs/{batch}/items?customId=id8fb-x")
    assert ([item["row"] for item in found["items"]], found["next"]) == ([2299], None)
    assert [item["row"] for item in get(server, f"/api/jobs/{job}/items?customId=40")["items"]] == [40]
    for nothing in ("id8fb", "", "%00", "'"):
        assert get(server, f"/api/jobs/{batch}/items?customId={nothing}") == {"items": [], "next": None}


def test_everything_of_a_row(server: ServerProcess, job: str) -> None:
    # Which rows the upstream rejects differs from run to run: it goes by the job's id.
    failed = get(server, f"/api/jobs/{job}/items?status=ERROR&pageSize=1")["items"][0]
    shown = get(server, f"/api/jobs/{job}/items/{failed['row']}")
    word = word_of(failed["row"])
    assert shown["input"] == {"word": word}
    assert shown["status"] == "ERROR"
    assert shown["error"] == failed["error"]
    assert [(each["attempt"], each["status"]) for each in shown["history"]] == [(1, 400)]
    request = shown["request"]
    assert (request["method"], request["url"].endswith("/v1/chat/completions")) == ("POST", True)
    assert request["url"].startswith("http://127.0.0.1")
    assert request["body"]["messages"][0]["content"] == f"Say {word}, {word}"
    assert "authorization" not in json.dumps(request).lower()
    assert shown["image"] is None


def test_everything_of_a_request(server: ServerProcess, batch: str) -> None:
    shown = get(server, f"/api/jobs/{batch}/items/3")
    assert (shown["row"], shown["customId"]) == (3, "id3-x")
    assert shown["request"]["body"] == shown["input"]
    assert shown["result"] is not None


def test_rows_that_are_none(server: ServerProcess, batch: str, job: str) -> None:
    for row in ("0", str(JOB_ROWS + 1), "x", "-1", "99999999999", str(2**31), "1%00"):
        assert server.ask("GET", f"/api/jobs/{job}/items/{row}").status == 404
        assert server.ask("GET", f"/api/jobs/{job}/items/{row}/image").status == 404
    assert server.ask("GET", f"/api/jobs/{batch}/items/{LINES + 1}").status == 404
    assert server.ask("GET", f"/api/jobs/{job}/items/1/image").status == 404
    assert server.ask("GET", f"/api/jobs/{batch}/items/1/image").status == 404


def test_images_are_shown_and_nothing_else_of_them_runs(server: ServerProcess) -> None:
    picture = png(3, 2)
    spec = {"processor": {**CHAT, "prompt": "What is this?"}, "maxAttempts": 1}
    name = start_job(server, picture, spec, filename="<b>.png")
    until_state(server, name, "DONE")
    shown = get(server, f"/api/jobs/{name}/items/1")["image"]
    assert (shown["type"], shown["width"], shown["height"]) == ("image/png", 3, 2)
    image = server.ask("GET", f"/{shown['url']}")
    assert image.content == picture
    assert image.headers["content-type"] == "image/png"
    assert image.headers["x-content-type-options"] == "nosniff"
    assert image.headers["content-security-policy"] == "default-src 'none'; sandbox"


def test_a_sheet_by_link(server: ServerProcess, job: str) -> None:
    by_link, by_form = (server.ask(way, f"/api/jobs/{job}/export?format=csv") for way in ("GET", "POST"))
    assert by_link.status == by_form.status == 200
    assert by_link.content == by_form.content
    assert by_link.headers["content-disposition"].startswith("attachment")


def test_charts_of_a_batch(server: ServerProcess, batch: str) -> None:
    def samples() -> Any:
        return get(server, f"/api/work/{batch}/samples")["samples"]

    # Workers write the samples of a second when it is over, which can be after the batch has ended.
    wait_until(lambda: sum(sample["completed"] + sample["failed"] for sample in samples()) >= LINES, DEADLINE_S)
    counts = get(server, f"/api/work/{batch}")["counts"]
    assert sum(sample["completed"] for sample in samples()) == counts["done"] > 0
    assert sum(sample["failed"] for sample in samples()) == counts["failed"] > 0


def walk(server: ServerProcess, path: str, place: str) -> list[Any]:
    """Rows of all pages; `place` is what `next` is passed as."""
    page = get(server, path)
    found: list[Any] = page["items"]
    while page["next"] is not None:
        page = get(server, f"{path}&{place}={page['next']}")
        found += page["items"]
    return found


def test_pending_requests_of_a_batch(server: ServerProcess) -> None:
    """By the time of their last change, over both models, page by page; none of a batch that was cancelled."""
    with server.frozen_workers():
        name = start_batch(server, 60)
        path = f"/api/jobs/{name}/items?statuses=PENDING,PROCESSING&sort=updatedAt&pageSize=7&cellBytes=100"
        wait_until(lambda: get(server, f"/api/work/{name}")["total"] == 60, DEADLINE_S)
        found = walk(server, path, "after")
        assert sorted(item["row"] for item in found) == list(range(1, 61))
        assert [item["updatedAt"] for item in found] == sorted(item["updatedAt"] for item in found)
        third = next(item for item in found if item["row"] == 3)
        assert (third["customId"], third["status"], third["cut"]) == ("id3-x", "PENDING", True)
        assert server.ask("POST", f"/v1/batches/{name}/cancel").status == 200
        assert walk(server, path, "after") == []


def test_errors_of_a_batch_in_groups(server: ServerProcess, shared_database_18: str) -> None:
    name = start_batch(server, 300)
    wait_until(lambda: get(server, f"/api/work/{name}")["state"] == "DONE", DEADLINE_S)
    failed = get(server, f"/api/work/{name}")["counts"]["failed"]
    groups = get(server, f"/api/jobs/{name}/errors")["errors"]
    assert failed > 20
    assert sum(group["count"] for group in groups) == failed
    group = groups[0]
    of_group = walk(server, f"/api/jobs/{name}/items?fingerprint={group['fingerprint']}&pageSize=7", "from")
    rows = [item["row"] for item in of_group]
    assert len(rows) == group["count"]
    assert rows == sorted(set(rows))
    assert {row % 2 for row in rows} == {0, 1}, "of both models"
    assert group["sample"]["row"] in rows

    retry = f"/v1/batches/{name}/retry"
    assert server.ask("POST", retry, {"fingerprint": "x"}).status == 400
    assert server.ask("POST", retry, {"fingerprint": "0" * 16}).status == 409
    with server.frozen_workers():
        assert server.ask("POST", retry, {"fingerprint": group["fingerprint"]}).status == 200
        counts = get(server, f"/api/work/{name}")["counts"]
        assert counts["failed"] == failed - group["count"]
        assert get(server, f"/api/jobs/{name}/errors")["errors"] == groups[1:]
    wait_until(lambda: get(server, f"/api/work/{name}")["state"] == "DONE", DEADLINE_S)
    after = get(server, f"/api/jobs/{name}/errors")["errors"]
    assert sum(each["count"] for each in after) == get(server, f"/api/work/{name}")["counts"]["failed"]

    assert server.ask("DELETE", f"/v1/batches/{name}").status == 200
    messages = start_messages(server, JOB_ROWS)
    assert get(server, f"/api/jobs/{messages}/errors")["errors"]
    assert server.ask("DELETE", f"/v1/messages/batches/{messages}").status == 200
    left = "SELECT count(*) FROM penstock.job_errors WHERE batch_id = ANY (%s::uuid[])"
    ids = [each.rpartition("_")[2] for each in (name, messages)]
    with psycopg.connect(shared_database_18, autocommit=True) as connection:
        wait_until(lambda: connection.execute(left, [ids]).fetchone() == (0,), DEADLINE_S)


def start_messages(server: ServerProcess, count: int) -> str:
    """A message batch that has ended."""
    params = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    asked = {"requests": [{"custom_id": f"m{number}", "params": params} for number in range(count)]}
    name: str = server.ask("POST", "/v1/messages/batches", asked).json["id"]
    wait_until(lambda: get(server, f"/api/work/{name}")["state"] == "DONE", DEADLINE_S)
    return name
