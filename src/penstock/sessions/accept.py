"""Requests accepted into sessions: many requests of many sessions in one statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec
import psycopg
from psycopg.pq import TransactionStatus

from penstock.db import sql
from penstock.db.arrays import BoolArray, ByteaArray, Int4Array, TextArray
from penstock.db.pool import Connection, Now
from penstock.model import Again, ClaimPermit, Item, Lease, Outcome, OutcomeState, new_id, public_id, session_source
from penstock.sessions.answers import RequestRow, read_requests

_SQL = sql.load("penstock.sessions", "sessions.sql")

# After so many tries, the lanes are locked before the next, so that no other process is faster any more.
_FREE_TRIES = 3
_TRIES = 10


class NewRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to be stored in a session."""

    owner: str
    session_key: str
    pool: str
    """`session_pool` of the provider that serves the route."""
    route: str
    endpoint: str
    body: bytes
    stream: bool = False
    waited: bool = False
    """A caller waits for the answer: it is recorded at once, and notified."""
    announce: bool = False
    """The answer is to be delivered to sinks."""
    idempotency_key: str | None = None
    fingerprint: bytes | None = None
    id: UUID = msgspec.field(default_factory=new_id)
    # Settings of the session, if this request creates it.
    on_dead_head: str = "continue"
    max_queued: int | None = None
    wait_timeout_s: float | None = None
    priority: int = 0


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The request is stored and in line."""

    request_id: UUID
    session_id: UUID
    lane_id: int
    ordinal: int
    wait_timeout_s: float | None
    """The session's own; None: as configured."""
    accepted_at: datetime
    lease: Lease | None = None
    """Set if the request was claimed at once, for the worker of its pool."""

    @property
    def sequence(self) -> int:
        return self.ordinal + 1


class Existing(msgspec.Struct, frozen=True):
    """The idempotency key was used before, by `request`; its fingerprint tells whether for the same body."""

    request: RequestRow
    lane_id: int
    wait_timeout_s: float | None


class Refused(msgspec.Struct, frozen=True, gc=False):
    code: str
    """queue_full: the session has as many requests waiting as it may have."""


Acceptance = Accepted | Existing | Refused


class Stored(msgspec.Struct, frozen=True):
    """A request as it was just stored."""

    request: NewRequest
    accepted: Accepted

    def as_answered(self, item: Item, verdict: Outcome | Again, at: datetime) -> RequestRow | None:
        """The row that the database holds once this verdict is recorded; None if the verdict is not final."""
        if not isinstance(verdict, Outcome) or verdict.state is OutcomeState.SKIPPED:
            return None
        request, accepted = self.request, self.accepted
        return RequestRow(
            id=request.id,
            session_id=accepted.session_id,
            session_key=request.session_key,
            sequence=accepted.sequence,
            endpoint=request.endpoint,
            route=request.route,
            stream=request.stream,
            status="completed" if verdict.state is OutcomeState.COMPLETED else "failed",
            status_code=verdict.status_code,
            response=verdict.body,
            error_code=verdict.error_code,
            error_message=verdict.error_message,
            attempts=item.attempt,
            accepted_at=accepted.accepted_at,
            completed_at=at,
            fingerprint=request.fingerprint,
            lease_nonce=item.lease.nonce,
        )


