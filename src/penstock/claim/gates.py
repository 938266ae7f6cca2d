"""Gates: a whole route has to wait, after a refusal or until a person acts; stored in the database for every worker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from penstock.db import sql
from penstock.db.pool import Connection, Now
from penstock.pools import pools_beside

_SQL = sql.load("penstock.claim", "claim.sql")


@dataclass(frozen=True, slots=True)
class Gate:
    route: str
    not_before: datetime | None
    halted_at: datetime | None
    code: str
    message: str


async def close(
    connection: Connection,
    pool: str,
    route: str,
    wait_s: float,
    code: str,
    message: str,
    *,
    now: Now = None,
) -> None:
    """Close the route to every worker's claims for `wait_s`, in all pools of its provider."""
    await connection.execute(
        _SQL["close_gate"],
        {"pools": pools_beside(pool), "route": route, "wait_s": wait_s, "code": code, "message": message, "now": now},
    )


async def halt(connection: Connection, pool: str, route: str, code: str, message: str, *, now: Now = None) -> None:
    """Close the route to every worker's claims until a person opens it again, in all pools of its provider."""
    await connection.execute(
        _SQL["halt_gate"], {"pools": pools_beside(pool), "route": route, "code": code, "message": message, "now": now}
    )


async def list_closed(connection: Connection, pool: str, *, now: Now = None) -> list[Gate]:
    cursor = await connection.execute(_SQL["list_gates"], {"pool": pool, "now": now})
    return [Gate(*row) for row in await cursor.fetchall()]


async def open_to_probe(connection: Connection, pool: str, probe_s: float, *, now: Now = None) -> None:
    """Open the routes of a pool that were halted longer ago than this: the reason may be gone."""
    await connection.execute(_SQL["open_old_gates"], {"pool": pool, "probe_s": probe_s, "now": now})


async def reopen(connection: Connection, pool: str, *, wait_max_s: float = 86_400, now: Now = None) -> None:
    """Open the halted routes of a pool, as a person asked, and shorten waits to `wait_max_s`."""
    await connection.execute(_SQL["open_gates"], {"pool": pool})
    await connection.execute(_SQL["shorten_gates"], {"pool": pool, "wait_s": wait_max_s, "now": now})
