"""Sheets over the API: so many at once, and what cannot be written is said before the answer begins."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.cli import ask
from tests.support.jobs import jobs_server, start_job, until_state
from tests.support.server import ServerProcess
from tests.support.wait import wait_until

PRICE = {"processor": "price"}


@pytest.fixture
def server(tmp_path: Path, database_18: str) -> Iterator[ServerProcess]:
    """A server that works nothing off and writes one sheet at a time."""
    with jobs_server(tmp_path, "--set", "max_exports=1", database=database_18, workers=0) as running:
        yield running


def test_so_many_sheets_at_once(server: ServerProcess, database_18: str) -> None:
    rows = b"".join(json.dumps({"note": "x" * 900_000}).encode() + b"\n" for _ in range(30))
    name = start_job(server, rows, PRICE, filename="rows.jsonl")
    until_state(server, name, "QUEUED")
    path = f"/api/jobs/{name}/export?format=jsonl"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.settimeout(30)
        client.connect(("127.0.0.1", server.port))
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"
        refused = server.ask("POST", path)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "sheets" in refused.json["error"]["message"]
    wait_until(lambda: server.ask("POST", path).status == 200, 30)
    # Its connection is gone with it, and so is the snapshot.
    held = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    with psycopg.connect(database_18, autocommit=True) as connection:
        wait_until(lambda: ask(connection, held) == 0, 30)


def test_what_excel_cannot_hold_is_refused(server: ServerProcess, database_18: str) -> None:
    name = start_job(server, b"sku\n1\n", PRICE)
    until_state(server, name, "QUEUED")
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO penstock.job_columns (batch_id, name)"
            " SELECT batch_id, 'c' || n FROM penstock.jobs, generate_series(1, 16384) AS n"
        )
    refused = server.ask("POST", f"/api/jobs/{name}/export?format=xlsx")
    assert (refused.status, refused.json["error"]["param"]) == (400, "format")
    assert "16,388 columns" in refused.json["error"]["message"]
    # Nothing is held by an answer that was not begun.
    assert server.ask("POST", f"/api/jobs/{name}/export?format=csv").status == 200
