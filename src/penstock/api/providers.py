"""Providers as an operator sees them: their models, their closed gates, and a way to open halted ones."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.api.endpoint import Call, Endpoint, Nothing
from penstock.api.errors import not_found
from penstock.api.objects import seconds, seconds_or_none
from penstock.batches.unserved import list_unserved
from penstock.claim import gates
from penstock.db.notify import WORK, notify
from penstock.db.pool import Connection, borrowed
from penstock.dispatch.providers import Provider
from penstock.limits import store


class GateObject(msgspec.Struct, kw_only=True):
    """Gate of a model that is not called at the moment, for any owner, and why. The message of a halt names the batch
    whose request was refused."""

    model: str
    state: Literal["waiting", "halted"]
    until: int | None
    code: str
    message: str


class LimitObject(msgspec.Struct, kw_only=True):
    """How much of a model is called, over all processes, and why that last moved."""

    model: str
    in_flight: int
    max_in_flight: float
    floor: float
    ceiling: float
    max_per_second: float | None
    reason: str
    moved_at: int


class ProviderObject(msgspec.Struct, rename={"kind": "object"}, kw_only=True):
    kind: Literal["provider"] = "provider"
    name: str
    models: list[str]
    max_concurrency: int | None
    max_rpm: int | None
    max_tpm: int | None
    gates: list[GateObject]
    limits: list[LimitObject]


class UnservedObject(msgspec.Struct, kw_only=True):
    """Work of a provider that is not configured here and has no live worker."""

    pool: str
    models: list[str]


class ProviderList(msgspec.Struct, rename={"kind": "object"}, kw_only=True):
    kind: Literal["list"] = "list"
    data: list[ProviderObject]
    unserved: list[UnservedObject]
    """Work of a provider that is not configured any more, and that no worker elsewhere has either."""


async def _read_provider(connection: Connection, provider: Provider, grace_s: float) -> ProviderObject:
    found: dict[str, gates.Gate] = {}
    for pool in (provider.pool, provider.session_pool):
        for gate in await gates.list_closed(connection, pool):
            # Of several reasons, one that needs a person is shown before one that passes by itself.
            if gate.route not in found or (gate.halted_at and not found[gate.route].halted_at):
                found[gate.route] = gate
    closed = [
        GateObject(
            model=gate.route,
            state="halted" if gate.halted_at else "waiting",
            until=seconds_or_none(gate.not_before) if not gate.halted_at else None,
            code=gate.code,
            message=gate.message,
        )
        for gate in found.values()
    ]
    return ProviderObject(
        name=provider.name,
        models=list(provider.models),
        max_concurrency=provider.max_concurrency,
        max_rpm=provider.max_rpm,
        max_tpm=provider.max_tpm,
        gates=closed,
        limits=[
            LimitObject(
                model=limit.model,
                in_flight=limit.in_flight,
                max_in_flight=round(limit.calls, 1),
                floor=limit.floor,
                ceiling=limit.ceiling,
                max_per_second=None if limit.per_s is None else round(limit.per_s, 3),
                reason=limit.reason,
                moved_at=seconds(limit.moved_at),
            )
            for limit in await store.read_limits(connection, grace_s, [provider.name])
        ],
    )


async def _list(call: Call[None, None]) -> ProviderList:
    server = call.server
    grace_s = server.config.liveness.heartbeat_grace_s
    async with borrowed(call.database) as connection:
        left = await list_unserved(connection, server.providers.pools, grace_s)
        return ProviderList(
            data=[await _read_provider(connection, provider, grace_s) for provider in server.providers],
            unserved=[UnservedObject(pool=pool, models=models) for pool, models in left.items()],
        )


async def _resume(call: Call[None, Nothing | None]) -> ProviderObject:
    wanted, grace_s = call.path["name"], call.server.config.liveness.heartbeat_grace_s
    for provider in call.server.providers:
        if provider.name == wanted:
            async with borrowed(call.database) as connection:
                for pool in (provider.pool, provider.session_pool):
                    await gates.reopen(connection, pool)
                    await notify(connection, WORK, pool)
                return await _read_provider(connection, provider, grace_s)
    raise not_found("Provider", wanted, "name")


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/providers",
        _list,
        "The providers, which of their models wait or are halted, and work that belongs to none of them.",
        role="admin",
        name="list_providers",
    ),
    Endpoint(
        "POST",
        "/v1/providers/{name}/resume",
        _resume,
        "Call this provider again: the cause of its halt is fixed.",
        role="admin",
        errors=(404,),
        name="resume_provider",
    ),
)
