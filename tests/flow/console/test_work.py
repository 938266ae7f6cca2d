"""Batches and jobs in one list, each with its page's figures, and the ticks that tell of changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch_api import ENDPOINT, jsonl
from tests.support.jobs import CONFIG, jobs_server, start_job, table, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

DEADLINE_S = 60.0
PROVIDER = """
[[providers]]
name = "away"
base_url = "http://127.0.0.1:9/v1"
models = ["*"]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("work")
    with jobs_server(directory, database=shared_database_18, config_text=CONFIG + PROVIDER) as running:
        yield running


@pytest.fixture(scope="module")
def job(server: ServerProcess) -> str:
    name = start_job(server, table(40), {"processor": "price", "jobType": "prices"}, filename="chairs.csv")
    until_state(server, name, "DONE")
    return name


@pytest.fixture(scope="module")
def batch(server: ServerProcess, job: str) -> str:
    """A batch whose upstream is away: its requests are tried again and again. It is newer than the job."""
    del job
    put = server.ask(
        "PUT", "/v1/files?purpose=batch&filename=ask.jsonl", jsonl(30), headers={"content-type": "text/plain"}
    )
    asked = {"endpoint": ENDPOINT, "completion_window": "24h", "input_file_id": put.json["id"]}
    name: str = server.ask("POST", "/v1/batches", {**asked, "metadata": {"name": "Evening <b>run</b>"}}).json["id"]
    wait_until(lambda: get(server, f"/api/work/{name}")["state"] == "RUNNING", DEADLINE_S)
    return name


def get(server: ServerProcess, path: str) -> Any:
    answer = server.ask("GET", path)
    assert answer.status == 200, answer.content
    return answer.json


