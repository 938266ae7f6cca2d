"""OpenAPI 3.1 document, made from the types that the endpoints check requests with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import inspect

from penstock import __version__
from penstock.api.endpoint import Endpoint
from penstock.api.errors import ERROR_TYPES
from penstock.api.reading import is_optional

_VARIABLE = re.compile(r"{(\w+)(?::\w+)?}")
_REFERENCE = "#/components/schemas/{name}"
_MEANINGS = {
    400: "The request is malformed.",
    401: "No key, or not a valid one.",
    403: "The key may not do this.",
    404: "There is no such object.",
    408: "The request came too slowly.",
    409: "The object's state does not allow this.",
    413: "The request is too large.",
    415: "The body's content type is not supported.",
    422: "The request contains something unknown.",
    429: "Too many requests.",
    500: "The server failed.",
    503: "Not ready at the moment.",
    507: "The disk is full.",
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
_REQUEST_ID = {"x-request-id": {"description": "Names this request in the log.", "schema": {"type": "string"}}}


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The whole description. It takes longer to make than all else that a command needs of the application."""
    endpoints = tuple(endpoints)
    kinds = [kind for endpoint in endpoints for kind in _types_of(endpoint)]
    kinds += ERROR_TYPES.values()
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    known = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = paths.setdefault(_VARIABLE.sub(r"{\1}", endpoint.path), {})
        path[endpoint.method.lower()] = _Operation(endpoint, known, components).describe()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": __version__,
            "description": "Durable batches on PostgreSQL, for clients of OpenAI's and Anthropic's batch APIs.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
        "security": [{name: []} for name in _SECURITY],
    }


def _types_of(endpoint: Endpoint) -> list[Any]:
    return [kind for kind in (endpoint.query, endpoint.body, endpoint.answer) if kind is not None]


class _Operation:
    def __init__(self, endpoint: Endpoint, known: dict[str, Any], components: dict[str, Any]) -> None:
        self._endpoint = endpoint
        self._known = known
        self._components = components

    def describe(self) -> dict[str, Any]:
        endpoint = self._endpoint
        operation: dict[str, Any] = {
            "operationId": endpoint.name or getattr(endpoint.handle, "__name__", endpoint.path).strip("_"),
            "summary": endpoint.summary,
            "tags": [endpoint.path.strip("/").removeprefix("v1/").split("/")[0]],
            "responses": self._responses(),
        }
        if parameters := [*self._path_parameters(), *self._query_parameters()]:
            operation["parameters"] = parameters
        if body := self._body():
            operation["requestBody"] = body
        if endpoint.role == "anyone":
            operation["security"] = []
        return operation

    def _path_parameters(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in _VARIABLE.findall(self._endpoint.path)
        ]

    def _query_parameters(self) -> list[dict[str, Any]]:
        query = self._endpoint.query
        if query is None:
            return []
        schema = self._known[repr(query)]
        if "$ref" in schema:
            schema = self._components[schema["$ref"].rsplit("/", 1)[-1]]
        about = inspect.type_info(query)
        fields = about.fields if isinstance(about, inspect.StructType) else ()
        required = {field.encode_name for field in fields if field.required}
        return [
            {
                "name": name,
                "in": "query",
                "required": name in required,
                "schema": _not_null(entry),
                **({"style": "deepObject", "explode": True} if _is_table(entry) else {}),
            }
            for name, entry in schema.get("properties", {}).items()
        ]

    def _body(self) -> dict[str, Any] | None:
        endpoint = self._endpoint
        if endpoint.form is not None:
            return {"required": True, "content": {"multipart/form-data": {"schema": endpoint.form}}}
        if endpoint.stream is not None:
            return {"required": True, "content": {endpoint.stream: {"schema": {}}}}
        if endpoint.body is None:
            return None
        return {
            "required": not is_optional(endpoint.body),
            "content": {"application/json": {"schema": self._known[repr(endpoint.body)]}},
        }

    def _responses(self) -> dict[str, Any]:
        endpoint = self._endpoint
        media = endpoint.media
        schema: Any = self._known[repr(endpoint.answer)] if endpoint.answer is not None else {}
        success: dict[str, Any] = {"description": endpoint.summary, "headers": _REQUEST_ID}
        if endpoint.status != 204:
            success["content"] = {media: {"schema": schema} if schema else {}}
        error = {"application/json": {"schema": self._known[repr(ERROR_TYPES[endpoint.dialect])]}}
        responses: dict[str, Any] = {str(endpoint.status): success}
        expected = set(endpoint.errors) | ({400} if endpoint.query is not None else set())
        if endpoint.body is not None:
            expected |= {400, 408, 413, 415, 422}
        if endpoint.role != "anyone":
            expected |= {401, 503} | ({429} if endpoint.counted else set())
        if endpoint.role == "admin":
            expected.add(403)
        for status in sorted(expected):
            content = error
            if endpoint.role == "anyone":  # health says the same in good days and bad
                content = {"application/json": {"schema": schema}}
            responses[str(status)] = {"description": _MEANINGS.get(status, "An error."), "content": content}
        responses["default"] = {"description": "Any other error.", "content": error}
        return responses


def _not_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema without null: a query says null by leaving the name out."""
    said = {name: value for name, value in schema.items() if not (name == "default" and value is None)}
    if "anyOf" not in said:
        return said
    kinds = [entry for entry in said["anyOf"] if entry != {"type": "null"}]
    rest = {name: value for name, value in said.items() if name != "anyOf"}
    return {**rest, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}


def _is_table(schema: dict[str, Any]) -> bool:
    return _not_null(schema).get("type") == "object"
