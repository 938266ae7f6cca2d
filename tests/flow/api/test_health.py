"""`/readyz`: red with a reason for whatever is missing, and green again once it is there; `/healthz` stays green."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psycopg

from penstock.db.embedded import postgres
from tests.support.prepared import Prepared
from tests.support.processes import Processes
from tests.support.server import ServerProcess, served, start_server
from tests.support.wait import wait_until

DEADLINE_S = 60.0
UPSTREAM = ("--base-url", "http://127.0.0.1:9/v1")


def readiness(server: ServerProcess) -> dict[str, Any]:
    answer = server.ask("GET", "/readyz")
    told: dict[str, Any] = answer.json
    assert (answer.status == 200) == (told["status"] == "ready") == (told["reasons"] == [])
    return told


def becomes(server: ServerProcess, **checks: str) -> dict[str, Any]:
    """What it says once these checks are so; all others are as they should be."""
    wanted = {"database": "ok", "connections": "ok", "migrations": "ok", "disk": "ok", **checks}
    told: dict[str, Any] = {}

    def is_so() -> bool:
        told.update(readiness(server))
        return bool(told["checks"] == wanted)

    wait_until(is_so, DEADLINE_S)
    return told


def test_connections_and_migrations(tmp_path: Path, database_18: str) -> None:
    with (
        served(tmp_path, *UPSTREAM, "--set", "api_pool_max=2", database=database_18, workers=0) as server,
        psycopg.connect(database_18) as holder,
        ThreadPoolExecutor() as callers,
    ):
        holder.execute("LOCK TABLE penstock.files IN ACCESS EXCLUSIVE MODE")
        waiting = [callers.submit(server.ask, "GET", "/v1/files") for _ in range(2)]
        try:
            assert becomes(server, connections="failed")["reasons"] == [
                "no database connection was free, for calls within a second or for uploads"
            ]
            assert server.ask("GET", "/healthz").status == 200
        finally:
            holder.rollback()
        assert [one.result().status for one in waiting] == [200, 200]
        assert becomes(server)["status"] == "ready"

        holder.execute("CREATE TEMPORARY TABLE kept AS SELECT * FROM penstock.migrations WHERE number = 1")
        holder.execute("DELETE FROM penstock.migrations WHERE number = 1")
        holder.commit()
        assert becomes(server, migrations="failed")["reasons"] == ["migrations are missing: penstock db migrate"]
        holder.execute("INSERT INTO penstock.migrations SELECT * FROM kept")
        holder.commit()
        becomes(server)


def test_too_little_room(tmp_path: Path, prepared: Prepared) -> None:
    prepared(tmp_path / "data")
    with Processes(tmp_path) as processes:
        room = ("--set", f"min_free_bytes={1 << 40}")
        server = ServerProcess(start_server(processes, tmp_path, *UPSTREAM, *room, workers=0), 0)
        wait_until(lambda: server.listens, DEADLINE_S)
        told = becomes(server, disk="failed")
        assert told["reasons"] == ["less than min_free_bytes is free on the disk of the data directory"]
        assert server.ask("GET", "/healthz").status == 200
        refused = server.ask("PUT", "/v1/files?purpose=user_data", b"x")
        assert (refused.status, refused.json["error"]["code"]) == (507, "disk_full")
        assert server.ask("GET", "/v1/files").json["data"] == []
        server.close_clients()


def test_no_connection_for_uploads(tmp_path: Path, prepared: Prepared) -> None:
    """The API has its connections, and others have all the rest."""
    prepared(tmp_path / "data")
    with (
        served(tmp_path, *UPSTREAM, workers=0) as server,
        postgres.acquire(tmp_path / "data") as database,
        ExitStack() as stack,
    ):
        assert server.ask("GET", "/v1/files").status == 200

        def none_is_left() -> bool:
            """Take all there are, with those that the server has let go of since."""
            with suppress(psycopg.OperationalError):
                while True:
                    stack.enter_context(closing(psycopg.connect(database.conninfo)))
            return bool(readiness(server)["checks"]["connections"] == "failed")

        wait_until(none_is_left, DEADLINE_S)
        told = becomes(server, connections="failed")
        assert told["reasons"] == ["no database connection was free, for calls within a second or for uploads"]
        assert server.ask("PUT", "/v1/files?purpose=user_data", b"x").status == 503
        assert server.ask("GET", "/v1/files").status == 200
        stack.close()
        becomes(server)
        assert server.ask("PUT", "/v1/files?purpose=user_data", b"x").status == 200
