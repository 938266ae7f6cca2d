"""Pending rows, error groups and the audit trail over the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from tests.support.cli import ask
from tests.support.jobs import items_of, job_of, jobs_server, start_job, table, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

PRICE = {"processor": "price", "jobType": "prices"}
DASHBOARD = ("--set", "pending_dashboard=true")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, shared_database_18: str) -> Iterator[ServerProcess]:
    """For tests of one job each."""
    directory = tmp_path_factory.mktemp("pending")
    with jobs_server(directory, *DASHBOARD, database=shared_database_18, workers=0) as running:
        yield running


@pytest.fixture
def idle(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    """A server that works nothing off."""
    with jobs_server(tmp_path, *DASHBOARD, database=database_18, workers=0) as running:
        yield running


def walk(server: ServerProcess, path: str) -> list[Any]:
    items: list[Any] = []
    after = ""
    while True:
        answer = server.ask("GET", f"{path}{after}")
        assert answer.status == 200, answer.content
        items += answer.json["items"]
        if answer.json["next"] is None:
            return items
        after = f"&after={answer.json['next']}"


def test_pending_rows(idle: ServerProcess) -> None:
    names = [start_job(idle, table(7), {**PRICE, "jobType": kind}) for kind in ("prices", "stock")]
    for name in names:
        until_state(idle, name, "QUEUED")
    items = walk(idle, "/api/pending?pageSize=3")
    assert [(item["jobId"], item["row"]) for item in items] == [(name, row) for name in names for row in range(1, 8)]
    first = items[0]
    assert first["id"] == f"batch_req_{names[0].removeprefix('job_')}_1"
    assert (first["owner"], first["jobType"], first["status"], first["attempts"]) == ("local", "prices", "PENDING", 0)
    assert (first["lockedBy"], first["lockedAt"], first["summary"]) == (None, None, "1")
    assert not {"input", "result"} & first.keys()
    for narrow, count in (
        ("jobType=stock", 7),
        ("jobType=other", 0),
        (f"jobId={names[1]}", 7),
        ("statuses=PROCESSING", 0),
        ("statuses=PENDING,PROCESSING&userId=all", 14),
        (f"from={quote(items[7]['updatedAt'])}", 7),
        (f"to={quote(items[7]['updatedAt'])}", 7),
        ("to=2020-01-01T00:00:00Z", 0),
    ):
        assert len(walk(idle, f"/api/pending?pageSize=5&{narrow}")) == count, narrow

    # The job's own rows, in the same order and whole.
    query = "statuses=PENDING,PROCESSING&sort=updatedAt&pageSize=3"
    rows = walk(idle, f"/api/jobs/{names[0]}/items?{query}")
    assert rows == items_of(idle, names[0], 1000, "&statuses=PENDING")
    assert rows[0]["input"]["sku"] == 1

    assert idle.ask("POST", f"/api/jobs/{names[0]}/pause").status == 200
    assert len(walk(idle, "/api/pending?pageSize=5")) == 14
    assert idle.ask("POST", f"/api/jobs/{names[0]}/cancel").status == 200
    assert idle.ask("DELETE", f"/api/jobs/{names[1]}").status == 204
    assert walk(idle, "/api/pending?pageSize=5") == []
    assert len(walk(idle, f"/api/jobs/{names[0]}/items?{query}")) == 7
    assert idle.ask("GET", f"/api/pending?jobId={names[1]}").status == 404


def test_cursors_are_for_their_query_alone(shared: ServerProcess) -> None:
    name = start_job(shared, table(5), PRICE)
    until_state(shared, name, "QUEUED")
    # The other tests have jobs there too.
    pending = f"/api/pending?jobId={name}"
    cursor = shared.ask("GET", f"{pending}&pageSize=2").json["next"]
    assert shared.ask("GET", f"{pending}&pageSize=4&after={cursor}").json["next"] is None
    items = f"/api/jobs/{name}/items?statuses=PENDING"
    for path in (
        f"/api/pending?after={cursor}",
        f"{pending}&statuses=PENDING&after={cursor}",
        f"{pending}&jobType=prices&after={cursor}",
        f"{pending}&to=2030-01-01T00:00:00Z&after={cursor}",
        f"{pending}&userId=all&after={cursor}",
        f"{items}&after={cursor}",
        f"/api/audit?after={cursor}",
        f"{pending}&after={cursor[:-2]}",
        f"{pending}&after=",
        f"{pending}&after=AAAA",
    ):
        refused = shared.ask("GET", path)
        assert (refused.status, refused.json["error"]["param"]) == (400, "after"), path


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("sort=updatedAt", "sort"),
        ("sort=updatedAt&statuses=DONE", "sort"),
        ("sort=row&statuses=PENDING&after=x", "sort"),
        ("sort=time", "sort"),
        ("fingerprint=x", "fingerprint"),
        ("fingerprint=0000000000000000&statuses=ERROR", "fingerprint"),
        ("statuses=PENDING,", "statuses"),
    ],
)
def test_what_items_are_not_listed_by(shared: ServerProcess, query: str, param: str) -> None:
    name = start_job(shared, table(1), PRICE)
    refused = shared.ask("GET", f"/api/jobs/{name}/items?{query}")
    assert (refused.status, refused.json["error"]["param"]) == (400, param), refused.content


def test_the_dashboard_is_off_by_default(tmp_path: Path, database_18: str) -> None:
    with jobs_server(tmp_path, database=database_18, workers=0) as server:
        refused = server.ask("GET", "/api/pending")
        assert (refused.status, refused.json["error"]["code"]) == (404, "pending_dashboard_off")
        assert "pending_dashboard = true" in refused.json["error"]["message"]
        name = start_job(server, table(3), PRICE)
        until_state(server, name, "QUEUED")
        query = "statuses=PENDING&sort=updatedAt&pageSize=2"
        assert len(walk(server, f"/api/jobs/{name}/items?{query}")) == 3


def test_errors_and_what_became_of_the_job(tmp_path: Path, database_18: str) -> None:
    with jobs_server(tmp_path, *DASHBOARD, database=database_18) as server:
        name = start_job(server, table(40), PRICE)
        job = until_state(server, name, "DONE")
        assert job["lastError"] in ("sold out", "no such article")
        assert job["lastHeartbeat"] is None, "no worker holds any row now"
        assert server.ask("GET", "/api/jobs").json["jobs"] == [job]
        errors = server.ask("GET", f"/api/jobs/{name}/errors").json
        assert errors["next"] is None
        groups = {group["code"]: group for group in errors["errors"]}
        assert groups.keys() == {"sold_out", "not_found"}
        for code, rows, message in (
            ("sold_out", [5, 15, 25, 35], "sold out"),
            ("not_found", [10, 20, 30, 40], "no such article"),
        ):
            group = groups[code]
            assert (group["count"], group["status"], group["sample"]["message"]) == (4, None, message)
            assert group["sample"]["row"] in rows
            assert group["firstSeen"] <= group["lastSeen"]
            items = items_of(server, name, 3, f"&fingerprint={group['fingerprint']}")
            assert [item["row"] for item in items] == rows
        pages = [server.ask("GET", f"/api/jobs/{name}/errors?pageSize=1").json]
        pages.append(server.ask("GET", f"/api/jobs/{name}/errors?pageSize=1&after={pages[0]['next']}").json)
        assert [page["next"] is None for page in pages] == [False, True]
        assert {group["code"] for page in pages for group in page["errors"]} == groups.keys()
        assert server.ask("GET", f"/api/jobs/{name}/errors?after=x").status == 400
        assert items_of(server, name, 3, "&fingerprint=" + "0" * 16) == []

        assert server.ask("DELETE", f"/api/jobs/{name}").status == 204
        assert server.ask("GET", f"/api/jobs/{name}/errors").status == 404
        with psycopg.connect(database_18, autocommit=True) as connection:
            wait_until(lambda: ask(connection, "SELECT count(*) FROM penstock.job_errors") == 0, 30)
            wait_until(lambda: ask(connection, "SELECT count(*) FROM penstock.batches") == 0, 30)
        # Who did what to it outlives the job.
        assert [entry["action"] for entry in server.ask("GET", f"/api/audit?object={name}").json["entries"]] == [
            "delete",
            "create",
        ]


def test_a_worker_at_work_is_heard_of(tmp_path: Path, database_18: str) -> None:
    with jobs_server(tmp_path, database=database_18, workers=0) as server:
        name = start_job(server, table(3), PRICE)
        until_state(server, name, "QUEUED")
        with psycopg.connect(database_18, autocommit=True) as connection:
            heard = connection.execute(
                "WITH worker AS ("
                " INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)"
                " VALUES (gen_random_uuid(), 'p', 'h', 'm', 1, 0, now(), now()) RETURNING *), lease AS ("
                " INSERT INTO penstock.leases (lane_id, batch_id, pool, route, limited, worker_id, ordinals, attempt,"
                "   claimed_at, progressed_at)"
                " SELECT l.id, l.batch_id, l.pool, l.route, false, w.id, '{[0,1)}', 1, now(), now()"
                "   FROM penstock.lanes l, worker w)"
                " SELECT heartbeat_at FROM worker"
            ).fetchall()
        told = job_of(server, name)
        assert told["lastHeartbeat"].startswith(heard[0][0].strftime("%Y-%m-%dT"))
        assert told["lastError"] is None


def test_the_audit_trail(idle: ServerProcess) -> None:
    name = start_job(idle, table(3), PRICE)
    other = start_job(idle, table(3), PRICE)
    for move in ("pause", "pause", "resume", "cancel", "resume"):
        idle.ask("POST", f"/api/jobs/{name}/{move}")
    trail = idle.ask("GET", f"/api/audit?object={name}").json
    assert trail["next"] is None
    # What changed nothing is not in it.
    assert [entry["action"] for entry in trail["entries"]] == ["cancel", "resume", "pause", "create"]
    created = trail["entries"][-1]
    assert (created["object"], created["owner"], created["actor"]) == (name, "local", "local")
    assert (created["client"], created["details"]) == ("127.0.0.1", {"jobType": "prices"})
    found: list[str] = []
    after = ""
    while True:
        page = idle.ask("GET", f"/api/audit?pageSize=2{after}").json
        found += [entry["object"] for entry in page["entries"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert found == [name] * 3 + [other, name]
    assert idle.ask("GET", "/api/audit?object=batch_1").status == 400
