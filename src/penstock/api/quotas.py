"""Limits of an owner, and what it uses of them: each owner sees its own, admins everybody's."""

from __future__ import annotations

from penstock.api.endpoint import Call, Camel, Endpoint
from penstock.db.pool import borrowed
from penstock.quotas.quotas import quota_in_force, read_own_quota, read_use


class Limit(Camel):
    limit: int | None
    """None if there is no limit."""
    used: int


class Limits(Camel):
    owner: str
    open_batches: Limit
    """Batches, message batches and jobs that have not ended."""
    stored_bytes: Limit
    requests_per_minute: Limit
    """Used: what servers have taken of this minute, in steps; only counted where there is a limit."""
    in_flight: int
    """Items of batches and jobs that workers hold."""
    max_priority: int


async def own_limits(call: Call[None, None]) -> Limits:
    return await _read(call, call.caller.owner)


async def limits_of_owner(call: Call[None, None]) -> Limits:
    """An owner that was never seen has the limits of all, and uses nothing."""
    return await _read(call, call.path["owner"])


async def _read(call: Call[None, None], owner: str) -> Limits:
    async with borrowed(call.database) as connection:
        quota = quota_in_force(await read_own_quota(connection, owner), call.server.config.quotas)
        use = await read_use(connection, owner)
    return Limits(
        owner=owner,
        open_batches=Limit(limit=quota.max_open_batches or None, used=use.open_batches),
        stored_bytes=Limit(limit=quota.max_stored_bytes or None, used=use.stored_bytes),
        requests_per_minute=Limit(limit=quota.requests_per_minute or None, used=use.requests_this_minute),
        in_flight=use.in_flight,
        max_priority=quota.max_priority,
    )


ENDPOINTS = (
    # Not counted: an owner that has made too many requests can see so.
    Endpoint("GET", "/api/limits", own_limits, "One's limits, and what one uses of them.", counted=False),
    Endpoint("GET", "/api/limits/{owner:path}", limits_of_owner, "The limits of an owner.", role="admin"),
)
