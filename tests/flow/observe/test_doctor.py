"""`penstock doctor` on real servers: silent on a sound one, and every planted fault is found with a remedy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.claim import gates, liveness
from penstock.db.embedded import postgres
from penstock.db.migrate import migrate
from penstock.worker.fuse import NOTHING_SUCCEEDED
from tests.faults.test_clock import skewed
from tests.support.cli import PENSTOCK, environment, run_cli
from tests.support.cluster import OwnCluster
from tests.support.db import connected
from tests.support.engine import claim_due, make_batch
from tests.support.mock_process import start_mock_process
from tests.support.prepared import Prepared

CANARY = "sk-CANARY-0123456789"
Findings = dict[tuple[str, str], str]
"""What was seen, by check and result; what several findings of one kind saw, one after the other."""


# Root may write everywhere; without these rights it is as any other user.
AS_USER = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()


def examine(
    *args: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    files: int = 4_000,
    under: tuple[str, ...] = (),
) -> tuple[int, Findings]:
    """Run the command with a limit of open files: its exit code, and what it found."""
    command = shlex.join(map(str, (*under, *PENSTOCK, "doctor", "--json", *args)))
    done = subprocess.run(
        ["/bin/sh", "-c", f"ulimit -n {files}; exec {command}"],
        cwd=cwd,
        env=environment(env),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CANARY" not in done.stdout + done.stderr
    assert done.stderr == ""
    told = json.loads(done.stdout)
    found: Findings = {}
    for one in told["findings"]:
        key = (one["check"], one["result"])
        found[key] = f"{found[key]}; {one['seen']}" if key in found else one["seen"]
        assert one["remedy"] or one["result"] == "ok", one
    assert told["problems"] == sum(one["result"] == "problem" for one in told["findings"])
    assert done.returncode == (1 if told["problems"] else 0)
    return done.returncode, found


def test_a_sound_installation(tmp_path: Path, prepared: Prepared) -> None:
    data_dir = prepared(tmp_path / "data")
    # Open before and after: the embedded server is not started twice.
    with postgres.acquire(data_dir) as server, start_mock_process() as mock:
        migrate(server.conninfo)
        with psycopg.connect(server.conninfo, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = on")
            connection.execute("ALTER SYSTEM SET full_page_writes = on")
            connection.execute("SELECT pg_reload_conf()")
        room = ("--set", "max_connections=100", "--set", "max_upload_bytes=1000")
        code, found = examine("--data-dir", data_dir, "--base-url", mock.base_url, *room, cwd=tmp_path)
        assert {key: seen for key, seen in found.items() if key[1] != "ok"} == {}
        assert code == 0
        assert len(found) > 14
        shown = run_cli("doctor", "--data-dir", data_dir, "--base-url", mock.base_url, *room, cwd=tmp_path).expect(0)
        assert "0 problems, 0 warnings" in shown.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OwnCluster]:
    """A server with settings that hurt, beside `fsync` and `full_page_writes`, which are off in it anyway."""
    with OwnCluster(tmp_path / "own") as cluster:
        with psycopg.connect(cluster.conninfo, autocommit=True) as connection:
            for setting in (
                *("synchronous_commit = off", "autovacuum = off", "max_connections = 24"),
                *("max_prepared_transactions = 2", "wal_level = minimal", "max_wal_senders = 0"),
            ):
                connection.execute(f"ALTER SYSTEM SET {setting}".encode())
            connection.execute("ALTER ROLE penstock SET statement_timeout = '20s'")
            connection.execute("ALTER ROLE penstock SET idle_in_transaction_session_timeout = '30s'")
        migrate(cluster.conninfo)
        cluster.stop()
        cluster.start()
        yield cluster


@contextlib.contextmanager
def held_snapshots(conninfo: str) -> Iterator[None]:
    """A transaction that is left open, and a prepared one."""
    with psycopg.connect(make_conninfo(conninfo, options="-c idle_in_transaction_session_timeout=0")) as connection:
        connection.execute("CREATE TABLE public.left_over ()")
        connection.execute("PREPARE TRANSACTION 'left over'")
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1")
        yield
        connection.rollback()


@contextlib.contextmanager
def refusing_upstream() -> Iterator[str]:
    """An upstream that likes no key; its base URL."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            serving.join()