async def accept_many(
    connection: Connection,
    requests: Sequence[NewRequest],
    *,
    max_queued: int = 1_000_000,
    permits: Mapping[str, ClaimPermit] | None = None,
    now: Now = None,
) -> list[Acceptance]:
    """Append requests to their sessions, in the order given; returns the acceptance of each, in the same order.

    `max_queued` is for sessions that have no bound of their own. The first request of an idle session is claimed under
    the permit of its pool, if that has room; for the others, the workers of their pools are notified.
    """
    if len(requests) == 1 and (permit := _permit_for(requests[0].pool, requests[0].route, permits)) is not None:
        accepted = await _accept_one(connection, requests[0], permit, now)
        if accepted is not None:
            return [accepted]
    found: dict[int, Acceptance] = {}
    pending, twins = _twins(requests)
    for attempt in range(_TRIES):
        asked = [requests[index] for index in pending]
        try:
            if attempt < _FREE_TRIES:
                verdicts = await _accept(connection, asked, max_queued, permits or {}, now)
                permits = None
            else:
                async with connection.transaction():
                    owners, keys = [request.owner for request in asked], [request.session_key for request in asked]
                    await connection.execute(_SQL["hold_lanes"], {"owners": owners, "keys": keys})
                    verdicts = await _accept(connection, asked, max_queued, {}, now)
        except psycopg.errors.DeadlockDetected:
            # A process that locks lanes first creates its new sessions after that, the others before. This try left
            # nothing behind.
            if attempt == _TRIES - 1 or connection.info.transaction_status != TransactionStatus.IDLE:
                raise
            continue
        found.update({index: verdict for index, verdict in zip(pending, verdicts, strict=True) if verdict is not None})
        pending = [index for index in pending if index not in found]
        if not pending:
            break
    else:
        raise AssertionError("a session was deleted and created again too often in the same moment")
    await _add_twins(connection, found, twins)
    return [found[index] for index in range(len(requests))]


async def find_stored(connection: Connection, ids: Sequence[UUID]) -> dict[UUID, Accepted]:
    """Find which of these requests are stored, although the answer may have been lost."""
    rows = await (await connection.execute(_SQL["find_stored"], {"ids": list(ids)})).fetchall()
    return {row[0]: Accepted(*row) for row in rows}


def _permit_for(pool: str, route: str, permits: Mapping[str, ClaimPermit] | None) -> ClaimPermit | None:
    """Permit under which a request of this route may be claimed, if there is one."""
    permit = permits.get(pool) if permits else None
    return permit if permit is not None and permit.room and route not in permit.closed else None


async def _accept_one(connection: Connection, request: NewRequest, permit: ClaimPermit, now: Now) -> Accepted | None:
    parameters = {
        "owner": request.owner,
        "key": request.session_key,
        "pool": request.pool,
        "route": request.route,
        "endpoint": request.endpoint,
        "id": request.id,
        "custom_id": public_id("session_request", request.id),
        "body": request.body,
        "stream": request.stream,
        "waited": request.waited,
        "announce": request.announce,
        "idempotency_key": request.idempotency_key,
        "fingerprint": request.fingerprint,
        "worker": permit.worker_id,
        "now": now,
    }
    try:
        row = await (await connection.execute(_SQL["accept_one_if_idle"], parameters)).fetchone()
    except psycopg.errors.UniqueViolation:
        # The idempotency key was used while this waited for the lane. A transaction has failed by it, and the caller
        # has to roll it back.
        if connection.info.transaction_status != TransactionStatus.IDLE:
            raise
        return None
    if row is None:
        return None
    session_id, lane_id, ordinal, wait_timeout_s, lease_id, nonce, at = row
    lease = _lease(lease_id, nonce, request, session_id, lane_id, ordinal)
    return Accepted(request.id, session_id, lane_id, ordinal, wait_timeout_s, at, lease)


def _twins(requests: Sequence[NewRequest]) -> tuple[list[int], dict[int, int]]:
    """Indexes of the requests to send, and of each other one the index of the request sent with the same key."""
    first: dict[tuple[str, str, str], int] = {}
    sent: list[int] = []
    twins: dict[int, int] = {}
    for index, request in enumerate(requests):
        if request.idempotency_key is not None:
            place = first.setdefault((request.owner, request.session_key, request.idempotency_key), index)
            if place != index:
                twins[index] = place
                continue
        sent.append(index)
    return sent, twins


async def _add_twins(connection: Connection, found: dict[int, Acceptance], twins: dict[int, int]) -> None:
    firsts = [found[place] for place in twins.values()]
    new = {first.request_id for first in firsts if isinstance(first, Accepted)}
    rows = {row.id: row for row in await read_requests(connection, list(new))} if new else {}
    for index, place in twins.items():
        verdict = found[place]
        if isinstance(verdict, Accepted):
            verdict = Existing(rows[verdict.request_id], verdict.lane_id, verdict.wait_timeout_s)
        found[index] = verdict


