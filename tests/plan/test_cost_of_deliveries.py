"""Webhooks cost what is due, whatever was delivered before and however many endpoints others have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import UUID

import pytest

from penstock.db import sql
from penstock.db.pool import Connection
from penstock.deliver import endpoints
from penstock.deliver.sealing import SecretBox
from tests.plan.conftest import LARGE, SMALL
from tests.plan.crowd import fresh_database, inform
from tests.support.plans import Mode, Session

_SQL = sql.load("penstock.deliver", "deliver.sql")
_PAGE = 20
BOX = SecretBox(lambda: [b"k" * 32])

_ENDPOINTS = (
    "INSERT INTO penstock.webhook_endpoints (id, owner, name, url, event_types, secret, created_at, updated_at)"
    " SELECT gen_random_uuid(), 'owner-' || n / 10, 'n', 'http://x/', '{batch.completed}', '\\x00', now(), now()"
    "   FROM generate_series(1, %(count)s / 10) AS n"
)
_DELIVERIES = (
    "INSERT INTO penstock.webhook_deliveries"
    " (event_id, endpoint_id, owner, type, event_at, attempts, due_at, delivered_at)"
    " SELECT gen_random_uuid(), e.id, e.owner, 'batch.completed', now(), 1, now(),"
    "        CASE WHEN n > %(due)s THEN now() END"
    "   FROM generate_series(1, %(count)s) AS n, LATERAL (SELECT %(endpoint)s::uuid AS id, 'owner-1' AS owner) AS e"
)


@dataclass(frozen=True, slots=True)
class Crowded:
    session: Session
    endpoint: UUID


Operation = Callable[[Crowded, Connection], Awaitable[None]]


@pytest.fixture(scope="module")
def built(any_server: str) -> Iterator[tuple[Crowded, Crowded]]:
    with ExitStack() as stack:
        made = []
        for count in (SMALL, LARGE):
            session = stack.enter_context(fresh_database(any_server))
            for table in ("webhook_endpoints", "webhook_deliveries"):
                session.execute(f"ALTER TABLE penstock.{table} SET (autovacuum_enabled = false)")
            session.execute("ANALYZE")
            session.execute(_ENDPOINTS, {"count": count})
            query = "SELECT id FROM penstock.webhook_endpoints WHERE owner = 'owner-1' LIMIT 1"
            ((endpoint,),) = session.execute(query)
            session.execute(_DELIVERIES, {"count": count, "due": 2 * _PAGE, "endpoint": endpoint})
            made.append(Crowded(session, endpoint))
        small, large = made
        yield small, large


@pytest.fixture(scope="module", params=["analysed-empty", "analysed"])
def sizes(request: pytest.FixtureRequest, built: tuple[Crowded, Crowded]) -> tuple[Crowded, Crowded]:
    for at in built:
        inform(at.session, request.param)
    return built


async def take(_: Crowded, connection: Connection) -> None:
    values = {"limit": _PAGE, "hold_s": 60.0}
    cursor = await connection.execute(_SQL["take_deliveries_if_due"], values)
    assert len(await cursor.fetchall()) == _PAGE


async def record(_: Crowded, connection: Connection) -> None:
    values = {
        "id": 1,
        "attempt": 1,
        "delivered": True,
        "final": False,
        "status_code": 200,
        "error": None,
        "wait_s": 1.0,
        "give_up_s": 3600.0,
    }
    assert len(await (await connection.execute(_SQL["record_delivery_if_held"], values)).fetchall()) == 1


async def put_back(_: Crowded, connection: Connection) -> None:
    ids = list(range(1, _PAGE + 1))
    values = {"ids": ids, "attempts": [1] * _PAGE, "wait_s": 1.0}
    assert (await connection.execute(_SQL["put_back_deliveries_if_held"], values)).rowcount == _PAGE


async def forget(_: Crowded, connection: Connection) -> None:
    await connection.execute(_SQL["forget_deliveries_if_old"], {"limit": 100, "keep_s": 3600.0})


async def deliveries(at: Crowded, connection: Connection) -> None:
    assert len(await endpoints.list_deliveries(connection, at.endpoint, after=500, limit=_PAGE)) == _PAGE


async def owned(_: Crowded, connection: Connection) -> None:
    assert await endpoints.list_endpoints(connection, BOX, owner="owner-1", after=None, limit=_PAGE)


async def create(_: Crowded, connection: Connection) -> None:
    assert await endpoints.create_endpoint(
        connection, BOX, owner="owner-1", name="n", url="http://x/", event_types=["batch.completed"]
    )


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    "operation",
    [take, record, put_back, forget, deliveries, owned, create],
    ids=lambda operation: operation.__name__,
)
def test_cost_follows_what_is_asked(sizes: tuple[Crowded, Crowded], operation: Operation, mode: Mode) -> None:
    small, large = (
        at.session.explain(lambda connection, at=at: operation(at, connection), mode)  # type: ignore[misc]
        for at in sizes
    )
    assert large.buffers <= 2 * small.buffers + 10, f"{small}\n{large}"
    if operation is not forget:  # which begins at the beginning, and stops
        assert not large.scanned_whole() & {"webhook_deliveries", "webhook_endpoints"}, str(large)
