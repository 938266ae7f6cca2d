"""Requests of sessions with their status and answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

import msgspec

from penstock.db import sql
from penstock.db.arrays import Int4Array, Int8Array
from penstock.db.pool import Connection

_SQL = sql.load("penstock.sessions", "sessions.sql")

_CANCELLED = "It was cancelled before it was sent."
# Tries to read an outcome that was there a moment ago.
_LOOKS = 3


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """A request with its status and, once decided, its answer."""

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
    """When the request was decided, one way or the other."""
    fingerprint: bytes | None
    lease_nonce: int | None
    """Nonce of the lease under which the request was answered, or is being worked on."""


async def get_request(
    connection: Connection, owner: str | None, session_key: str, request_id: UUID
) -> RequestRow | None:
    """Read a request of a session; with no owner named, of any owner."""
    one = await _find_owned(connection, owner, session_key, request_id)
    rows = [] if one is None else await _read(connection, [one])
    return rows[0] if rows else None


async def get_request_and_body(
    connection: Connection, owner: str, session_key: str, request_id: UUID
) -> tuple[RequestRow, bytes | None] | None:
    """Read a request of an owner's session with what it asks: None in its place if that was erased."""
    one = await _find_owned(connection, owner, session_key, request_id)
    if one is None:
        return None
    place = {"source": -one.lane_id, "ordinal": one.ordinal}
    body = await (await connection.execute(_SQL["read_body"], place, binary=True)).fetchone()
    rows = await _read(connection, [one])
    return (rows[0], body[0] if body else None) if rows else None


async def _find_owned(connection: Connection, owner: str | None, session_key: str, request_id: UUID) -> _Found | None:
    found = await _find(connection, [request_id])
    if not found or found[0].session_deleted_at is not None:
        return None
    (one,) = found
    return one if one.session_key == session_key and owner in (None, one.owner) else None


async def list_requests(
    connection: Connection,
    owner: str,
    key: str,
    *,
    after_sequence: int = 0,
    limit: int = 20,
    status: str | None = None,
    newest_first: bool = False,
) -> list[RequestRow]:
    """Read a session's requests in order, or the newest first, after a sequence number; all, or those with one
    status."""
    lane = await (await connection.execute(_SQL["find_lane"], {"owner": owner, "key": key})).fetchone()
    if lane is None:
        return []
    lane_id, cursor, total = lane
    rows: list[RequestRow] = []
    start = max(0, cursor - 1) if status in ("pending", "processing") else 0
    stop = total if status in (None, "pending", "cancelled") else cursor
    if not newest_first:
        start = max(start, after_sequence)
    elif after_sequence:
        stop = min(stop, after_sequence - 1)
    # First ordinals, then their rows: a request whose status changed in between is left out, and the page filled up.
    while len(rows) < limit and start < stop:
        ordinals = await _places(connection, lane_id, status, range(start, stop), limit - len(rows), newest_first)
        if not ordinals:
            break
        parameters = {"lane": lane_id, "ordinals": ordinals}
        found = await (await connection.execute(_SQL["find_requests_at"], parameters)).fetchall()
        read = await _read(connection, [_Found(*row) for row in found])
        read.sort(key=lambda row: row.sequence, reverse=newest_first)
        rows += [row for row in read if status is None or row.status == status]
        if newest_first:
            stop = ordinals[-1]
        else:
            start = ordinals[-1] + 1
    return rows[:limit]


async def _places(
    connection: Connection, lane_id: int, status: str | None, among: range, limit: int, newest_first: bool
) -> list[int]:
    """List the ordinals of the next requests that may have this status: the first of them, or the last ones."""
    walk = among[::-1] if newest_first else among
    if status is None:
        return list(walk[:limit])
    if status in ("pending", "processing"):
        # One more: the first may turn out to have the other status.
        statement, limit = "list_undecided", limit + 1
    elif newest_first and status != "completed":
        statement = {"failed": "list_failed_newest_first", "cancelled": "list_cancelled_newest_first"}[status]
    else:
        statement = {"completed": "list_completed", "failed": "list_failed", "cancelled": "list_cancelled"}[status]
    walked = {"first": walk[0], "last": walk[-1], "step": walk.step}
    parameters = {"lane": lane_id, "from": among.start, "stop": among.stop, **walked, "limit": limit}
    return [ordinal for (ordinal,) in await (await connection.execute(_SQL[statement], parameters)).fetchall()]


