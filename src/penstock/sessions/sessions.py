"""Sessions: open lanes of width 1. Requests are appended; one request of a session is worked on at a time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection, Now, fetch_one
from penstock.model import new_id

_SQL = sql.load("penstock.sessions", "sessions.sql")

_LAST = UUID(int=2**128 - 1)


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session and its figures at one instant."""

    id: UUID
    owner: str
    key: str
    lane_id: int
    on_dead_head: str
    """`continue` with the next request when one fails for good, or `block` until a person resumes the session."""
    max_queued: int | None
    """None: as configured."""
    wait_timeout_s: float | None
    """None: as configured."""
    priority: int
    created_at: datetime
    queued: int
    """Accepted and not being worked on, one that waits for another try included."""
    in_flight: int
    open: bool
    """False: blocked by a head that failed."""
    total: int
    """Ever accepted."""
    answered: int
    """Decided: `queued + in_flight + answered = total`."""


async def get_session(connection: Connection, owner: str, key: str) -> SessionRow | None:
    found = await _read(connection, owner, key, None, 1)
    return found[0] if found else None


async def list_sessions(
    connection: Connection, owner: str, *, after: UUID | None = None, limit: int = 20
) -> list[SessionRow]:
    """An owner's sessions, newest first; `after` is the id of the last one seen."""
    return await _read(connection, owner, None, after, limit)


async def _read(
    connection: Connection, owner: str, key: str | None, after: UUID | None, limit: int
) -> list[SessionRow]:
    parameters = {"owner": owner, "key": key, "below": after or _LAST, "limit": limit}
    cursor = await connection.execute(_SQL["read_sessions"], parameters)
    return [SessionRow(*row) for row in await cursor.fetchall()]


async def put_session(
    connection: Connection,
    owner: str,
    key: str,
    *,
    on_dead_head: str = "continue",
    max_queued: int | None = None,
    wait_timeout_s: float | None = None,
    priority: int = 0,
    now: Now = None,
) -> SessionRow:
    """Replace a session's settings; create the session if there is none."""
    where = {"owner": owner, "key": key}
    settings = {
        "on_dead_head": on_dead_head,
        "max_queued": max_queued,
        "wait_timeout_s": wait_timeout_s,
        "priority": priority,
    }
    while True:
        async with connection.transaction():
            await connection.execute(_SQL["make_session_if_new"], {**where, "id": new_id(), "now": now})
            await connection.execute(_SQL["set_session"], {**where, **settings})
        found = await get_session(connection, owner, key)
        if found is not None:  # else it was deleted at the same moment
            return found


async def resume_session(
    connection: Connection, owner: str, key: str, *, retry_head: bool = False, now: Now = None
) -> bool:
    """Let a blocked session go on, with its dead head once more or with the next. False if it is not blocked."""
    async with connection.transaction():
        lane = await fetch_one(connection, _SQL["hold_lane_if_blocked"], {"owner": owner, "key": key})
        if lane is None:
            return False
        # No request is decided in between: the lane is locked, and closed.
        head = await fetch_one(connection, _SQL["find_head"], {"lane": lane[0]}) if retry_head else None
        parameters = {"lane": lane[0], "head": head[0] if head else None, "now": now}
        return await fetch_one(connection, _SQL["resume_if_held"], parameters) is not None


async def cancel_request(
    connection: Connection, owner: str | None, session_key: str, request_id: UUID, *, now: Now = None
) -> bool:
    """Cancel a request that waits. False if it is being worked on, if it is decided, or if there is none."""
    parameters = {"owner": owner, "key": session_key, "id": request_id, "now": now}
    return await fetch_one(connection, _SQL["cancel_if_waiting"], parameters) is not None
