"""Checks of an owner's limits cost what that owner has, however much the others do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.db import sql
from penstock.db.pool import Connection
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Session

_SQL = sql.load("penstock.quotas", "quotas.sql")
_MINE, _FEW, _MANY = 20, 600, 20_000

# Every batch has its file; mine are the first, and every owner has an open upload with a part.
_CROWD = (
    "INSERT INTO penstock.files (id, owner, filename, worker_id, state, created_at, sealed_at, purpose, bytes)"
    " SELECT lpad(to_hex(n), 32, '0')::uuid, CASE WHEN n <= %(mine)s THEN 'me' ELSE 'owner-' || n %% 5 END, 'f',"
    "        gen_random_uuid(), 'ready', now(), now(), 'batch', 3 FROM generate_series(1, %(count)s) AS n",
    "INSERT INTO penstock.batches (id, owner, file_id, pool, dialect, total, created_at, validated_at)"
    " SELECT id, owner, id, 'serve', 'openai', 1, now(), now() FROM penstock.files",
    "INSERT INTO penstock.uploads (id, owner, filename, purpose, mime_type, bytes, created_at, expires_at)"
    " SELECT id, owner, 'f', 'batch', 'm', 1, now(), now() + interval '1 day' FROM penstock.files",
    "INSERT INTO penstock.upload_parts (upload_id, id, source_id, bytes, chunks, digest, created_at)"
    " SELECT id, gen_random_uuid(), 0, 2, 1, sha256('x'), now() FROM penstock.uploads",
    "INSERT INTO penstock.files (id, owner, filename, worker_id, state, created_at)"
    " SELECT gen_random_uuid(), owner, 'f', gen_random_uuid(), 'ingesting', now() FROM penstock.files",
    "INSERT INTO penstock.reservations (file_id, owner, bytes)"
    " SELECT id, owner, 1 FROM penstock.files WHERE state = 'ingesting'",
)


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[list[Session]]:
    with ExitStack() as stack:
        found = []
        for count in (_FEW, _MANY):
            session = stack.enter_context(fresh_database(any_server))
            session.execute("ANALYZE")
            for statement in _CROWD:
                session.execute(statement, {"mine": _MINE, "count": count})
            found.append(session)
        yield found


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def crowds(request: pytest.FixtureRequest, built: list[Session]) -> list[Session]:
    for session in built:
        inform(session, request.param)
    return built


async def count_open_batches(connection: Connection) -> None:
    cursor = await connection.execute(_SQL["count_open_batches"], {"owner": "me", "most": 1_000})
    assert await cursor.fetchone() == (_MINE,)


async def read_stored_bytes(connection: Connection) -> None:
    cursor = await connection.execute(_SQL["read_stored_bytes"], {"owner": "me", "now": None})
    assert await cursor.fetchone() == (_MINE * (3 + 2 + 1),)


async def read_use(connection: Connection) -> None:
    cursor = await connection.execute(_SQL["read_use"], {"owner": "me", "now": None})
    assert await cursor.fetchone() == (0, _MINE * 6, 0)


@pytest.mark.parametrize("mode", list(Mode), ids=str)
@pytest.mark.parametrize("operation", [count_open_batches, read_stored_bytes, read_use], ids=lambda one: one.__name__)
def test_cost_follows_what_the_owner_has(crowds: list[Session], operation: object, mode: Mode) -> None:
    few, many = (session.explain(operation, mode) for session in crowds)  # type: ignore[arg-type]
    assert many.buffers <= 2 * few.buffers + 20, f"{few.buffers} buffers became {many.buffers}:\n{many}"
