"""Webhook endpoints: the urls to which an owner's events are sent, and the deliveries to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, get_args
from uuid import UUID

from penstock.db import sql
from penstock.db.pool import Connection
from penstock.deliver import signing
from penstock.deliver.sealing import SecretBox, SecretNotOpened
from penstock.model import new_id

EventType = Literal["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"]
EVENT_TYPES: tuple[EventType, ...] = get_args(EventType)
MAX_ENDPOINTS = 50
"""Endpoints of one owner at most: every event of theirs is sent to each."""

_SEALED_AT_ONCE = 500

_SQL = sql.load("penstock.deliver", "deliver.sql")


@dataclass(frozen=True, slots=True)
class WebhookEndpoint:
    id: UUID
    owner: str
    name: str
    url: str
    event_types: list[str]
    secret: bytes
    """The signing secret; empty if it is sealed with a key that this process does not have."""
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one endpoint."""

    id: int
    event_id: UUID
    type: str
    batch_id: UUID | None
    event_at: datetime
    attempts: int
    due_at: datetime
    delivered_at: datetime | None
    given_up_at: datetime | None
    status_code: int | None
    error: str | None


async def create_endpoint(
    connection: Connection, box: SecretBox, *, owner: str, name: str, url: str, event_types: Sequence[str]
) -> WebhookEndpoint | None:
    """Create an endpoint. None if the owner has `MAX_ENDPOINTS` already."""
    endpoint_id = new_id()
    values = {
        "id": endpoint_id,
        "owner": owner,
        "name": name,
        "url": url,
        "event_types": list(event_types),
        "secret": box.seal(signing.new_secret(), owner, endpoint_id),
        "most": MAX_ENDPOINTS,
    }
    return await _fetch_one(connection, box, "create_endpoint_if_room", values)


async def get_endpoint(
    connection: Connection, box: SecretBox, endpoint_id: UUID, owner: str | None
) -> WebhookEndpoint | None:
    return await _fetch_one(connection, box, "find_endpoint_if_owned", {"id": endpoint_id, "owner": owner})


async def list_endpoints(
    connection: Connection, box: SecretBox, *, owner: str, after: UUID | None, limit: int
) -> list[WebhookEndpoint]:
    cursor = await connection.execute(_SQL["list_endpoints"], {"owner": owner, "after": after, "limit": limit})
    return [_endpoint(box, row) for row in await cursor.fetchall()]


async def update_endpoint(
    connection: Connection,
    box: SecretBox,
    endpoint_id: UUID,
    owner: str | None,
    *,
    name: str | None = None,
    url: str | None = None,
    event_types: Sequence[str] | None = None,
) -> WebhookEndpoint | None:
    values = {
        "id": endpoint_id,
        "owner": owner,
        "name": name,
        "url": url,
        "event_types": None if event_types is None else list(event_types),
    }
    return await _fetch_one(connection, box, "update_endpoint_if_owned", values)


async def rotate_secret(
    connection: Connection, box: SecretBox, endpoint_id: UUID, owner: str | None, *, keep_s: float
) -> WebhookEndpoint | None:
    """Give an endpoint a new secret; messages are signed with the old one too for `keep_s`."""
    found = await get_endpoint(
        connection, box, endpoint_id, owner
    )  # an admin may rotate anybody's: sealed for its owner
    if found is None:
        return None
    sealed = box.seal(signing.new_secret(), found.owner, endpoint_id)
    values = {"id": endpoint_id, "owner": found.owner, "secret": sealed, "keep_s": keep_s}
    return await _fetch_one(connection, box, "rotate_secret_if_owned", values)


async def delete_endpoint(connection: Connection, endpoint_id: UUID, owner: str | None) -> bool:
    cursor = await connection.execute(_SQL["delete_endpoint_if_owned"], {"id": endpoint_id, "owner": owner})
    return await cursor.fetchone() is not None


async def list_deliveries(
    connection: Connection, endpoint_id: UUID, *, after: int | None, limit: int
) -> list[Delivery]:
    values = {"endpoint": endpoint_id, "after": after, "limit": limit}
    cursor = await connection.execute(_SQL["list_deliveries"], values)
    return [Delivery(*row) for row in await cursor.fetchall()]


async def seal_all(connection: Connection, box: SecretBox) -> tuple[int, int]:
    """Seal every secret with the first key. Returns the endpoints that were sealed, and those whose secrets cannot be
    opened."""
    sealed = stuck = 0
    after = UUID(int=0)
    while True:
        values = {"after": after, "prefix": box.prefix, "limit": _SEALED_AT_ONCE}
        rows = await (await connection.execute(_SQL["list_endpoints_to_seal"], values)).fetchall()
        for endpoint_id, owner, secret, previous in rows:
            try:
                again = [
                    None if each is None else box.seal(box.open(each, owner, endpoint_id), owner, endpoint_id)
                    for each in (secret, previous)
                ]
            except SecretNotOpened:
                stuck += 1
                continue
            changed = {
                "id": endpoint_id,
                "secret": again[0],
                "previous_secret": again[1],
                "read_secret": secret,
                "read_previous": previous,
            }
            sealed += (await connection.execute(_SQL["seal_endpoint_if_unchanged"], changed)).rowcount
        if len(rows) < _SEALED_AT_ONCE:
            return sealed, stuck
        after = rows[-1][0]


async def _fetch_one(
    connection: Connection, box: SecretBox, statement: str, values: dict[str, Any]
) -> WebhookEndpoint | None:
    row = await (await connection.execute(_SQL[statement], values)).fetchone()
    return _endpoint(box, row) if row else None


def _endpoint(box: SecretBox, row: Any) -> WebhookEndpoint:
    found = WebhookEndpoint(*row)
    try:
        return replace(found, secret=box.open(found.secret, found.owner, found.id))
    except SecretNotOpened:
        return replace(found, secret=b"")
