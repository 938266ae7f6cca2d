"""Audit trail of jobs: every change is recorded with who made it; admins read it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import msgspec

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.api.multipart import invalid
from penstock.batches import audit
from penstock.batches.read import Batch
from penstock.db.pool import Connection, borrowed
from penstock.model import parse_id, public_id


class AuditEntry(Camel):
    at: datetime
    action: str
    object: str
    owner: str
    actor: str
    client: str
    details: dict[str, Any]


class AuditTrail(Camel):
    entries: list[AuditEntry]
    next: str | None


class AuditQuery(msgspec.Struct):
    object: str | None = None
    after: str | None = None
    page_size: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = msgspec.field(default=100, name="pageSize")


def actor_of(call: Call[Any, Any]) -> str:
    """Actor of a change: the key, or the owner where there are no keys."""
    key_id = call.caller.key_id
    return call.caller.owner if key_id is None else public_id("key", key_id)


def client_of(call: Call[Any, Any]) -> str:
    """The address that a request comes from."""
    client = call.request.client
    return client.host if client else ""


async def record(
    call: Call[Any, Any], connection: Connection, action: str, job: Batch, details: Mapping[str, Any] | None = None
) -> None:
    """Record a change of a job, in the transaction that makes it."""
    await audit.record_change(
        connection,
        action,
        job.id,
        owner=job.owner,
        actor=actor_of(call),
        client=client_of(call),
        details=details,
    )


async def list_audit(call: Call[AuditQuery, None]) -> AuditTrail:
    query, size = call.query, call.query.page_size
    object_id = None
    if query.object is not None and (object_id := parse_id("job", query.object)) is None:
        raise invalid("object", "expected the id of a job.")
    asked = ["audit", query.object]
    async with borrowed(call.database) as connection:
        cursors = await call.server.read_cursors(connection)
        below = None
        if query.after is not None:
            (below,) = cursors.decode(query.after, owner=call.caller.owner, query=asked)
        found = await audit.list_changes(connection, object_id=object_id, below=below, limit=size + 1)
    page = found[:size]
    more = len(found) > size
    return AuditTrail(
        entries=[_entry(change) for change in page],
        next=cursors.encode([page[-1].id], owner=call.caller.owner, query=asked) if more else None,
    )


def _entry(change: audit.Change) -> AuditEntry:
    return AuditEntry(
        at=change.at,
        action=change.action,
        object=public_id("job", change.object_id),
        owner=change.owner,
        actor=change.actor,
        client=change.client,
        details=change.details,
    )


ENDPOINTS = (
    Endpoint("GET", "/api/audit", list_audit, "Changes of jobs, newest first: who made them, and when.", role="admin"),
)
