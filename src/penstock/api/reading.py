"""Bodies and queries of requests: decoded and checked, with errors that name the field."""

from __future__ import annotations

import re
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import inspect
from starlette.types import Scope

from penstock.api.errors import ApiError

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*?)`")
_MISSING = re.compile(r"Object missing required field `(?P<field>.*?)`")
# A key may contain brackets: read as another parameter, it would not narrow the answer.
_BRACKETED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<key>.*)\]", re.DOTALL)
_JSON_TYPE = re.compile(r"application/(?:[\w.+-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?[\d.]+(?:e[+-]?\d+)?", re.IGNORECASE)
_MAX_QUERY_FIELDS = 200


def check_url(scope: Scope) -> None:
    """Refuse a path or a query that is not UTF-8: read as something else, it could mean another object."""
    for part in (scope.get("raw_path") or b"", scope["query_string"]):
        if b"%" in part or not part.isascii():
            try:
                unquote_to_bytes(part).decode()
            except UnicodeDecodeError:
                raise ApiError(400, "The path and the query must be UTF-8.", code="invalid_url") from None


def is_optional(kind: Any) -> bool:
    """Whether the type is `Thing | None`."""
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


class BodyReader(Generic[T]):
    """Reader of one endpoint's JSON body."""

    def __init__(self, kind: Any) -> None:
        self._optional = is_optional(kind)
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def read(self, content: bytes, content_type: str | None) -> T | None:
        if not content.strip():
            if self._optional:
                return None
            raise ApiError(400, "The request's body is empty; it must be a JSON object.", code="invalid_json")
        if content_type is not None and not _JSON_TYPE.match(content_type.strip()):
            raise ApiError(
                415, "The request's body must have the content type application/json.", code="unsupported_media_type"
            )
        try:
            return self._decoder.decode(content)
        except msgspec.ValidationError as error:
            raise _to_api_error(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ApiError(400, "The request's body is not valid JSON.", code="invalid_json") from None


class QueryReader(Generic[T]):
    """Reader of one endpoint's query: numbers from text, `name[key]=value` to tables, repeated names to lists."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        about = inspect.type_info(kind)
        if not isinstance(about, inspect.StructType):
            raise TypeError(f"{kind.__name__} is not a Struct")
        self._all_optional = not any(field.required for field in about.fields)
        self._names = {field.encode_name: field.name for field in about.fields}
        self._lists = {field.encode_name for field in about.fields if _holds(field.type, inspect.ListType)}
        self._tables = {field.encode_name for field in about.fields if _holds(field.type, inspect.DictType)}
        self._moments = {field.encode_name for field in about.fields if _holds(field.type, inspect.DateTimeType)}

    def read(self, query: bytes) -> T:
        if not query and self._all_optional:
            return self._kind()
        try:
            pairs = parse_qsl(query.decode(), keep_blank_values=True, max_num_fields=_MAX_QUERY_FIELDS, errors="strict")
        except ValueError:
            raise ApiError(400, "The query cannot be read.", code="invalid_query") from None
        values: dict[str, Any] = {}
        for name, value in pairs:
            match = _BRACKETED.fullmatch(name)
            if match and match["name"] in self._tables:
                values.setdefault(match["name"], {})[match["key"]] = value
            elif match and match["name"] in self._lists and not match["key"]:
                values.setdefault(match["name"], []).append(value)
            elif name in self._lists:
                values.setdefault(name, []).append(value)
            elif name in self._moments and _NUMBER.fullmatch(value.strip()):
                # msgspec would read it as seconds since 1970.
                raise ApiError(
                    400, f"Invalid '{name}': expected a date and time as in RFC 3339.", param=name, code="invalid_value"
                )
            elif name not in self._tables:
                values[name] = value
            else:
                raise ApiError(
                    400, f"Invalid '{name}': write it as {name}[key]=value.", param=name, code="invalid_value"
                )
        try:
            found = msgspec.convert(values, self._kind, strict=False)
        except msgspec.ValidationError as error:
            explained = _to_api_error(str(error))
            explained.status = 400
            raise explained from None
        for name in values:
            # The word null would be read as if the name were left out.
            if name in self._names and getattr(found, self._names[name]) is None:
                raise ApiError(400, f"Invalid '{name}': null is no value.", param=name, code="invalid_value")
        return found


def _holds(kind: inspect.Type, wanted: type[inspect.Type]) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(isinstance(entry, wanted) for entry in kind.types)
    return isinstance(kind, wanted)


def _to_api_error(text: str) -> ApiError:
    """Error with msgspec's text, and the path of the field as `param`."""
    # From the end: what comes before may quote the request, at any length.
    what, mark, path = text.rpartition(" - at ")
    if not mark:
        what, path = text, ""
    place = path.removeprefix("`key` in ").strip("`").removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        param = f"{place}.{unknown['field']}".lstrip(".")[:200]
        return ApiError(422, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if missing := _MISSING.match(what):
        param = f"{place}.{missing['field']}".lstrip(".")
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if not place:
        return ApiError(400, f"Invalid body: {what}.", code="invalid_type")
    return ApiError(400, f"Invalid '{place}': {what}.", param=place, code="invalid_value")