@contextmanager
def ticks(server: ServerProcess, query: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """Events of a stream, as name and content."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    connection.request("GET", f"/api/ticks?{query}")
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")

    def events() -> Iterator[tuple[str, Any]]:
        name = "message"
        for line in answer:
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                yield name, json.loads(line[6:])
                name = "message"

    try:
        yield events()
    finally:
        answer.close()
        connection.close()


def test_the_list_has_batches_and_jobs_newest_first(server: ServerProcess, job: str, batch: str) -> None:
    entries = get(server, "/api/work")["work"]
    assert [entry["id"] for entry in entries] == [batch, job]
    assert [entry["kind"] for entry in entries] == ["batch", "job"]
    assert [entry["name"] for entry in entries] == ["Evening <b>run</b>", "chairs.csv"]
    assert (entries[1]["state"], entries[1]["jobType"]) == ("DONE", "prices")
    for entry in entries:
        assert sum(entry["counts"].values()) == entry["total"]
    assert entries[1]["counts"]["done"] == 32
    assert (entries[1]["counts"]["failed"], entries[1]["counts"]["notFound"]) == (4, 4)
    first = get(server, "/api/work?pageSize=1")
    assert [entry["id"] for entry in first["work"]] == [batch]
    rest = get(server, f"/api/work?pageSize=1&after={first['next']}")
    assert ([entry["id"] for entry in rest["work"]], rest["next"]) == ([job], None)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("kind=job", {"job"}),
        ("kind=batch", {"batch"}),
        ("state=DONE", {"job"}),
        ("state=RUNNING", {"batch"}),
        ("state=DONE,RUNNING", {"job", "batch"}),
        ("state=PAUSED", set()),
        ("q=CHAIRS", {"job"}),
        ("q=evening", {"batch"}),
        ("q=prices", {"job"}),
        ("q=100%25", set()),
        ("owner=*", {"job", "batch"}),
        ("owner=somebody", set()),
    ],
)
def test_the_list_is_narrowed(server: ServerProcess, job: str, batch: str, query: str, found: set[str]) -> None:
    names = {job: "job", batch: "batch"}
    assert {names[entry["id"]] for entry in get(server, f"/api/work?{query}")["work"]} == found


def test_work_is_found_by_its_id_as_it_is_shown_or_told_by_a_webhook(
    server: ServerProcess, job: str, batch: str
) -> None:
    for text, found in ((job, job), (job[:-4], job), (job.replace("job_", "batch_"), job), (batch, batch)):
        assert [entry["id"] for entry in get(server, f"/api/work?q={text}")["work"]] == [found]


@pytest.mark.parametrize("query", ["state=running", "after=job_1", "pageSize=0", "kind=run"])
def test_what_the_list_does_not_know(server: ServerProcess, query: str) -> None:
    assert server.ask("GET", f"/api/work?{query}").status == 400


def test_one_job_is_told_as_the_api_of_jobs_tells_it(server: ServerProcess, job: str) -> None:
    # Workers write the samples of a second when it is over, which can be after the job has ended.
    wait_until(lambda: get(server, f"/api/work/{job}")["latency"]["p50"] is not None, DEADLINE_S)
    shown, told = get(server, f"/api/work/{job}"), get(server, f"/api/jobs/{job}")
    assert shown["total"] == told["total"] == 40
    counts = shown["counts"]
    assert (counts["failed"], counts["notFound"]) == (told["failed"], told["notFound"])
    assert counts["done"] + counts["failed"] + counts["notFound"] == told["processed"]
    assert shown["lastError"] == told["lastError"]
    assert shown["ingest"] == told["ingest"]
    assert (shown["inputColumns"], shown["columns"]) == (told["columns"], ["price", "currency"])
    assert 0 <= shown["latency"]["p50"] <= shown["latency"]["p95"] <= shown["latency"]["p99"]
    assert shown["operation"] is None
    assert shown["model"] == "price"


def test_one_batch_with_its_limit_and_rows_that_are_tried_again(server: ServerProcess, batch: str) -> None:
    wait_until(lambda: get(server, f"/api/work/{batch}")["counts"]["retrying"] > 0, DEADLINE_S)
    shown = get(server, f"/api/work/{batch}")
    assert sum(shown["counts"].values()) == shown["total"] == 30
    assert shown["provider"] == "away"
    wait_until(lambda: get(server, f"/api/work/{batch}")["limit"] is not None, DEADLINE_S)
    assert get(server, f"/api/work/{batch}")["limit"]["why"]


def test_ids_that_are_none(server: ServerProcess, job: str) -> None:
    for name in ("nonsense", f"job_{'0' * 32}", job.replace("job_", "batch_"), job.replace("job_", "file-")):
        answer = server.ask("GET", f"/api/work/{name}")
        assert (answer.status, answer.json["error"]["message"]) == (404, f"No such batch or job: {name}")
    assert server.ask("GET", "/api/ticks?work=nonsense").status == 404
    assert server.ask("GET", "/api/ticks").status == 400
    assert server.ask("GET", f"/api/ticks?home=1&work={job}").status == 400


def test_steering(server: ServerProcess, job: str, batch: str) -> None:
    assert server.ask("POST", f"/api/work/{batch}/pause").json["state"] == "PAUSED"
    assert server.ask("POST", f"/api/work/{batch}/pause").status == 200
    paused = get(server, f"/api/work/{batch}")
    assert (paused["ratePerSecond"], paused["etaSeconds"]) == (None, None)
    with ticks(server, f"work={batch}") as events:
        assert next(events)[1]["state"] == "PAUSED"
        assert server.ask("POST", f"/api/work/{batch}/resume").json["state"] in ("RUNNING", "QUEUED")
        assert next(told["state"] for _, told in events if told["state"] != "PAUSED") in ("RUNNING", "QUEUED")
    wait_until(lambda: get(server, f"/api/work/{batch}")["state"] == "RUNNING", DEADLINE_S)
    refused = server.ask("POST", f"/api/work/{job}/pause")
    assert (refused.status, refused.json["error"]["message"]) == (409, "Cannot pause what is DONE.")


def test_ticks_tell_of_a_job_until_it_is_gone(server: ServerProcess) -> None:
    with server.frozen_workers(), ticks(server, "home=1") as home:
        next(home)
        name = start_job(server, table(20), {"processor": "price"}, filename="more.csv")
        next(told for _, told in home if name in {entry["id"] for entry in told["work"]})
        with ticks(server, f"work={name}") as events, ticks(server, f"work={name}") as others:
            kind, first = next(events)
            assert (kind, first["id"]) == ("message", name)
            if first["total"] != 20:
                next(told for _, told in events if told["total"] == 20)
            assert server.ask("POST", f"/api/work/{name}/cancel").status == 200
            ended = next(told for _, told in events if told["endedAt"])
            assert ended["counts"]["cancelled"] == 20
            assert server.ask("DELETE", f"/api/jobs/{name}").status == 204
            for stream in (events, others):
                assert next(kind for kind, _ in stream if kind != "message") == "gone"
        next(told for _, told in home if name in told["gone"])


def test_workers(server: ServerProcess) -> None:
    ours = {server.process.pid, *server.worker_pids}
    wait_until(lambda: ours <= {worker["pid"] for worker in get(server, "/api/workers")["workers"]}, DEADLINE_S)
    shown = get(server, "/api/workers")
    assert shown["next"] is None
    assert all(worker["alive"] and not worker["draining"] for worker in shown["workers"])

    def in_pages() -> list[str]:
        first = get(server, "/api/workers?pageSize=1")
        rest = get(server, f"/api/workers?after={first['next']}")
        return [worker["id"] for worker in first["workers"] + rest["workers"]]

    # A process has a worker for each pool, and they begin one after the other.
    wait_until(lambda: in_pages() == [worker["id"] for worker in get(server, "/api/workers")["workers"]], DEADLINE_S)


def test_me(server: ServerProcess) -> None:
    me = get(server, "/api/me")
    assert (me["owner"], me["role"], me["keyless"], me["signedIn"]) == ("local", "admin", True, False)
    assert me["processors"] == [{"name": "price"}]
    assert [provider["name"] for provider in me["providers"]] == ["away"]
    assert me["pendingDashboard"] is False


def test_streams_end_with_the_server(tmp_path: Path, database_18: str) -> None:
    with jobs_server(tmp_path, database=database_18, workers=0) as server:
        job = start_job(server, table(40), {"processor": "price"})
        until_state(server, job, "QUEUED")
        with ticks(server, f"work={job}") as events:
            next(events)
            server.process.terminate()
            assert list(events) == []
            assert server.process.wait(DEADLINE_S) == 0
