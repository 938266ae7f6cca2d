"""Values that fit a JSON schema, for answers to requests that ask for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MAX_NESTING = 32
_MAX_CHARS = 10_000


def fitting(schema: Any, text: str, digest: str, name: str = "", depth: int = 1) -> Any:
    """A value that fits the schema: texts are `text`, numbers and choices follow from the digest and the name.

    Known are `type`, `properties`, `items`, `enum`, `minimum`, `maximum`, `minLength` and `maxLength`. A schema that
    asks for more may get a value that does not fit, as from any model.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_NESTING:
        return text
    pick = int(digest, 16) + sum(name.encode())
    choices, properties = schema.get("enum"), schema.get("properties")
    if isinstance(choices, list) and choices:
        return choices[pick % len(choices)]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "object" or properties:
        properties = properties if isinstance(properties, Mapping) else {}
        return {key: fitting(each, text, digest, key, depth + 1) for key, each in properties.items()}
    if kind == "array":
        return [fitting(schema.get("items"), text, digest, name, depth + 1)]
    if kind in ("integer", "number"):
        return _number(schema, pick)
    if kind == "boolean":
        return pick % 2 == 0
    if kind == "null":
        return None
    least, most = int(_bound(schema, "minLength", 0)), int(_bound(schema, "maxLength", _MAX_CHARS))
    return text.ljust(min(least, _MAX_CHARS), ".")[:most]


def _number(schema: Mapping[str, Any], pick: int) -> int | float:
    """A whole number between the bounds, if there is one."""
    low = _bound(schema, "minimum", 0)
    high = _bound(schema, "maximum", low + 100)
    lowest, highest = math.ceil(low), math.floor(high)
    return lowest + pick % (highest - lowest + 1) if lowest <= highest else low


def _bound(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
