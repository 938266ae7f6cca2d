"""Charts cost what they show, and summing samples up what is summed up: other batches' samples do not count."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from penstock.batches import samples
from penstock.db import sql
from penstock.db.pool import Connection
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Session

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
BATCH = UUID(int=2**127)
_SQL = sql.load("penstock.batches", "samples.sql")
_ERASE = sql.load("penstock.erase", "erase.sql")
_LEFTOVERS = sql.load("penstock.erase", "leftovers.sql")

_FILL = (
    "INSERT INTO penstock.samples (batch_id, resolution_s, at, completed, failed, not_found, skipped, retried, refused,"
    "  input_tokens, output_tokens, latency)"
    " SELECT b, resolution, %(now)s - make_interval(secs => n * greatest(resolution, 1)), 1, 0, 0, 0, 0, 0, 0, 0, '{1}'"
    "   FROM {batches}, (VALUES (0), (1), (10), (60)) AS r (resolution), generate_series(1, 50) AS n"
)
_SUBJECT = "unnest(ARRAY[%(batch)s::uuid]) AS b"
_NEIGHBOURS = "(SELECT gen_random_uuid() AS b FROM generate_series(1, %(many)s)) AS others"

Operation = Callable[[Connection], Awaitable[object]]


async def read_chart(connection: Connection) -> None:
    points = await samples.read_points(connection, BATCH, NOW - timedelta(seconds=50), NOW, 1, now=NOW)
    assert len(points) == 50 + 5


async def find_span(connection: Connection) -> None:
    assert await samples.find_span(connection, BATCH) is not None


async def list_to_roll_up(connection: Connection) -> None:
    for fine_s in (0, 1, 10):
        parameters = {"fine_s": fine_s, "kept_s": 10, "limit": 20, "now": NOW}
        assert len(await (await connection.execute(_SQL["list_to_roll_up"], parameters)).fetchall()) == 20


async def roll_up(connection: Connection) -> None:
    before = NOW - timedelta(seconds=20)
    parameters = {"batch_id": BATCH, "fine_s": 1, "coarse_s": 10, "before": before, "stretch_s": 1_000}
    assert (await connection.execute(_SQL["roll_up_samples"], parameters)).rowcount == 3


async def erase_samples(connection: Connection) -> None:
    parameters = {"batch_id": BATCH, "next": 0, "total": 1, "rows": 50}
    assert await (await connection.execute(_ERASE["erase_samples"], parameters)).fetchone() == (0, 50)


async def find_next_sampled(connection: Connection) -> None:
    row = await (await connection.execute(_LEFTOVERS["find_next_sampled_batch"], {"after": UUID(int=0)})).fetchone()
    assert row is not None


OPERATIONS: tuple[Operation, ...] = (
    *(read_chart, find_span, list_to_roll_up, roll_up, erase_samples, find_next_sampled),
)


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[Session, Session]]:
    with fresh_database(any_server) as small, fresh_database(any_server) as large:
        for session, many in ((small, 20), (large, 400)):
            session.execute("ANALYZE")
            for batches in (_SUBJECT, _NEIGHBOURS):
                fill = _FILL.replace("{batches}", batches)
                session.execute(fill, {"now": NOW, "batch": BATCH, "many": many})
        yield small, large


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def sessions(request: pytest.FixtureRequest, built: tuple[Session, Session]) -> tuple[Session, Session]:
    for session in built:
        inform(session, request.param)
    return built


@pytest.mark.parametrize("mode", [Mode.CUSTOM, Mode.GENERIC])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_other_batches_cost_nothing(sessions: tuple[Session, Session], operation: Operation, mode: Mode) -> None:
    small, large = (session.explain(operation, mode) for session in sessions)
    assert large.buffers <= 2 * small.buffers + 60, f"{small.buffers} buffers became {large.buffers}:\n{large}"
    assert large.rows_handled <= 2 * small.rows_handled + 20, f"{small.rows_handled} rows became:\n{large}"
    assert not large.scanned_whole(), f"{large}"
