"""Events that make requests of a session: each (source, id) once, and a batch of events whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import ByteaArray, TextArray
from penstock.db.pool import Connection, Now
from penstock.sessions.accept import NewRequest, Refused, accept_many

_SQL = sql.load("penstock.sessions", "events.sql")


@dataclass(frozen=True, slots=True)
class EventRequest:
    """An event, and the request it makes."""

    source: str
    event_id: str
    request: NewRequest

    @property
    def digest(self) -> bytes:
        """Digest of source and id: distinct for every event of one owner."""
        return hashlib.sha256(f"{len(self.source)} {self.source} {self.event_id}".encode()).digest()

    @property
    def fingerprint(self) -> bytes:
        """Digest of the request: a repeated event must make the same request."""
        asked = (self.request.session_key.encode(), self.request.endpoint.encode(), self.request.body)
        return hashlib.sha256(b"".join(b"%d " % len(part) + part for part in asked)).digest()


class NotTaken(Exception):  # noqa: N818 -- a decision, not a fault
    """One of the events is refused, and with it all. `code` is that of `Refused`, or `event_conflict`."""

    def __init__(self, index: int, code: str) -> None:
        super().__init__(code)
        self.index = index
        self.code = code


async def accept_events(
    connection: Connection, event_requests: Sequence[EventRequest], *, max_queued: int, now: Now = None
) -> list[UUID]:
    """Append the requests of one owner's events; returns the request id of each, in their order.

    An event that was accepted before, here or in an earlier batch, gives the request it became then.
    """
    if not event_requests:
        return []
    first: dict[bytes, int] = {}
    for index, event_request in enumerate(event_requests):
        place = first.setdefault(event_request.digest, index)
        if event_requests[place].fingerprint != event_request.fingerprint:
            raise NotTaken(index, "event_conflict")
    async with connection.transaction():
        known = await _note(connection, [event_requests[index] for index in first.values()], now)
        new: list[int] = []
        for index in first.values():
            event_request = event_requests[index]
            fingerprint, request_id = known[event_request.digest]
            if fingerprint != event_request.fingerprint:
                raise NotTaken(index, "event_conflict")
            if request_id == event_request.request.id:
                new.append(index)
        requests = [event_requests[index].request for index in new]
        taken = await accept_many(connection, requests, max_queued=max_queued, now=now) if requests else []
        for index, acceptance in zip(new, taken, strict=True):
            if isinstance(acceptance, Refused):
                raise NotTaken(index, acceptance.code)
    return [known[event_request.digest][1] for event_request in event_requests]


async def _note(
    connection: Connection, event_requests: Sequence[EventRequest], now: Now
) -> dict[bytes, tuple[bytes, UUID]]:
    values = {
        "owner": event_requests[0].request.owner,
        "digests": ByteaArray([event_request.digest for event_request in event_requests]),
        "sources": TextArray([event_request.source for event_request in event_requests]),
        "event_ids": TextArray([event_request.event_id for event_request in event_requests]),
        "fingerprints": ByteaArray([event_request.fingerprint for event_request in event_requests]),
        "request_ids": [event_request.request.id for event_request in event_requests],
        "session_keys": TextArray([event_request.request.session_key for event_request in event_requests]),
        "now": now,
    }
    cursor = await connection.execute(_SQL["note_events_if_new"], values)
    return {bytes(digest): (bytes(mark), request_id) for digest, mark, request_id in await cursor.fetchall()}
