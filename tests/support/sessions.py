"""Sessions driven straight through the engine's statements: accept, claim, read, settle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from penstock.claim import claim as claims
from penstock.db.pool import Connection, Now
from penstock.model import Again, Item, Lease, Outcome, OutcomeState
from penstock.sessions.accept import Acceptance, Accepted, NewRequest, accept_many
from penstock.settle.write import Changes, Settled, settle
from tests.support.engine import claim_due, count_leased

OWNER = "local"
POOL = "session:test"
ROUTE = "model-0"
ENDPOINT = "/v1/chat/completions"

DONE = Outcome(OutcomeState.COMPLETED, b'"done"', 200)
DEAD = Outcome(OutcomeState.FAILED, b'"no"', 400, error_code="bad_request", error_message="no")


def wish(key: str, body: bytes = b"{}", **options: Any) -> NewRequest:
    """A request of the session `key`."""
    usual = {"owner": OWNER, "pool": POOL, "route": ROUTE, "endpoint": ENDPOINT}
    return NewRequest(session_key=key, body=body, **{**usual, **options})


async def send(connection: Connection, *keys: str, now: Now = None, **options: Any) -> list[Accepted]:
    """One request for each key, in this order; all of them must be accepted."""
    found = await accept_many(connection, [wish(key, **options) for key in keys], now=now)
    return [accepted(acceptance) for acceptance in found]


def accepted(acceptance: Acceptance) -> Accepted:
    assert isinstance(acceptance, Accepted), acceptance
    return acceptance


async def take(
    connection: Connection, worker: UUID, want: int = 99, *, route: str = ROUTE, pool: str = POOL, now: Now = None
) -> list[Lease]:
    leases = await claim_due(connection, pool=pool, wants={route: want}, worker_id=worker, now=now)
    assert all(lease.session and count_leased([lease]) == 1 for lease in leases)
    return leases


async def take_items(connection: Connection, worker: UUID, want: int = 99, **options: Any) -> list[Item]:
    leases = await take(connection, worker, want, **options)
    return await claims.read_heads(connection, leases, max_bytes=1 << 20) if leases else []


async def end(
    connection: Connection, worker: UUID, items: Sequence[Item], verdict: Outcome | Again = DONE, now: Now = None
) -> Settled:
    changes = Changes()
    for item in items:
        changes.decide(item, verdict)
    return await settle(connection, worker, changes, now=now)
