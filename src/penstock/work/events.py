"""Events that ask for something in a session: each (source, id) once, and a batch of them whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from penstock.db import sql
from penstock.db.arrays import ByteaArray, TextArray
from penstock.db.pool import Connection, Now
from penstock.work.accept import NewRequest, Refused, accept_many

_SQL = sql.load("penstock.work", "events.sql")


@dataclass(frozen=True, slots=True)
class Asking:
    """An event, and the request it asks for."""

    source: str
    event_id: str
    request: NewRequest

    @property
    def digest(self) -> bytes:
        """What tells it from every other event of its owner."""
        return hashlib.sha256(f"{len(self.source)} {self.source} {self.event_id}".encode()).digest()

    @property
    def fingerprint(self) -> bytes:
        """What it asks for: the same event asks for the same."""
        asked = (self.request.session_key.encode(), self.request.endpoint.encode(), self.request.body)
        return hashlib.sha256(b"".join(b"%d " % len(part) + part for part in asked)).digest()


class NotTaken(Exception):  # noqa: N818 -- a decision, not a fault
    """One of the events is not taken, and with it none. `code` is accept's, or `event_conflict`."""

    def __init__(self, index: int, code: str) -> None:
        super().__init__(code)
        self.index = index
        self.code = code


async def accept_events(
    connection: Connection, askings: Sequence[Asking], *, max_queued: int, now: Now = None
) -> list[UUID]:
    """Append what the events of one owner ask for; the request of each, in their order.

    One that was taken before, here or in an earlier batch, is the request it became then.
    """
    if not askings:
        return []
    first: dict[bytes, int] = {}
    for index, asking in enumerate(askings):
        place = first.setdefault(asking.digest, index)
        if askings[place].fingerprint != asking.fingerprint:
            raise NotTaken(index, "event_conflict")
    async with connection.transaction():
        known = await _note(connection, [askings[index] for index in first.values()], now)
        new: list[int] = []
        for index in first.values():
            asking = askings[index]
            fingerprint, request_id = known[asking.digest]
            if fingerprint != asking.fingerprint:
                raise NotTaken(index, "event_conflict")
            if request_id == asking.request.id:
                new.append(index)
        requests = [askings[index].request for index in new]
        taken = await accept_many(connection, requests, max_queued=max_queued, now=now) if requests else []
        for index, acceptance in zip(new, taken, strict=True):
            if isinstance(acceptance, Refused):
                raise NotTaken(index, acceptance.code)
    return [known[asking.digest][1] for asking in askings]


async def _note(connection: Connection, askings: Sequence[Asking], now: Now) -> dict[bytes, tuple[bytes, UUID]]:
    values = {
        "owner": askings[0].request.owner,
        "digests": ByteaArray([asking.digest for asking in askings]),
        "sources": TextArray([asking.source for asking in askings]),
        "event_ids": TextArray([asking.event_id for asking in askings]),
        "fingerprints": ByteaArray([asking.fingerprint for asking in askings]),
        "request_ids": [asking.request.id for asking in askings],
        "session_keys": TextArray([asking.request.session_key for asking in askings]),
        "now": now,
    }
    cursor = await connection.execute(_SQL["note_events_if_new"], values)
    return {bytes(digest): (bytes(mark), request_id) for digest, mark, request_id in await cursor.fetchall()}
