"""R7, R8, R22 over HTTP: the server is killed in the middle of an upload, its database goes away or its disk is full,
and what a worker is at work on is erased."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.db.embedded import postgres
from penstock.db.embedded.cluster import PGDATA, RESERVE
from penstock.db.embedded.keeper import find_postmaster
from tests.support.batch_api import ENDPOINT, jsonl
from tests.support.cli import request_line
from tests.support.disks import MIB, disk, mounting
from tests.support.dump import dumped
from tests.support.mock_process import start_mock_process
from tests.support.prepared import Prepared
from tests.support.server import ServerProcess, served
from tests.support.tenants import form
from tests.support.wait import wait_until

DEADLINE_S = 60.0
NOWHERE = ("--base-url", "http://127.0.0.1:9/v1")
QUICK_LIVENESS = ("--set", "heartbeat_interval_s=0.2", "--set", "heartbeat_grace_s=2")
TABLES = ("files", "file_lanes", "templates", "file_chunks", "upload_parts")


def count(database: str, *tables: str) -> dict[str, int]:
    """The rows of each table that has any."""
    with psycopg.connect(database, autocommit=True) as connection:
        counts = {
            table: connection.execute(f"SELECT count(*) FROM penstock.{table}".encode()).fetchall()[0][0]
            for table in tables
        }
    return {table: number for table, number in counts.items() if number}


# -- R7


def requests(lines: int) -> bytes:
    """Larger than one transaction of intake, as the servers below are configured."""
    return b"".join(
        json.dumps(request_line(f"r{number}", os.urandom(300).hex())).encode() + b"\n" for number in range(lines)
    )


LINES = 20_000
SMALL_COPIES = ("--set", "intake_max_rows=500")


def upload_of(way: str) -> tuple[str, str, bytes, str]:
    """Method, path, body and content type of an upload of LINES requests."""
    content = requests(LINES)
    match way:
        case "raw":
            return "PUT", "/v1/files?purpose=batch", content, "text/plain"
        case "form":
            return "POST", "/v1/files", *form({"purpose": "batch", "file": content})
        case _:
            lines = map(json.loads, content.splitlines())
            asked = [{"custom_id": line["custom_id"], "params": {**line["body"], "max_tokens": 1}} for line in lines]
            return "POST", "/v1/messages/batches", json.dumps({"requests": asked}).encode(), "application/json"


@pytest.mark.parametrize("way", ["raw", pytest.param("form", marks=pytest.mark.again), "message batch"])
def test_killed_in_the_middle_of_an_upload(tmp_path: Path, database_18: str, way: str) -> None:
    method, path, body, kind = upload_of(way)
    settings = (*NOWHERE, *QUICK_LIVENESS, *SMALL_COPIES)
    headers = {"content-type": kind, "idempotency-key": "once"}
    with served(tmp_path, *settings, database=database_18, workers=0) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        with closing(connection):
            connection.putrequest(method, path)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders(body[: len(body) // 2])
            wait_until(lambda: count(database_18, "templates"), DEADLINE_S)
            # A client that keeps everybody waiting keeps no transaction open.
            wait_until(lambda: not _in_transaction(database_18), 20)
            server.process.kill()
            with pytest.raises((http.client.HTTPException, OSError)):
                connection.getresponse()
    assert count(database_18, "files", "templates")
    with served(tmp_path, *settings, database=database_18, workers=0) as server:
        # Nobody has heard of the half of it, and it is in nobody's way.
        assert server.ask("GET", "/v1/files").json["data"] == []
        assert server.ask("GET", "/v1/messages/batches").json["data"] == []
        made = [server.ask(method, path, body, headers=headers) for _ in range(2)]
        assert [answer.status for answer in made] == [200, 200], made[0].content
        assert made[0].json["id"] == made[1].json["id"]
        # The input of a message batch belongs to the batch: nobody sees it among the files.
        listed = server.ask("GET", "/v1/files").json["data"]
        assert len(listed) == (0 if way == "message batch" else 1)
        wait_until(
            lambda: count(database_18, *TABLES).get("templates") == LINES and count(database_18, "files")["files"] == 1,
            DEADLINE_S,
        )
        for file in listed:
            stored = server.ask("GET", f"/v1/files/{file['id']}/content").content
            assert len(stored.splitlines()) == LINES
            assert way != "raw" or stored == body
        with psycopg.connect(database_18) as db:
            assert db.execute("SELECT DISTINCT source_id FROM penstock.file_chunks").fetchall() == (
                db.execute("SELECT source_id FROM penstock.files").fetchall()
            )


def _in_transaction(database: str) -> bool:
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with psycopg.connect(database, autocommit=True) as connection:
        row = connection.execute(f"SELECT 1 {others} AND state LIKE 'idle in%'".encode()).fetchone()
    return row is not None


def test_killed_in_the_middle_of_a_part(tmp_path: Path, database_18: str) -> None:
    settings = (*NOWHERE, *QUICK_LIVENESS)
    content = os.urandom(8 * MIB)
    body, kind = form({"data": content})
    opened = {"bytes": len(content), "filename": "f", "mime_type": "text/plain", "purpose": "user_data"}
    with served(tmp_path, *settings, database=database_18, workers=0) as server:
        upload = server.ask("POST", "/v1/uploads", opened).json["id"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
        with closing(connection):
            connection.putrequest("POST", f"/v1/uploads/{upload}/parts")
            connection.putheader("content-type", kind)
            connection.putheader("content-length", str(len(body)))
            connection.endheaders(body[: 6 * MIB])
            wait_until(lambda: count(database_18, "file_chunks"), DEADLINE_S)
            server.process.kill()
    with served(tmp_path, *settings, database=database_18, workers=0) as server:
        part = server.ask("POST", f"/v1/uploads/{upload}/parts", body, headers={"content-type": kind}).json["id"]
        done = server.ask("POST", f"/v1/uploads/{upload}/complete", {"part_ids": [part]})
        assert done.status == 200, done.content
        file_id = done.json["file"]["id"]
        assert server.ask("GET", f"/v1/files/{file_id}/content").content == content
        server.ask("DELETE", f"/v1/files/{file_id}")
        wait_until(lambda: not count(database_18, *TABLES), DEADLINE_S)


# -- the database is stopped and started again


@contextmanager
def stopped(directory: Path) -> Iterator[None]:
    """PostgreSQL shut down at once, and kept down for the length of the block."""
    postmaster = find_postmaster(str(directory / PGDATA))
    assert postmaster is not None
    process = psutil.Process(postmaster.pid)
    keeper = process.parent()
    assert keeper is not None
    keeper.suspend()
    try:
        os.kill(postmaster.pid, signal.SIGQUIT)
        wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, DEADLINE_S)
        yield
    finally:
        keeper.resume()


def test_the_database_is_stopped_and_started_under_the_server(tmp_path: Path, prepared: Prepared) -> None:
    with (
        postgres.acquire(prepared(tmp_path / "pg")) as own,
        start_mock_process("--latency", "200ms") as mock,
        served(
            tmp_path,
            *("--base-url", mock.base_url, "--set", "connect_wait_s=0.3", "--set", "concurrency=8"),
            database=make_conninfo(own.conninfo),
        ) as server,
    ):
        put = ("PUT", "/v1/files?purpose=batch", jsonl(100))
        file_id = server.ask(*put).json["id"]
        asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        batch_id = server.ask("POST", "/v1/batches", asked).json["id"]
        path = f"/v1/batches/{batch_id}"
        wait_until(lambda: server.ask("GET", path).json["request_counts"]["completed"] > 0, DEADLINE_S)
        with stopped(tmp_path / "pg"):
            wait_until(lambda: server.ask("GET", "/readyz").status == 503, DEADLINE_S)
            assert server.ask("GET", "/readyz").json["checks"]["database"] == "failed"
            assert server.ask("GET", "/healthz").status == 200
            for way in (
                ("GET", "/v1/files"),
                ("GET", path),
                ("GET", f"{path}?wait=5"),
                ("GET", f"/v1/files/{file_id}/content"),
                ("GET", f"{path}/events"),
                ("GET", "/v1/messages/batches"),
                ("POST", "/v1/batches", asked),
                ("DELETE", path),
                put,
            ):
                answer = server.ask(*way)
                assert (answer.status, answer.headers.get("retry-after")) == (503, "1"), (way[:2], answer.content)
        wait_until(lambda: server.ask("GET", "/readyz").status == 200, DEADLINE_S)
        wait_until(lambda: server.ask("GET", path).status == 200, DEADLINE_S)
        wait_until(lambda: server.ask("GET", path).json["status"] == "completed", DEADLINE_S)
        ended = server.ask("GET", path).json
        assert ended["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
        assert server.ask(*put).status == 200
        assert server.process.alive
        assert "Traceback" not in server.log


# -- R8


@mounting
def test_the_disk_is_full(tmp_path: Path) -> None:
    """The server says so and takes nothing in; with room again it goes on by itself."""
    data = disk(tmp_path / "data", 320 * MIB)
    content = requests(2_000)
    with served(tmp_path, *NOWHERE, *SMALL_COPIES, workers=0) as server:
        kept = server.ask("PUT", "/v1/files?purpose=batch", jsonl(10)).json["id"]
        unwanted = [server.ask("PUT", "/v1/files?purpose=batch", jsonl(100)).json["id"] for _ in range(5)]
        wait_until((data.path / RESERVE).exists, DEADLINE_S)
        data.fill()
        wait_until(lambda: server.ask("GET", "/readyz").status == 503, DEADLINE_S)
        assert server.ask("GET", "/readyz").json["checks"]["disk"] == "failed"
        refused = server.ask("PUT", "/v1/files?purpose=batch", content)
        assert refused.status == 507, refused.content
        assert refused.json["error"]["code"] == "disk_full"
        assert refused.headers["retry-after"]
        # Deleting works when nothing else does, and ends.
        for file_id in unwanted:
            assert server.ask("DELETE", f"/v1/files/{file_id}").status == 200
        erasures = server.ask("GET", "/v1/erasures").json["data"]
        assert {each["object_id"] for each in erasures} == set(unwanted)
        wait_until(
            lambda: {each["status"] for each in server.ask("GET", "/v1/erasures").json["data"]} == {"finished"},
            DEADLINE_S,
        )
        # Looking costs no room.
        assert [file["id"] for file in server.ask("GET", "/v1/files").json["data"]] == [kept]
        data.make_room()
        wait_until(lambda: server.ask("GET", "/readyz").status == 200, DEADLINE_S)
        assert server.ask("PUT", "/v1/files?purpose=batch", content).status == 200
        assert len(server.ask("GET", "/v1/files").json["data"]) == 2
        assert "Traceback" not in server.log


FULL = """
    CREATE FUNCTION penstock.find_no_room() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF (pg_stat_file('{reserve}', true)).size IS NOT NULL THEN
            RAISE EXCEPTION 'no space left' USING ERRCODE = 'disk_full';
        END IF;
        RETURN CASE TG_OP WHEN 'DELETE' THEN OLD ELSE NEW END;
    END $$;
