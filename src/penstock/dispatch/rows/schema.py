"""JSON schemas: a check of a model's answer against the part of JSON Schema that matters for columns.

Checked are `type`, `properties`, `required`, `enum`, `items`, `additionalProperties`, `minimum`, `maximum`, `minLength`
and `maxLength`. Every other keyword (`pattern`, `format`, `$ref`, `anyOf` …) is sent to the model and not checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import UsageError

MAX_PROPERTIES = 200
_MAX_NESTING = 32
_HINT = 'For example {"type": "object", "properties": {"category": {"type": "string"}}, "required": ["category"]}.'


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, and is not true as it is in Python."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(each, other[name]) for name, each in one.items())
    return bool(one == other)


def misfit(value: Any, schema: Any, place: str = "") -> str | None:
    """The first reason why the value does not fit a checked schema; None if it fits."""
    if not isinstance(schema, dict):
        return f"{place or 'it'} is not allowed" if schema is False else None
    where = place or "it"
    types = schema.get("type", ())
    types = (types,) if isinstance(types, str) else types
    if types and not any(_TYPES[name](value) for name in types):
        return f"{where} is not of type {' or '.join(types)}"
    if "enum" in schema and not any(same_json(value, allowed) for allowed in schema["enum"]):
        return f"{where} is none of the values in enum"
    if _is_number(value):
        return _out_of_bounds(value, schema, "minimum", "maximum", where)
    if isinstance(value, str):
        return _out_of_bounds(len(value), schema, "minLength", "maxLength", f"the length of {where}")
    if isinstance(value, list):
        items = schema.get("items")
        return next(filter(None, (misfit(each, items, f"{place}[{at}]") for at, each in enumerate(value))), None)
    return _misfit_of_object(value, schema, place) if isinstance(value, dict) else None


def _out_of_bounds(number: float, schema: Mapping[str, Any], low: str, high: str, where: str) -> str | None:
    if low in schema and number < schema[low]:
        return f"{where} is less than {schema[low]}"
    if high in schema and number > schema[high]:
        return f"{where} is more than {schema[high]}"
    return None


def _misfit_of_object(value: Mapping[str, Any], schema: Mapping[str, Any], place: str) -> str | None:
    within = f"{place}." if place else ""
    for name in schema.get("required", ()):
        if name not in value:
            return f"{within}{name} is missing"
    properties = schema.get("properties", {})
    for name, each in value.items():
        found = misfit(each, properties.get(name, schema.get("additionalProperties")), f"{within}{name}")
        if found is not None:
            return found
    return None


def check_schema(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that makes no columns, or whose checked keywords are malformed. Raises UsageError."""
    properties = schema.get("properties")
    if schema.get("type") != "object" or not isinstance(properties, dict) or not properties:
        raise UsageError("is not the schema of an object with properties, which become the columns", hint=_HINT)
    if len(properties) > MAX_PROPERTIES:
        raise UsageError(f"has {len(properties)} properties", hint=f"At most {MAX_PROPERTIES} columns can be made.")
    if "" in properties:
        raise UsageError("has a property without a name", hint="A property's name is the name of its column.")
    _check(schema, "", 1)


_KEYWORDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "properties": (lambda value: isinstance(value, dict), "an object of schemas"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names",
    ),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "minimum": (_is_number, "a number"),
    "maximum": (_is_number, "a number"),
    "minLength": (_is_number, "a number"),
    "maxLength": (_is_number, "a number"),
}


def _check(schema: Any, place: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise UsageError(f"{place}: is not a schema", hint=_HINT)
    if depth > _MAX_NESTING:
        raise UsageError(f"{place}: is nested more than {_MAX_NESTING} deep", hint="Make it flatter.")
    at = f"{place}." if place else ""
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(name, str) and name in _TYPES for name in types):
        raise UsageError(f"{at}type: {schema['type']!r} is no type", hint=f"The types are {', '.join(_TYPES)}.")
    for keyword, (fits, what) in _KEYWORDS.items():
        if keyword in schema and not fits(schema[keyword]):
            raise UsageError(f"{at}{keyword}: is not {what}", hint=_HINT)
    for name, each in schema.get("properties", {}).items():
        _check(each, f"{at}properties.{name}", depth + 1)
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            _check(schema[keyword], f"{at}{keyword}", depth + 1)
