"""The flow tests again, unchanged, with PgBouncer in transaction mode between Penstock and its database."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from penstock.config import DatabaseLimits
from penstock.db.pool import open_pool

ROOT = Path(__file__).parent.parent.parent
FLOWS = ["batches", "fence", "settle_buffer", "worker"]
ALL_FLOWS = [*FLOWS, "export", "intake", "liveness"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flows", [pytest.param(FLOWS, id="some"), pytest.param(ALL_FLOWS, id="all", marks=pytest.mark.again)]
)
def test_the_flows_pass_behind_a_pooler(flows: list[str]) -> None:
    files = [f"tests/flow/test_{name}.py" for name in flows]
    # One test ends the server's side of a connection and expects to notice; a pooler's purpose is that it does not.
    chosen = "pooled and not seal_that_never_arrived"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--server", "pooled", "-k", chosen]
    # A run of its own, not a part of this one's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [*command, *files], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


def test_a_pooler_is_noticed_and_nothing_is_prepared(pooler: str, server_18: str) -> None:
    async def thresholds() -> list[int | None]:
        found = []
        for conninfo in (pooler, server_18):
            pool = await open_pool(conninfo, DatabaseLimits())
            async with pool.connection() as connection:
                found.append(connection.prepare_threshold)
            await pool.close()
        return found

    import asyncio

    behind, direct = asyncio.run(thresholds())
    assert behind is None
    assert direct is not None
    with psycopg.connect(pooler) as connection:
        assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