"""
FULL_TABLE = (
    "CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE OR DELETE ON penstock.{} FOR EACH ROW EXECUTE FUNCTION"
    " penstock.find_no_room()"
)


def test_what_frees_room_or_protects_has_the_room_kept_for_it(tmp_path: Path, database_18: str) -> None:
    """The disk is full for the tables below, until the room is given."""
    reserve = tmp_path / "data" / RESERVE
    content, kind = form({"data": b"abc"})
    asked = {"bytes": 3, "filename": "f", "mime_type": "text/plain", "purpose": "user_data"}
    with (
        served(tmp_path, *NOWHERE, *QUICK_LIVENESS, database=database_18, workers=0) as server,
        psycopg.connect(database_18, autocommit=True) as connection,
    ):
        key = server.ask("POST", "/v1/keys", {"owner": "local", "role": "admin"}).json["key"]
        other = server.ask("POST", "/v1/keys", {"owner": "other"}, key=key).json["id"]
        upload = f"/v1/uploads/{server.ask('POST', '/v1/uploads', asked, key=key).json['id']}"
        part = server.ask("POST", f"{upload}/parts", content, headers={"content-type": kind}, key=key)
        assert part.status == 200, part.content
        connection.execute(FULL.format(reserve=reserve).encode())
        for table in ("uploads", "api_keys", "file_chunks"):
            connection.execute(FULL_TABLE.format(table).encode())
        reserve.parent.mkdir(exist_ok=True)
        reserve.touch()
        assert server.ask("POST", "/v1/uploads", asked, key=key).status == 507
        assert reserve.exists()
        for way in (f"/v1/keys/{other}/revoke", f"{upload}/cancel"):
            reserve.touch()
            assert server.ask("POST", way, key=key).status == 200, way
            assert not reserve.exists()
        reserve.touch()  # the parts are deleted by a duty, which finds no room either
        wait_until(lambda: not count(database_18, "file_chunks"), DEADLINE_S)


def test_a_limit_on_requests_is_no_way_into_a_full_disk(tmp_path: Path, database_18: str) -> None:
    """Counting a request takes room too: one that frees room, or protects, has it from what is kept."""
    reserve = tmp_path / "data" / RESERVE
    limited = ("--set", "owner_requests_per_minute=20")  # each is counted by itself
    with (
        served(tmp_path, *NOWHERE, *limited, database=database_18, workers=0) as server,
        psycopg.connect(database_18, autocommit=True) as connection,
    ):
        key = server.ask("POST", "/v1/keys", {"owner": "local", "role": "admin"}).json["key"]
        other = server.ask("POST", "/v1/keys", {"owner": "other"}, key=key).json["id"]
        file_id = server.ask("PUT", "/v1/files?purpose=batch", jsonl(1), key=key).json["id"]
        connection.execute(FULL.format(reserve=reserve).encode())
        connection.execute(FULL_TABLE.format("request_counts").encode())
        reserve.parent.mkdir(exist_ok=True)
        for way in (("DELETE", f"/v1/files/{file_id}"), ("POST", f"/v1/keys/{other}/revoke")):
            reserve.touch()
            assert server.ask("GET", "/v1/files", key=key).status == 507
            assert reserve.exists()
            freed = server.ask(*way, key=key)
            assert freed.status == 200, (way, freed.content)
            assert not reserve.exists()


# -- R22

CANARY = "CANARY-of-the-erased"


def send_canaries(server: ServerProcess, lines: int) -> tuple[str, str]:
    """A batch that says who it is wherever it can: its file's and its own id."""
    wanted = (request_line(f"{CANARY}-{number}", f"{CANARY} {number}") for number in range(lines))
    content = "".join(json.dumps(line) + "\n" for line in wanted).encode()
    file_id = server.ask("PUT", f"/v1/files?purpose=batch&filename={CANARY}.jsonl", content).json["id"]
    asked = {
        "input_file_id": file_id,
        "endpoint": ENDPOINT,
        "completion_window": "24h",
        "metadata": {CANARY: CANARY},
    }
    return file_id, server.ask("POST", "/v1/batches", asked).json["id"]