async def read_answered(connection: Connection, ids: Sequence[UUID]) -> list[RequestRow]:
    """Read those of some requests that are decided, or whose session was deleted: the ones callers wait for."""
    found = await _find(connection, ids)
    deleted = {one.id: one.session_deleted_at for one in found if one.session_deleted_at is not None}
    # Requests that wait in line, or are being worked on, are not read any further.
    over = [one for one in found if one.decided or one.cancelled_at is not None or one.id in deleted]
    rows: list[RequestRow] = []
    for row in await _read(connection, over):
        if row.completed_at is not None:
            rows.append(row)
        elif row.id in deleted:
            rows.append(
                msgspec.structs.replace(
                    row,
                    status="cancelled",
                    error_code="session_deleted",
                    error_message="Its session was deleted.",
                    completed_at=deleted[row.id],
                )
            )
    return rows


async def find_known(connection: Connection, ids: Sequence[UUID]) -> set[UUID]:
    """Find which of these requests have not been purged with their session."""
    rows = await (await connection.execute(_SQL["find_known"], {"ids": list(ids)})).fetchall()
    return {request_id for (request_id,) in rows}


async def read_requests(connection: Connection, ids: Sequence[UUID]) -> list[RequestRow]:
    """Read requests by their ids, in no order."""
    return await _read(connection, await _find(connection, ids))


class _Found(msgspec.Struct, frozen=True, gc=False):
    """A request as the control tables have it, without its outcome."""

    id: UUID
    session_id: UUID
    session_key: str
    ordinal: int
    endpoint: str
    route: str
    stream: bool
    accepted_at: datetime
    cancelled_at: datetime | None
    fingerprint: bytes | None
    owner: str
    session_deleted_at: datetime | None
    lane_id: int
    leased_attempt: int | None
    lease_nonce: int | None
    deferred_attempt: int | None
    decided: bool
    """Whether the request has an outcome."""


class _Outcome(NamedTuple):
    state: str
    status_code: int | None
    response: bytes | None
    error_code: str | None
    error_message: str | None
    attempts: int
    finished_at: datetime
    lease_nonce: int | None


async def _find(connection: Connection, ids: Sequence[UUID]) -> list[_Found]:
    cursor = await connection.execute(_SQL["find_requests"], {"ids": list(ids)}, binary=True)
    return [_Found(*row) for row in await cursor.fetchall()]


async def _read(connection: Connection, found: Sequence[_Found]) -> list[RequestRow]:
    """Read the outcomes of requests that were found; returns the rows in the same order."""
    for _ in range(_LOOKS):
        outcomes = await _outcomes(connection, [one for one in found if one.decided])
        alive = [one for one in found if one.session_deleted_at is None]
        gone = {one.id for one in alive if one.decided and one.id not in outcomes}
        if not gone:
            break
        # Since they were found, these were deleted with their session, or are being run again.
        now = {one.id: one for one in await _find(connection, list(gone))}
        found = [now[one.id] if one.id in gone else one for one in found if one.id not in gone or one.id in now]
    return [_row(one, outcomes.get(one.id)) for one in found]


async def _outcomes(connection: Connection, decided: Sequence[_Found]) -> dict[UUID, _Outcome]:
    if not decided:
        return {}
    if len(decided) == 1:
        place = {"lane": decided[0].lane_id, "ordinal": decided[0].ordinal}
        cursor = await connection.execute(_SQL["read_one_decided"], place, binary=True)
    else:
        places = {
            "lanes": Int8Array([one.lane_id for one in decided]),
            "ordinals": Int4Array([one.ordinal for one in decided]),
        }
        cursor = await connection.execute(_SQL["read_decided"], places, binary=True)
    return {decided[n - 1].id: _Outcome(*outcome) for n, *outcome in await cursor.fetchall()}


def _row(one: _Found, outcome: _Outcome | None) -> RequestRow:
    cancelled = one.cancelled_at is not None
    if cancelled:
        status = "cancelled"
    elif outcome is not None:
        status = "completed" if outcome.state == "completed" else "failed"
    else:
        status = "pending" if one.leased_attempt is None else "processing"
    if outcome is not None:
        # A request that was cancelled before it was sent had no attempt.
        attempts = outcome.attempts - cancelled
    elif one.leased_attempt is not None:
        attempts = one.leased_attempt
    else:
        attempts = 0 if one.deferred_attempt is None else one.deferred_attempt - 1
    return RequestRow(
        id=one.id,
        session_id=one.session_id,
        session_key=one.session_key,
        sequence=one.ordinal + 1,
        endpoint=one.endpoint,
        route=one.route,
        stream=one.stream,
        status=status,
        status_code=outcome.status_code if outcome else None,
        response=outcome.response if outcome else None,
        error_code="cancelled" if cancelled else outcome.error_code if outcome else None,
        error_message=_CANCELLED if cancelled else outcome.error_message if outcome else None,
        attempts=attempts,
        accepted_at=one.accepted_at,
        completed_at=outcome.finished_at if outcome else one.cancelled_at,
        fingerprint=one.fingerprint,
        lease_nonce=outcome.lease_nonce if outcome else one.lease_nonce,
    )