async def _accept(
    connection: Connection,
    requests: Sequence[NewRequest],
    max_queued: int,
    permits: Mapping[str, ClaimPermit],
    now: Now,
) -> list[Acceptance | None]:
    """Accept in one statement. None: the session changed while the statement ran; try again."""
    parameters = {**_parameters(requests, permits), "max_queued": max_queued, "now": now}
    rows = await (await connection.execute(_SQL["accept_if_room"], parameters)).fetchall()
    known = [existing for verdict, _, _, _, existing, *_ in rows if verdict == "existing"]
    existing_rows = {row.id: row for row in await read_requests(connection, known)} if known else {}
    acceptances: list[Acceptance | None] = []
    for request, (verdict, session_id, lane_id, ordinal, existing, wait_timeout_s, lease_id, nonce, at, _) in zip(
        requests, rows, strict=True
    ):
        if verdict == "accepted":
            lease = None if lease_id is None else _lease(lease_id, nonce, request, session_id, lane_id, ordinal)
            acceptances.append(Accepted(request.id, session_id, lane_id, ordinal, wait_timeout_s, at, lease))
        elif verdict == "existing" and existing in existing_rows:
            acceptances.append(Existing(existing_rows[existing], lane_id, wait_timeout_s))
        elif verdict == "refused":
            acceptances.append(Refused("queue_full"))
        else:
            acceptances.append(None)
    return acceptances


def _lease(lease_id: int, nonce: int, request: NewRequest, session_id: UUID, lane_id: int, ordinal: int) -> Lease:
    ranges = ((ordinal, ordinal + 1),)
    place = (lane_id, session_id, request.route, request.endpoint, session_source(lane_id), 0)
    return Lease(lease_id, nonce, *place, 1, ranges, session=True)


def _parameters(requests: Sequence[NewRequest], permits: Mapping[str, ClaimPermit]) -> dict[str, object]:
    """Parameters of the statement: requests, sessions and kinds (pool, route, endpoint), each numbered from 1."""
    numbers: dict[tuple[str, str], int] = {}
    kinds: dict[tuple[str, str, str], int] = {}
    makers: list[NewRequest] = []
    keyed: list[bool] = []
    session_of: list[int] = []
    kind_of: list[int] = []
    for request in requests:
        place = (request.owner, request.session_key)
        number = numbers.get(place)
        if number is None:
            number = numbers[place] = len(numbers) + 1
            makers.append(request)
            keyed.append(False)
        if request.idempotency_key is not None:
            keyed[number - 1] = True
        session_of.append(number)
        kind = (request.pool, request.route, request.endpoint)
        kind_of.append(kinds.setdefault(kind, len(kinds) + 1))
    under = [_permit_for(pool, route, permits) for pool, route, _ in kinds]
    return {
        "s_owner": TextArray([maker.owner for maker in makers]),
        "s_key": TextArray([maker.session_key for maker in makers]),
        # Ascending: the statement finds ids by halving.
        "s_id": sorted(new_id() for _ in makers),
        "s_keyed": BoolArray(keyed),
        "s_on_dead_head": TextArray([maker.on_dead_head for maker in makers]),
        "s_max_queued": Int4Array([maker.max_queued for maker in makers]),
        "s_wait_timeout_s": [maker.wait_timeout_s for maker in makers],
        "s_priority": Int4Array([maker.priority for maker in makers]),
        "k_pool": TextArray([pool for pool, _, _ in kinds]),
        "k_route": TextArray([route for _, route, _ in kinds]),
        "k_endpoint": TextArray([endpoint for _, _, endpoint in kinds]),
        "k_worker": [permit.worker_id if permit else None for permit in under],
        "k_room": Int4Array([permit.room if permit else 0 for permit in under]),
        "s": Int4Array(session_of),
        "kind": Int4Array(kind_of),
        "id": [request.id for request in requests],
        "custom_id": TextArray([public_id("session_request", request.id) for request in requests]),
        "body": ByteaArray([request.body for request in requests]),
        "stream": BoolArray([request.stream for request in requests]),
        "waited": BoolArray([request.waited for request in requests]),
        "announce": BoolArray([request.announce for request in requests]),
        "idempotency_key": TextArray([request.idempotency_key for request in requests]),
        "fingerprint": ByteaArray([request.fingerprint for request in requests]),
    }