async def plant_work(conninfo: str) -> None:
    """A halted route, one that waits, work that none has, and a worker that was lost with a lease."""
    async with connected(conninfo) as connection:
        await gates.halt(connection, "serve:main", "small", "invalid_api_key", f"said {CANARY}")
        await gates.close(connection, "serve:main", "large", 600, "rate_limit_exceeded", "later")
        await make_batch(connection, [3], pool="serve:gone")
        lost, then = UUID(int=7), datetime.now(UTC) - timedelta(hours=1)
        await liveness.register(connection, lost, "test", now=then)
        await make_batch(connection, [5], pool="test")
        assert await claim_due(connection, pool="test", wants={"model-0": 5}, worker_id=lost)
        await connection.execute("DELETE FROM penstock.migrations WHERE number = 18")


def test_planted_faults_are_found(tmp_path: Path, cluster: OwnCluster) -> None:
    asyncio.run(plant_work(cluster.conninfo))
    (tmp_path / "key").write_text(f"{CANARY}-wrong\n")
    with refusing_upstream() as base_url, held_snapshots(cluster.conninfo):
        (tmp_path / "penstock.toml").write_text(
            f'[[providers]]\nname = "away"\nbase_url = "http://127.0.0.1:9/v1"\nmodels = ["a"]\n'
            f'[[providers]]\nname = "keyless"\nbase_url = "{base_url}"\nmodels = ["b"]\n'
            f'api_key_file = "{tmp_path}/none"\n'
            f'[[providers]]\nname = "refused"\nbase_url = "{base_url}"\nmodels = ["c"]\n'
            f'api_key_file = "{tmp_path}/key"\n'
            f'[[providers]]\nname = "unknown"\nbase_url = "https://nowhere.invalid/v1"\nmodels = ["d"]\n'
        )
        _, found = examine(
            *("--config", tmp_path / "penstock.toml", "--database-url", cluster.conninfo, "--workers", "4"),
            *("--set", "old_snapshot_s=0", "--set", f"ready_max_bytes={4 << 30}"),
            *("--set", f"settle_capacity_bytes={4 << 30}", "--set", "concurrency=200"),
            cwd=tmp_path,
            env=skewed("+3600s"),
            files=256,
        )
    assert planted(found) == []


def planted(found: Findings) -> list[Any]:
    """Faults that were planted and not found."""
    wanted = [
        ("open files", "problem", "256"),
        ("memory", "problem", "settings allow up to"),
        ("clock", "problem", "3,60"),
        ("connections", "problem", "21 allowed"),
        *(
            ("settings", "problem", f"{name} is off")
            for name in ("fsync", "full_page_writes", "synchronous_commit", "autovacuum")
        ),
        ("settings", "warning", "statement_timeout of this role is 20,000 ms"),
        ("settings", "warning", "idle_in_transaction_session_timeout of this role is 30,000 ms"),
        ("snapshots", "warning", "transaction of process"),
        ("snapshots", "warning", "prepared transaction 'left over'"),
        ("migrations", "problem", "pending: 0018"),
        ("routes", "problem", "small of serve:main is halted for every owner: invalid_api_key"),
        ("routes", "warning", "large of serve:main waits"),
        ("workers", "warning", "1 silent"),
        ("leases", "warning", "of workers that are gone"),
        ("pending work", "problem", "serve:gone"),
        ("provider away", "problem", "Connection refused"),
        ("provider keyless", "problem", "none"),
        ("provider refused", "problem", "HTTP 401"),
        ("provider unknown", "problem", "nowhere.invalid"),
    ]
    return [fault for fault in wanted if fault[2] not in found.get(fault[:2], "")]


