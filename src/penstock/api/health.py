"""Health: alive, and ready. The only routes that answer without a key, so they say no more than they must."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Literal

import msgspec
import psycopg
from psycopg_pool import PoolTimeout
from starlette.responses import Response

from penstock.api.endpoint import Call, Endpoint, Server
from penstock.db import sql
from penstock.db.embedded.reserve import has_room
from penstock.db.migrate import list_migrations
from penstock.db.pool import Connection, borrowed

_SQL = sql.load("penstock.api", "health.sql")

_CONNECTION_WITHIN_S = 1.0
_ANSWER_WITHIN_S = 3.0
_REMEMBERED_S = 1.0
_REASONS = {
    "database": "the database does not answer",
    "connections": "no database connection was free, for calls within a second or for uploads",
    "migrations": "migrations are missing: penstock db migrate",
    "disk": "less than min_free_bytes is free on the disk of the data directory",
}

Verdict = Literal["ok", "failed"]


class Alive(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Checks(msgspec.Struct, frozen=True):
    database: Verdict
    connections: Verdict
    migrations: Verdict
    disk: Verdict


class Readiness(msgspec.Struct):
    status: Literal["ready", "not_ready", "stopping"]
    checks: Checks
    reasons: list[str]
    """Why it is not ready, for people."""


# Remembered for a while: anybody may ask, and asking often must not cost the database anything.
_last: list[tuple[Server, float, asyncio.Task[Checks]]] = []


async def _healthz(_: Call[None, None]) -> Alive:
    return Alive()


async def _readyz(call: Call[None, None]) -> Response:
    server = call.server
    if not _last or _last[0][0] is not server or (_last[0][2].done() and _last[0][1] < monotonic()):
        _last[:] = [(server, monotonic() + _REMEMBERED_S, asyncio.create_task(check(server), name="readiness"))]
    checks = await asyncio.shield(_last[0][2])
    reasons = _explain(checks)
    status: Literal["ready", "not_ready", "stopping"] = "not_ready" if reasons else "ready"
    if server.stopping.is_set():
        status = "stopping"
    code = 200 if status == "ready" else 503
    headers = {"cache-control": "no-store"} | ({} if code == 200 else {"retry-after": "1"})
    return Response(msgspec.json.encode(Readiness(status, checks, reasons)), code, headers, "application/json")


def _explain(checks: Checks) -> list[str]:
    if checks.database == "failed":
        # Nothing is known of its connections and migrations.
        names = [name for name in ("database", "disk") if getattr(checks, name) == "failed"]
    else:
        names = [name for name in _REASONS if getattr(checks, name) == "failed"]
    return [_REASONS[name] for name in names]


async def check(server: Server) -> Checks:
    database, connections, migrations = await _database(server)
    disk: Verdict = "ok" if await asyncio.to_thread(has_room, server.config) else "failed"
    return Checks(database, connections, migrations, disk)


async def _database(server: Server) -> tuple[Verdict, Verdict, Verdict]:
    """Whether the database answers, has a connection for the API, and has the migrations."""
    try:
        async with asyncio.timeout(_CONNECTION_WITHIN_S) as limit, borrowed(server.database) as connection:
            limit.reschedule(asyncio.get_running_loop().time() + _ANSWER_WITHIN_S)
            migrations = await _migrations(connection)
        # Uploads have connections of their own.
        database, _, _ = await _past_the_pool(server)
    except (PoolTimeout, TimeoutError):
        return await _past_the_pool(server)
    except psycopg.Error:
        return "failed", "failed", "failed"
    return "ok", database, migrations


async def _past_the_pool(server: Server) -> tuple[Verdict, Verdict, Verdict]:
    """The same on a connection of its own: the pool has none, for the database is away, or for others have them all."""
    try:
        async with (
            asyncio.timeout(_ANSWER_WITHIN_S),
            await psycopg.AsyncConnection.connect(server.conninfo, autocommit=True) as connection,
        ):
            return "ok", "failed", await _migrations(connection)
    except (psycopg.Error, TimeoutError):
        return "failed", "failed", "failed"


async def _migrations(connection: Connection) -> Verdict:
    try:
        rows = await (await connection.execute(_SQL["list_migrations"])).fetchall()
    except psycopg.errors.UndefinedTable:
        return "failed"
    needed = {migration.number for migration in list_migrations() if migration.phase == "pre"}
    return "ok" if needed <= {number for (number,) in rows} else "failed"


ENDPOINTS = (
    Endpoint("GET", "/healthz", _healthz, "The process is alive.", role="anyone"),
    Endpoint(
        "GET",
        "/readyz",
        _readyz,
        "Database, its connections, migrations and disk are as they should be.",
        answer=Readiness,
        role="anyone",
        errors=(503,),
    ),
)
