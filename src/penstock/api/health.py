"""Health: alive, and ready. The only routes that answer without a key, so they say no more than they must."""

from __future__ import annotations

import asyncio
import shutil
from time import monotonic
from typing import Literal

import msgspec
import psycopg
from psycopg_pool import PoolTimeout
from starlette.responses import Response

from penstock.api.endpoint import Call, Endpoint, Server
from penstock.db import sql
from penstock.db.migrate import list_migrations
from penstock.db.pool import borrowed

_SQL = sql.load("penstock.api", "health.sql")

_ANSWER_WITHIN_S = 3.0
_REMEMBERED_S = 1.0
# Room that a checkpoint and a few segments of the write-ahead log need.
_MIN_FREE_BYTES = 64 * 1024 * 1024

Verdict = Literal["ok", "failed"]


class Alive(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Checks(msgspec.Struct):
    database: Verdict
    migrations: Verdict
    disk: Verdict


class Readiness(msgspec.Struct):
    status: Literal["ready", "not_ready", "stopping"]
    checks: Checks


# Remembered for a while: anybody may ask, and asking often must not cost the database anything.
_last: list[tuple[Server, float, Checks]] = []


async def _healthz(_: Call[None, None]) -> Alive:
    return Alive()


async def _readyz(call: Call[None, None]) -> Response:
    server = call.server
    if not _last or _last[0][0] is not server or _last[0][1] < monotonic():
        _last[:] = [(server, monotonic() + _REMEMBERED_S, await check(server))]
    checks = _last[0][2]
    ready = checks == Checks("ok", "ok", "ok")
    status: Literal["ready", "not_ready", "stopping"] = "ready" if ready else "not_ready"
    if server.stopping.is_set():
        status = "stopping"
    code = 200 if status == "ready" else 503
    headers = {"cache-control": "no-store"} | ({} if code == 200 else {"retry-after": "1"})
    return Response(msgspec.json.encode(Readiness(status, checks)), code, headers, "application/json")


async def check(server: Server) -> Checks:
    database, migrations = await _database(server)
    return Checks(database, migrations, await asyncio.to_thread(_disk, server))


async def _database(server: Server) -> tuple[Verdict, Verdict]:
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S), borrowed(server.database) as connection:
            rows = await (await connection.execute(_SQL["list_migrations"])).fetchall()
    except psycopg.errors.UndefinedTable:
        return "ok", "failed"
    except (psycopg.Error, PoolTimeout, TimeoutError):
        return "failed", "failed"
    needed = {migration.number for migration in list_migrations() if migration.phase == "pre"}
    return "ok", "ok" if needed <= {number for (number,) in rows} else "failed"


def _disk(server: Server) -> Verdict:
    """Whether the embedded database has room on its disk; a configured database is not checked."""
    if server.config.database_url is not None:
        return "ok"
    try:
        return "ok" if shutil.disk_usage(server.config.data_dir).free >= _MIN_FREE_BYTES else "failed"
    except OSError:
        return "failed"


ENDPOINTS = (
    Endpoint("GET", "/healthz", _healthz, "The process is alive.", role="anyone"),
    Endpoint(
        "GET",
        "/readyz",
        _readyz,
        "Database, migrations and disk are as they should be.",
        answer=Readiness,
        role="anyone",
        errors=(503,),
    ),
)
