"""A scan costs the files it lists, and a page of records its rows, however many files there ever were."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack

import pytest

from penstock.adapters import files
from penstock.adapters.source import FoundFile
from penstock.db.pool import Connection
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Session

_FEW, _MANY = 1_000, 30_000
_PAGE = 20
_RECORDS = """
    INSERT INTO penstock.ingested_files (id, adapter, path, version, bytes, owner, batch_id, recorded_at)
    SELECT lpad(to_hex(n), 32, '0')::uuid, 'drop-' || n %% 3, 'in/' || n || '.csv', 'v', 1, 'owner-' || n %% 5,
           gen_random_uuid(), now()
      FROM generate_series(1, %(count)s) AS n
"""
_SIGHTINGS = """
    INSERT INTO penstock.sighted_files (adapter, path, version, since, seen_at)
    SELECT 'drop-' || n %% 3, 'new/' || n || '.csv', 'v', now(), now() FROM generate_series(1, %(count)s) AS n
"""

Operation = Callable[[Connection], Awaitable[object]]


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[list[Session]]:
    with ExitStack() as stack:
        sessions = []
        for count in (_FEW, _MANY):
            session = stack.enter_context(fresh_database(any_server))
            session.execute("ANALYZE")
            for statement in (_RECORDS, _SIGHTINGS):
                session.execute(statement, {"count": count})
            sessions.append(session)
        yield sessions


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def sizes(request: pytest.FixtureRequest, built: list[Session]) -> list[Session]:
    for session in built:
        inform(session, request.param)
    return built


async def sight_known(connection: Connection) -> object:
    listed = [FoundFile(f"in/{number}.csv", "v", 1) for number in range(3, 3 + 3 * _PAGE, 3)]
    assert await files.sight_files(connection, "drop-0", listed) == []
    return None


async def sight_new(connection: Connection) -> object:
    listed = [FoundFile(f"new/{number}.csv", "v", 1) for number in range(3, 3 + 3 * _PAGE, 3)]
    assert len(await files.sight_files(connection, "drop-0", listed)) == _PAGE
    return None


async def set_one_aside(connection: Connection) -> object:
    return await files.set_aside(connection, "drop-0", "owner-1", FoundFile("new/3.csv", "v", 1), "why")


async def list_all(connection: Connection) -> object:
    assert len(await files.list_files(connection, owner=None, after=None, limit=_PAGE)) == _PAGE
    return None


async def list_own(connection: Connection) -> object:
    assert len(await files.list_files(connection, owner="owner-2", after=None, limit=_PAGE)) == _PAGE
    return None


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    "operation", [sight_known, sight_new, set_one_aside, list_all, list_own], ids=lambda operation: operation.__name__
)
def test_cost_follows_what_is_asked(sizes: list[Session], operation: Operation, mode: Mode) -> None:
    few, many = (session.explain(operation, mode) for session in sizes)
    for plan in (few, many):
        assert not plan.scanned_whole() & {"ingested_files", "sighted_files"}, plan
    # Indexes are a level or two deeper.
    assert many.buffers <= 2 * few.buffers + 20, f"{few}\n{many}"
