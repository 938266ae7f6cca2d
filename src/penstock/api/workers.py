"""Workers: who is registered, when each was last heard of, and what it holds."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

import msgspec

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.db import sql
from penstock.db.pool import borrowed

_SQL = sql.load("penstock.api", "workers.sql")

_FIRST: Final = UUID(int=0)
# Of a worker with more leases, the figures are lower bounds.
_MOST_LEASES: Final = 1_000
_SHOWN_ROUTES: Final = 20


class WorkerEntry(Camel):
    id: str
    pool: str
    """Which work it is for: a provider's, a processor's; a server's own identity holds no work."""
    host: str
    pid: int
    started_at: datetime
    heartbeat_at: datetime
    draining: bool
    alive: bool
    """Whether it was heard of within the grace; what others hold is taken back."""
    leases: int
    items: int
    routes: list[str]


class WorkerList(Camel):
    workers: list[WorkerEntry]
    next: str | None


class WorkersQuery(msgspec.Struct):
    after: UUID | None = None
    page_size: Annotated[int, msgspec.Meta(ge=1, le=200)] = msgspec.field(default=100, name="pageSize")


async def list_workers(call: Call[WorkersQuery, None]) -> WorkerList:
    query = call.query
    parameters = {
        "after": query.after or _FIRST,
        "limit": query.page_size + 1,
        "leases": _MOST_LEASES,
        "grace_s": call.server.config.liveness.heartbeat_grace_s,
        "now": None,
    }
    async with borrowed(call.database) as connection:
        rows = await (await connection.execute(_SQL["list_workers_after"], parameters)).fetchall()
    page = [
        WorkerEntry(
            id=str(id_),
            pool=pool,
            host=host,
            pid=pid,
            started_at=started_at,
            heartbeat_at=heartbeat_at,
            draining=draining,
            alive=alive,
            leases=leases,
            items=items,
            routes=routes[:_SHOWN_ROUTES],
        )
        for id_, pool, host, pid, started_at, heartbeat_at, draining, alive, leases, items, routes in rows
    ][: query.page_size]
    return WorkerList(workers=page, next=page[-1].id if len(rows) > query.page_size else None)


ENDPOINTS = (Endpoint("GET", "/api/workers", list_workers, "Registered workers and what they hold.", role="admin"),)
