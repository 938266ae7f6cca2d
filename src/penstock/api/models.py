"""Models that are served: those that the configuration names, and what providers list where it names a pattern."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from penstock.api.endpoint import Call, Endpoint
from penstock.api.errors import ApiError


class ModelObject(msgspec.Struct, rename={"kind": "object"}, kw_only=True):
    id: str
    kind: Literal["model"] = "model"
    created: int = 0
    owned_by: str


class ModelList(msgspec.Struct, rename={"kind": "object"}, kw_only=True):
    kind: Literal["list"] = "list"
    data: list[ModelObject]


async def _list(call: Call[None, None]) -> ModelList:
    found = dict(call.server.providers.models)
    open_ended = [provider for provider in call.server.providers if provider.names_patterns]
    listed = await asyncio.gather(*(call.server.upstreams.list_models(provider) for provider in open_ended))
    for provider, names in zip(open_ended, listed, strict=True):
        for name in names:
            found.setdefault(name, provider.name)
    return ModelList(data=[ModelObject(id=model, owned_by=name) for model, name in found.items()])


async def _retrieve(call: Call[None, None]) -> ModelObject:
    wanted = call.path["model"]
    for provider in call.server.providers:
        if provider.serves(wanted):
            return ModelObject(id=wanted, owned_by=provider.name)
    raise ApiError(404, f"The model '{wanted[:100]}' does not exist", param="model", code="model_not_found")


ENDPOINTS = (
    Endpoint(
        "GET",
        "/v1/models",
        _list,
        "The models that are served: by name, and as providers list them.",
        name="list_models",
    ),
    Endpoint(
        "GET",
        "/v1/models/{model:path}",
        _retrieve,
        "One model, if a provider serves it.",
        errors=(404,),
        name="retrieve_model",
    ),
)
