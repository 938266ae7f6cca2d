"""Reprocessing over the API: an operation that is answered at once, goes on by itself, and outlives its server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.model import new_id, public_id
from tests.support.cli import ask
from tests.support.jobs import items_of, job_of, jobs_server, start_job, table, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

# Every fifth article fails for good, every fifth is not found, until somebody mends it.
PROCESSORS = """
from pathlib import Path
import penstock

def mend(item):
    sku = item.body["sku"]
    if not (Path(__file__).parent / "mended").exists():
        if sku % 5 == 0:
            raise penstock.NotFound("no such article")
        if sku % 5 == 1:
            raise penstock.Fail("sold out", code="sold_out")
    return {"price": sku, "attempt": item.attempt}
"""
CONFIG = """
[[processors]]
name = "mend"
function = "processors_of_tests:mend"
"""
MEND = {"processor": "mend"}
LIVENESS = ("--set", "heartbeat_interval_s=0.3", "--set", "heartbeat_grace_s=2")


@pytest.fixture
def server(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    with jobs_server(tmp_path, database=database_18, processors=PROCESSORS, config_text=CONFIG) as running:
        yield running


def reprocess(server: ServerProcess, name: str, **body: Any) -> str:
    answer = server.ask("POST", f"/api/jobs/{name}/reprocess", {"scope": "job", **body})
    assert answer.status == 202, answer.content
    found: str = answer.json["operationId"]
    return found


def operation_of(server: ServerProcess, name: str, operation: str) -> Any:
    answer = server.ask("GET", f"/api/jobs/{name}/operations/{operation}")
    assert answer.status == 200, answer.content
    return answer.json


def until_over(server: ServerProcess, name: str, operation: str) -> Any:
    """The operation once it has ended, and its job has too."""
    wait_until(lambda: operation_of(server, name, operation)["state"] != "RUNNING", 60)
    until_state(server, name, "DONE")
    return operation_of(server, name, operation)


def figures(server: ServerProcess, name: str) -> list[int]:
    job = job_of(server, name)
    return [job[key] for key in ("total", "processed", "failed", "notFound", "inFlight", "pending")]


def test_failures_run_again(server: ServerProcess, tmp_path: Path) -> None:
    name = start_job(server, table(50), MEND)
    until_state(server, name, "DONE")
    assert figures(server, name) == [50, 50, 10, 10, 0, 0]
    first = until_over(server, name, reprocess(server, name))
    assert (first["state"], first["requeued"], first["wornOut"], first["error"]) == ("DONE", 20, 0, None)
    # Still broken: one more attempt each, with the next strategy.
    assert figures(server, name) == [50, 50, 10, 10, 0, 0]
    items = items_of(server, name)
    assert {(item["status"], item["attempts"]) for item in items} == {("DONE", 1), ("ERROR", 2), ("NOT_FOUND", 3)}

    (tmp_path / "mended").touch()
    named = [item["id"] for item in items if item["status"] == "NOT_FOUND"][:3]
    some = until_over(server, name, reprocess(server, name, scope="items", itemIds=named))
    assert some["requeued"] == 3
    assert figures(server, name) == [50, 50, 10, 7, 0, 0]
    rest = until_over(server, name, reprocess(server, name, resetAttempts=True))
    assert rest["requeued"] == 17
    assert figures(server, name) == [50, 50, 0, 0, 0, 0]
    results = {item["result"]["attempt"] for item in items_of(server, name)}
    assert results == {1, 4}  # named ones went on counting, the others began again
    again = until_over(server, name, reprocess(server, name))
    assert again["requeued"] == 0
    listed = server.ask("GET", f"/api/jobs/{name}/operations?pageSize=3").json
    assert [entry["id"] for entry in listed["operations"]] == [each["id"] for each in (again, rest, some)]
    last = server.ask("GET", f"/api/jobs/{name}/operations?after={listed['next']}").json
    assert ([entry["id"] for entry in last["operations"]], last["next"]) == ([first["id"]], None)


def test_one_group_of_errors_runs_again(server: ServerProcess, tmp_path: Path) -> None:
    name = start_job(server, table(50), MEND)
    until_state(server, name, "DONE")
    groups = server.ask("GET", f"/api/jobs/{name}/errors").json["errors"]
    assert {group["code"]: group["count"] for group in groups} == {"sold_out": 10, "not_found": 10}
    (sold_out,) = (group["fingerprint"] for group in groups if group["code"] == "sold_out")
    (tmp_path / "mended").touch()
    some = until_over(server, name, reprocess(server, name, fingerprint=sold_out))
    assert some["requeued"] == 10
    assert figures(server, name) == [50, 50, 0, 10, 0, 0]
    left = server.ask("GET", f"/api/jobs/{name}/errors").json["errors"]
    assert [(group["code"], group["count"]) for group in left] == [("not_found", 10)]
    actions = [entry["action"] for entry in server.ask("GET", "/api/audit").json["entries"]]
    assert actions == ["reprocess", "create"]


def test_what_is_refused(server: ServerProcess) -> None:
    name = start_job(server, table(10), MEND)
    until_state(server, name, "DONE")
    by_status: dict[str, list[str]] = {}
    for item in items_of(server, name):
        by_status.setdefault(item["status"], []).append(item["id"])

    def refuse(status: int, words: str, **body: Any) -> None:
        answer = server.ask("POST", f"/api/jobs/{name}/reprocess", body)
        assert answer.status == status, answer.content
        assert words in answer.json["error"]["message"]

    refuse(400, "itemIds", scope="items")
    refuse(400, "itemIds", scope="job", itemIds=by_status["ERROR"])
    refuse(400, "no request of this batch", scope="items", itemIds=["batch_req_1"])
    refuse(409, "no such row", scope="items", itemIds=[by_status["ERROR"][0].rpartition("_")[0] + "_99"])
    done = by_status["DONE"][:1]
    refuse(409, f"Cannot run '{done[0]}' again: they have another status", scope="items", itemIds=done)
    refuse(400, "statuses", scope="job", statuses=["LOST"])
    empty = server.ask("POST", f"/api/jobs/{name}/reprocess")
    assert (empty.status, "The body is empty" in empty.json["error"]["message"]) == (400, True)
    for unknown in (public_id("job", new_id()), "job_x"):
        assert server.ask("POST", f"/api/jobs/{unknown}/reprocess").status == 404
    assert server.ask("GET", f"/api/jobs/{name}/operations").json["operations"] == []

    with server.frozen_workers():
        operation = reprocess(server, name)
        wait_until(lambda: operation_of(server, name, operation)["state"] == "DONE", 30)
        assert figures(server, name) == [10, 6, 0, 0, 0, 4]
        # The old outcome is there until it is replaced; to ask for it once more names what is live.
        shown = items_of(server, name, page_size=3)
        assert shown == items_of(server, name)
        assert [(item["status"], item["error"]) for item in shown if item["id"] == by_status["ERROR"][0]] == [
            ("PENDING", "sold out")
        ]
        refuse(409, f"Cannot run '{by_status['ERROR'][0]}', '", scope="items", itemIds=by_status["ERROR"])
        refuse(400, "PENDING", scope="job", statuses=["PENDING"])
        again = reprocess(server, name)
        wait_until(lambda: operation_of(server, name, again)["state"] == "DONE", 30)
        assert operation_of(server, name, again)["requeued"] == 0
    until_state(server, name, "DONE")
    assert figures(server, name) == [10, 10, 2, 2, 0, 0]


def test_a_key_makes_one_operation(server: ServerProcess) -> None:
    name = start_job(server, table(10), MEND)
    until_state(server, name, "DONE")
    key = {"idempotency-key": "once"}
    asked = [server.ask("POST", f"/api/jobs/{name}/reprocess", {"scope": "job"}, headers=key) for _ in range(2)]
    assert asked[0].json == asked[1].json
    other = {"scope": "job", "resetAttempts": True}
    refused = server.ask("POST", f"/api/jobs/{name}/reprocess", other, headers=key)
    assert (refused.status, refused.json["error"]["code"]) == (409, "idempotency_conflict")
    until_over(server, name, asked[0].json["operationId"])
    assert len(server.ask("GET", f"/api/jobs/{name}/operations").json["operations"]) == 1
    assert recorded(server) == 1


def recorded(server: ServerProcess, action: str = "reprocess") -> int:
    return [entry["action"] for entry in server.ask("GET", "/api/audit").json["entries"]].count(action)


def test_a_key_that_another_request_is_about_to_use(server: ServerProcess, database_18: str) -> None:
    """It finds the operation of that request, and is not recorded as one of its own."""
    name = start_job(server, table(10), MEND)
    until_state(server, name, "DONE")
    first = until_over(server, name, reprocess(server, name))
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        " AND query LIKE '%INSERT INTO penstock.operations%'"
    )
    with (
        psycopg.connect(database_18) as other,
        psycopg.connect(database_18, autocommit=True) as connection,
        ThreadPoolExecutor(1) as tab,
    ):
        other.execute(
            "INSERT INTO penstock.operations (id, batch_id, kind, wish, idempotency_key, created_at)"
            " SELECT gen_random_uuid(), batch_id, kind, wish, 'soon', now() FROM penstock.operations"
        )
        path, key = f"/api/jobs/{name}/reprocess", {"idempotency-key": "soon"}
        asked = tab.submit(server.ask, "POST", path, {"scope": "job"}, headers=key)
        wait_until(lambda: ask(connection, waiting) == 1, 30)
        other.commit()
        found = asked.result()
    assert found.status == 202
    assert found.json["operationId"] != first["id"]
    assert len(server.ask("GET", f"/api/jobs/{name}/operations").json["operations"]) == 2
    assert recorded(server) == 1


def test_an_operation_is_cancelled(server: ServerProcess, tmp_path: Path) -> None:
    """What was put back stays put back and runs; no other row does, and the job, which waited for it, ends."""
    name = start_job(server, table(50), {**MEND, "maxConcurrency": 1})
    until_state(server, name, "DONE")
    (tmp_path / "mended").touch()
    with server.frozen_workers():
        operation = reprocess(server, name)
        # The one row that may be in flight waits for a worker: there is no room for another.
        wait_until(lambda: operation_of(server, name, operation)["requeued"] == 1, 30)
        path = f"/api/jobs/{name}/operations/{operation}/cancel"
        cancelled = server.ask("POST", path)
        assert (cancelled.status, cancelled.json["state"], cancelled.json["requeued"]) == (200, "CANCELLED", 1)
        assert cancelled.json == server.ask("POST", path).json == operation_of(server, name, operation)
        assert figures(server, name) == [50, 49, 9, 10, 0, 1]
    until_state(server, name, "DONE")
    assert figures(server, name) == [50, 50, 9, 10, 0, 0]
    entry = server.ask("GET", "/api/audit").json["entries"][0]
    assert (entry["action"], entry["object"], entry["details"]) == ("cancel_operation", name, {"operation": operation})

    # What has ended stays as it is.
    done = until_over(server, name, reprocess(server, name))
    refused = server.ask("POST", f"/api/jobs/{name}/operations/{done['id']}/cancel")
    assert (refused.status, "DONE" in refused.json["error"]["message"]) == (409, True)
    other = start_job(server, table(1), MEND)
    for path in (
        f"/api/jobs/{other}/operations/{operation}/cancel",
        f"/api/jobs/{name}/operations/op_{'0' * 32}/cancel",
    ):
        assert server.ask("POST", path).status == 404
    assert recorded(server, "cancel_operation") == 1


def test_an_operation_whose_server_dies_goes_on_elsewhere(tmp_path: Path, database_18: str) -> None:
    """Killed between two chunks of rows, with workers at those that run again: every row once more, none twice."""
    rows = 6_000
    with psycopg.connect(database_18, autocommit=True) as connection:
        with jobs_server(
            tmp_path, *LIVENESS, database=database_18, name="first", processors=PROCESSORS, config_text=CONFIG
        ) as first:
            name = start_job(first, table(rows), MEND)
            until_state(first, name, "DONE")
            connection.execute(
                "CREATE FUNCTION penstock.wait() RETURNS trigger LANGUAGE plpgsql"
                " AS $$ BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END $$"
            )
            connection.execute(
                "CREATE TRIGGER slow BEFORE UPDATE ON penstock.operations FOR EACH ROW EXECUTE FUNCTION penstock.wait()"
            )
            operation = reprocess(first, name)
            wait_until(lambda: operation_of(first, name, operation)["requeued"] > 0, 30)
            first.process.kill()
        assert 0 < ask(connection, "SELECT requeued FROM penstock.operations WHERE state = 'running'") < rows * 2 // 5
        connection.execute("DROP TRIGGER slow ON penstock.operations")
        with jobs_server(
            tmp_path, *LIVENESS, database=database_18, name="second", processors=PROCESSORS, config_text=CONFIG
        ) as second:
            done = until_over(second, name, operation)
            assert (done["state"], done["requeued"]) == ("DONE", rows * 2 // 5)
            assert figures(second, name) == [rows, rows, rows // 5, rows // 5, 0, 0]
        generations = "SELECT count(*) FROM penstock.outcomes WHERE generation = 1"
        assert ask(connection, generations) == rows * 2 // 5
        assert ask(connection, "SELECT max(generation) FROM penstock.outcomes") == 1
