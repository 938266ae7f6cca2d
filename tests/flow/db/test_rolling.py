"""A rolling upgrade: workers from before and of now on one database, between the pre steps and the post steps (R30)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from penstock.batches import create
from penstock.batches.create import create_batch
from penstock.batches.finish import finish_batches
from penstock.batches.read import get_batch
from penstock.batches.upkeep import refresh_places
from penstock.claim import claim as claims
from penstock.claim import liveness
from penstock.config import LivenessLimits
from penstock.db import migrate as migrations
from penstock.db import sql
from penstock.db.migrate import migrate
from penstock.db.pool import Connection
from penstock.model import Again, BatchState, Lease, Outcome, OutcomeState
from penstock.settle import write
from penstock.settle.write import Changes, settle
from tests.support.db import one, with_connection
from tests.support.engine import claim_due, make_file
from tests.support.thorough import some

_OLD = sql.parse("before_turns.sql", (Path(__file__).parents[2] / "support/before_turns.sql").read_text())
_POOL, _ROUTE, _LINES = "test", "model-0", 200
_DONE = Outcome(OutcomeState.COMPLETED, b"1", 200)


@pytest.fixture
def upgraded(server_18: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database that was made by the version before, and has had the pre steps since."""
    available = migrations.list_migrations()
    with psycopg.connect(server_18, autocommit=True) as connection:
        connection.execute("CREATE DATABASE rolling")
        conninfo = make_conninfo(server_18, dbname="rolling")
        pre = [step for step in available if step.phase == "pre"]
        for steps in ([step for step in available if step.number < 9], pre):
            with monkeypatch.context() as before:
                before.setattr(migrations, "list_migrations", lambda steps=steps: steps)
                applied = migrate(conninfo)
        assert all(step.name.endswith("_pre") for step in applied)
        yield conninfo
        connection.execute("DROP DATABASE rolling WITH (FORCE)")


@contextmanager
def _of_before(monkeypatch: pytest.MonkeyPatch, old: bool) -> Iterator[None]:
    with monkeypatch.context() as patched:
        if old:
            for module in (write, create, liveness):
                statements = {statement.name: statement for statement in (*module._SQL, *_OLD)}
                patched.setattr(module, "_SQL", sql.Statements("before", statements))
        yield


async def _claim(connection: Connection, worker: UUID, want: int, *, old: bool) -> list[Lease]:
    if not old:
        return await claim_due(connection, pool=_POOL, wants={_ROUTE: want}, worker_id=worker, taper_floor=want)
    parameters = {
        "pool": _POOL,
        "routes": [_ROUTE],
        "wants": [want],
        "worker": worker,
        "taper_floor": want,
        "suspect_ok": True,
        "now": None,
    }
    cursor = await connection.execute(_OLD["claim_open"], parameters)
    return [claims.as_lease((*row, 0, 0)) for row in await cursor.fetchall()]


@pytest.mark.parametrize("seed", some(range(3), 1))
def test_old_and_new_workers_share_the_work(upgraded: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)

    async def body(connection: Connection) -> None:
        ids: list[UUID] = []
        for old in (True, False, True):
            file_id = await make_file(connection, [_LINES])
            with _of_before(monkeypatch, old):
                ids.append(await create_batch(connection, file_id=file_id, owner="local", pool=_POOL))
        worker, called = uuid4(), 0
        while True:
            await refresh_places(connection, limit=10)
            leases = await _claim(connection, worker, chance.randint(1, 40), old=chance.random() < 0.5)
            leases = leases or await _claim(connection, worker, 10, old=False)
            if not leases:
                break
            if chance.random() < 0.2:
                # The worker is not registered: whoever looks takes what it holds.
                with _of_before(monkeypatch, chance.random() < 0.5):
                    await liveness.reclaim(connection, uuid4(), LivenessLimits(max_reclaims=100), stuck_s=60.0)
                continue
            changes = Changes()
            for lease in leases:
                for ordinal in claims.first_ordinals(lease.ranges, 1_000):
                    called += 1
                    if chance.random() < 0.2:
                        changes.agains.append((lease, ordinal, Again("busy", "later", 0.0, False)))
                    else:
                        changes.outcomes.append((lease, ordinal, ordinal + 1, "c", _DONE))
            with _of_before(monkeypatch, chance.random() < 0.5):
                await settle(connection, worker, changes)
        assert await finish_batches(connection, ids) == set(ids)
        for batch_id in ids:
            batch = await get_batch(connection, batch_id, None)
            assert batch is not None
            assert (batch.state, batch.counts.completed) == (BatchState.COMPLETED, _LINES)
        assert await one(connection, "SELECT count(*) FROM penstock.outcomes") == (3 * _LINES,)
        left = "SELECT (SELECT count(*) FROM penstock.leases) + (SELECT count(*) FROM penstock.deferrals)"
        assert await one(connection, left) == (0,)
        assert called > 3 * _LINES

    with_connection(upgraded, body)
