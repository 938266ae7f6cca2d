"""What became of a session's requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from penstock.db import sql
from penstock.db.pool import Connection

_SQL = sql.load("penstock.work", "sessions.sql")


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """A request as far as it has come."""

    id: UUID
    session_id: UUID
    session_key: str
    sequence: int
    """Its place in the session, from 1."""
    endpoint: str
    route: str
    stream: bool
    status: str
    """pending, processing, completed, failed or cancelled."""
    status_code: int | None
    response: bytes | None
    error_code: str | None
    error_message: str | None
    attempts: int
    accepted_at: datetime
    completed_at: datetime | None
    """When it was decided, one way or the other."""
    fingerprint: bytes | None
    lease_nonce: int | None
    """Under which it was answered, or is being worked on."""


async def get_request(
    connection: Connection, owner: str | None, session_key: str, request_id: UUID
) -> RequestRow | None:
    """A request of a session; with no owner named, anybody's."""
    parameters = {"owner": owner, "key": session_key, "id": request_id}
    rows = await _rows(connection, "read_request", parameters)
    return rows[0] if rows else None


async def list_requests(
    connection: Connection,
    owner: str,
    key: str,
    *,
    after_sequence: int = 0,
    limit: int = 20,
    status: str | None = None,
) -> list[RequestRow]:
    """A session's requests in their order, from a place on; all, or those with one status."""
    parameters = {"owner": owner, "key": key, "from": after_sequence, "limit": limit, "status": status}
    return await _rows(connection, "list_requests", parameters)


async def answered(connection: Connection, ids: Sequence[UUID]) -> list[RequestRow]:
    """Those of some requests that are decided, or whose session was deleted: what callers wait for."""
    return await _rows(connection, "read_answered", {"ids": list(ids)})


async def find_known(connection: Connection, ids: Sequence[UUID]) -> set[UUID]:
    """Those of some requests that have not gone with their session."""
    rows = await (await connection.execute(_SQL["find_known"], {"ids": list(ids)})).fetchall()
    return {request_id for (request_id,) in rows}


async def read_requests(connection: Connection, ids: Sequence[UUID]) -> list[RequestRow]:
    """Requests by their ids, in no order."""
    return await _rows(connection, "read_some_requests", {"ids": list(ids)})


async def _rows(connection: Connection, statement: str, parameters: Mapping[str, object]) -> list[RequestRow]:
    cursor = await connection.execute(_SQL[statement], parameters, binary=True)
    return [RequestRow(*row) for row in await cursor.fetchall()]
