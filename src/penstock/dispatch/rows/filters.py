"""Filters of templates. Every one counts the texts and elements that it is given; the engine's own do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

import minijinja
import msgspec

from penstock.config import MIB
from penstock.dispatch.rows.work import CountedList, Meter, RenderError, raw_value

MAX_TEXT_CHARS = 4 * MIB
METER = " work"
"""Name of the meter among the names that a template knows: none that could be written in one."""
OF_THE_ENGINE = frozenset({"abs", "bool", "d", "default", "round"})
"""The engine's filters that there are besides; what they do does not depend on a length."""
_PER_CALL = 64
_MAX_PARTS = 10_000

_encoder = msgspec.json.Encoder(enc_hook=raw_value)


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else as_json(value)


def as_json(value: Any) -> str:
    return _encoder.encode(value).decode()


def _counting(work: Callable[..., Any], per_char: int = 1) -> Any:
    @minijinja.pass_state
    def counted(state: Any, *values: Any, **named: Any) -> Any:
        meter: Meter = state.lookup(METER)
        texts = [value for value in (*values, *named.values()) if isinstance(value, str)]
        meter.add(_PER_CALL + per_char * sum(map(len, texts)))
        made = work(*values, **named)
        if isinstance(made, str) and not (values and isinstance(values[0], str) and len(made) <= len(values[0])):
            meter.add(len(made))
        return CountedList(made, meter) if isinstance(made, list) else made

    return counted


def _join(values: Iterable[Any], separator: str = "") -> str:
    texts = [as_text(value) for value in values]
    _check_length(sum(map(len, texts)) + len(texts) * len(separator))
    return separator.join(texts)


def _replace(value: Any, old: str, new: str) -> str:
    text = as_text(value)
    _check_length(len(text) + text.count(old) * len(new))
    return text.replace(old, new)


def _tojson(value: Any) -> str:
    text = as_json(value)
    _check_length(len(text))  # each time around, quotes and backslashes double
    return text


def _check_length(chars: int) -> None:
    if chars > MAX_TEXT_CHARS:
        raise RenderError(f"a text in it has more than {MAX_TEXT_CHARS:,} characters")


def _split(value: Any, separator: str | None = None, most: int = _MAX_PARTS) -> list[str]:
    parts = as_text(value).split(separator, min(most, _MAX_PARTS))
    if len(parts) > _MAX_PARTS:
        raise RenderError(f"split makes more than {_MAX_PARTS:,} parts")
    return parts


def _truncate(value: Any, length: int = 255, killwords: bool = False, end: str = "...", leeway: int = 5) -> str:
    text = as_text(value)
    if len(text) <= length + leeway:
        return text
    cut = text[: max(0, length - len(end))]
    return (cut if killwords else cut.rsplit(" ", 1)[0]) + end


def _length(value: Any) -> int:
    return len(value)


def _first(values: Any) -> Any:
    return values[0] if len(values) else None


def _last(values: Any) -> Any:
    return values[len(values) - 1] if len(values) else None


def _items(value: Any) -> list[list[Any]]:
    if not isinstance(value, Mapping):
        raise RenderError("items is for objects")
    return [[name, value[name]] for name in value]


def _map(values: Iterable[Any], *, attribute: str) -> list[Any]:
    return [value[attribute] for value in values]


def _int(value: Any) -> int:
    return int(float(value)) if isinstance(value, str) and "." in value else int(value)


def _urlencode(value: Any) -> str:
    return quote(as_text(value), safe="/")


def _trim(value: Any, chars: str | None = None) -> str:
    return as_text(value).strip(chars)


_WORK: dict[str, Callable[..., Any]] = {
    "capitalize": lambda value: as_text(value).capitalize(),
    "count": _length,
    "first": _first,
    "float": float,
    "int": _int,
    "items": _items,
    "join": _join,
    "last": _last,
    "length": _length,
    "lower": lambda value: as_text(value).lower(),
    "map": _map,
    "max": lambda values: max(values, default=None),
    "min": lambda values: min(values, default=None),
    "replace": _replace,
    "split": _split,
    "string": as_text,
    "sum": sum,
    "title": lambda value: as_text(value).title(),
    "tojson": _tojson,
    "trim": _trim,
    "truncate": _truncate,
    "upper": lambda value: as_text(value).upper(),
}
FILTERS: dict[str, Any] = {name: _counting(work) for name, work in _WORK.items()}
FILTERS["urlencode"] = _counting(_urlencode, 8)