def test_newer_migrations_and_a_pooler(tmp_path: Path, database_18: str, pooler: str) -> None:
    def looked(way: str, name: str) -> Findings:
        with psycopg.connect(database_18) as connection:
            connection.execute("DELETE FROM penstock.migrations WHERE number = 9999")
            connection.execute("INSERT INTO penstock.migrations VALUES (9999, %s, '')", [name])
        return examine("--database-url", way, cwd=tmp_path)[1]

    assert "9999_future_pre" in looked(database_18, "9999_future_pre")["migrations", "warning"]
    behind = make_conninfo(pooler, dbname=conninfo_to_dict(database_18)["dbname"])
    found = looked(behind, "9999_future_post")
    assert "9999_future_post" in found["migrations", "problem"]
    assert "notices do not arrive" in found["pooler", "warning"]
    assert "no time limit behind the pooler" in found["settings", "warning"]


def test_rights_that_are_missing(tmp_path: Path, database_18: str) -> None:
    role = f"guest_{uuid4().hex}"
    with psycopg.connect(database_18, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            _, found = examine("--database-url", make_conninfo(database_18, user=role), cwd=tmp_path)
            assert f"role {role} may not use" in found["rights", "problem"]
        finally:
            connection.execute(f"DROP ROLE {role}".encode())


def test_a_data_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    wanted = tmp_path / "closed" / "data"
    code, found = examine("--data-dir", wanted, cwd=tmp_path, under=AS_USER)
    assert code == 1
    assert found["database", "problem"] == f"cannot use the data directory {wanted}: Permission denied"
    (tmp_path / "file").touch()
    found = examine("--data-dir", tmp_path / "file" / "x", cwd=tmp_path)[1]
    assert "x is not a directory" in found["database", "problem"]


def test_one_problem_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "wrong.toml").write_text("heartbeat_grace = 3\n")
    shown = run_cli("doctor", "--config", tmp_path / "wrong.toml", cwd=tmp_path).expect(1)
    assert shown.stdout.endswith("\n1 finding: 1 problem, 0 warnings\n")


def test_the_advice_for_a_halted_route_depends_on_why(tmp_path: Path, database_18: str) -> None:
    async def halt() -> None:
        async with connected(database_18) as connection:
            await gates.halt(connection, "run:1", "small", NOTHING_SUCCEEDED, "HTTP 404: nothing is served")
            await gates.halt(connection, "serve:main", "small", "invalid_api_key", "no")

    asyncio.run(halt())
    shown = run_cli("doctor", "--database-url", database_18, cwd=tmp_path).expect(1).stdout
    assert "check --base-url, the model's name or the function, then: run the same command again\n" in shown
    assert "Mend the key or the quota, then: penstock providers resume main\n" in shown


def test_no_database_and_a_wrong_file(tmp_path: Path) -> None:
    away = "postgresql://user:CANARY@127.0.0.1:9/none"
    _, found = examine("--database-url", away, cwd=tmp_path)
    assert "cannot connect" in found["database", "problem"]
    assert examine("--data-dir", tmp_path / "new", cwd=tmp_path)[0] == 0
    assert not (tmp_path / "new").exists()
    (tmp_path / "wrong.toml").write_text("heartbeat_grace = 3\n")
    _, found = examine("--data-dir", tmp_path / "new", cwd=tmp_path, env={"PENSTOCK_SECRETS_KEY": "garbage"})
    assert "PENSTOCK_SECRETS_KEY: key 1 is not 32 bytes" in found["sealing keys", "problem"]
    _, found = examine("--config", tmp_path / "wrong.toml", cwd=tmp_path)
    assert "unknown setting 'heartbeat_grace'" in found["configuration", "problem"]