@pytest.mark.parametrize("declared_dead", [False, True], ids=["in time", "declared dead"])
def test_what_a_frozen_worker_is_at_work_on_is_erased(tmp_path: Path, database: str, declared_dead: bool) -> None:
    """It wakes with answers in its hands to what nobody may know any more: none of them is stored."""
    liveness = QUICK_LIVENESS if declared_dead else ()
    throttle = ("--set", "purge_throttle_ms=0", "--set", "concurrency=8")
    with (
        start_mock_process("--latency", "1s") as mock,
        served(tmp_path, "--base-url", mock.base_url, *liveness, *throttle, database=database) as server,
    ):
        file_id, batch_id = send_canaries(server, 40)
        wait_until(lambda: server.ask("GET", f"/v1/batches/{batch_id}").json["request_counts"]["completed"], DEADLINE_S)
        wait_until(lambda: mock.stats()["in_flight"] == 8, DEADLINE_S)
        (worker,) = (psutil.Process(pid) for pid in server.worker_pids)
        worker.suspend()
        try:
            assert count(database, "outcomes", "leases")
            assert CANARY.encode() in dumped(database)
            assert server.ask("DELETE", f"/v1/files/{file_id}").status == 200
            assert server.ask("GET", f"/v1/files/{file_id}").status == 404
            assert server.ask("GET", f"/v1/files/{file_id}/content").status == 404
            cancelled = server.ask("GET", f"/v1/batches/{batch_id}").json
            assert (cancelled["status"], cancelled["input_file_id"]) == ("cancelled", None)
            # What was recorded so far can still be had, until the batch is deleted too.
            output = server.ask("GET", f"/v1/files/{cancelled['output_file_id']}/content")
            assert len(output.content.splitlines()) == cancelled["request_counts"]["completed"] > 0
            assert server.ask("DELETE", f"/v1/batches/{batch_id}").status == 200
            for path in (f"/v1/batches/{batch_id}", f"/v1/files/{cancelled['output_file_id']}/content"):
                assert server.ask("GET", path).status == 404
            wait_until(lambda: mock.stats()["in_flight"] == 0, DEADLINE_S)
            if declared_dead:
                wait_until(lambda: "took back" in server.log or not count(database, "leases"), DEADLINE_S)
        finally:
            worker.resume()
        # The same worker does the next batch, so that it has said by then what it had to say about the last one.
        other = server.ask("PUT", "/v1/files?purpose=batch", jsonl(8)).json["id"]
        asked = {"input_file_id": other, "endpoint": ENDPOINT, "completion_window": "24h"}
        path = f"/v1/batches/{server.ask('POST', '/v1/batches', asked).json['id']}"
        wait_until(lambda: server.ask("GET", path).json["status"] == "completed", DEADLINE_S)
        wait_until(
            lambda: all(one["status"] == "finished" for one in server.ask("GET", "/v1/erasures").json["data"]),
            DEADLINE_S,
        )
        with suppress(psutil.NoSuchProcess):
            assert worker.is_running()
        assert count(database, "outcomes", "attempts", "leases", "deferrals") == {"outcomes": 8}
        assert count(database, "templates")["templates"] == 8
        assert CANARY.encode() not in dumped(database)
        assert server.stop() == 0
        assert CANARY not in server.log
        assert CANARY.encode() not in dumped(database)
