"""The flow tests again, unchanged, with PgBouncer in transaction mode between Penstock and its database."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from penstock.config import DatabaseLimits, LivenessLimits
from penstock.db.pool import open_pool
from penstock.worker.heartbeat import Heartbeat
from tests.support.db import RUNNING_18
from tests.support.wait import wait_until

ROOT = Path(__file__).parents[3]
FLOWS = ["settle/test_fence", "settle/test_settle_buffer", "worker/test_worker"]
ALL_FLOWS = [*FLOWS, "batches/test_batches", "export/test_export", "intake/test_intake", "worker/test_liveness"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flows", [pytest.param(FLOWS, id="some"), pytest.param(ALL_FLOWS, id="all", marks=pytest.mark.again)]
)
def test_the_flows_pass_behind_a_pooler(flows: list[str], server_18: str) -> None:
    files = [f"tests/flow/{name}.py" for name in flows]
    # One test ends the server's side of a connection and expects to notice; a pooler's purpose is that it does not.
    chosen = "pooled and not seal_that_never_arrived"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--server", "pooled", "-k", chosen]
    # A run of its own, not a part of this one's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env[RUNNING_18] = server_18
    run = subprocess.run(
        [*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


def test_nothing_is_set_in_sessions_that_others_get_next(pooler: str, database_18: str) -> None:
    """A pool and a heart of ours leave the pooler's server connections as they found them. The pooler sees to the
    application's name."""
    behind = make_conninfo(pooler, dbname=conninfo_to_dict(database_18)["dbname"])
    settings = (
        b"SELECT name, setting FROM pg_settings WHERE source = 'session' AND name <> 'application_name' ORDER BY 1"
    )

    async def use_the_pooler() -> None:
        pool = await open_pool(behind, DatabaseLimits(statement_timeout_s=7), planned_once=True)
        async with pool.connection() as connection:
            await connection.execute("SELECT 1")
        await pool.close()

    with psycopg.connect(behind, autocommit=True) as connection:
        before = connection.execute(settings).fetchall()
    asyncio.run(use_the_pooler())
    heart = Heartbeat(behind, uuid4(), LivenessLimits())
    heart.start()
    wait_until(lambda: heart.declared_dead, 30)
    with psycopg.connect(behind, autocommit=True) as connection:
        assert connection.execute(settings).fetchall() == before


def test_a_pooler_is_noticed_and_nothing_is_prepared(pooler: str, server_18: str) -> None:
    async def thresholds() -> list[int | None]:
        found = []
        for conninfo in (pooler, server_18):
            pool = await open_pool(conninfo, DatabaseLimits())
            async with pool.connection() as connection:
                found.append(connection.prepare_threshold)
            await pool.close()
        return found

    behind, direct = asyncio.run(thresholds())
    assert behind is None
    assert direct is not None
    with psycopg.connect(pooler) as connection:
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
