"""Models that are served, those that the configuration names without a pattern."""

from __future__ import annotations

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
    return ModelList(data=[ModelObject(id=model, owned_by=name) for model, name in call.server.providers.models])


async def _retrieve(call: Call[None, None]) -> ModelObject:
    wanted = call.path["model"]
    for provider in call.server.providers:
        if provider.serves(wanted):
            return ModelObject(id=wanted, owned_by=provider.name)
    raise ApiError(404, f"The model '{wanted[:100]}' does not exist", param="model", code="model_not_found")


ENDPOINTS = (
    Endpoint("GET", "/v1/models", _list, "The models that are served by name.", name="list_models"),
    Endpoint(
        "GET",
        "/v1/models/{model:path}",
        _retrieve,
        "One model, if a provider serves it.",
        errors=(404,),
        name="retrieve_model",
    ),
)
