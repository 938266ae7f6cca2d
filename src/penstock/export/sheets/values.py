"""Values of a sheet's cells: JSON values, as the stored rows and results have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

Value: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any] | None


_MAX_FIELDS = 100
"""Fields that a Struct of a sheet has at most: msgspec looks for each key among all of them."""


def define_record(names: Sequence[str]) -> type[msgspec.Struct] | None:
    """Define a Struct with a field for each name, null unless it is given: read and written faster than a dict. None if
    the names are too many, or have characters that JSON would escape."""
    if len(names) > _MAX_FIELDS:
        return None
    fields = {f"column_{place}": name for place, name in enumerate(names)}
    try:
        return msgspec.defstruct("Record", [(field, Any, None) for field in fields], rename=fields, gc=False)
    except ValueError:
        return None


ValuesReader: TypeAlias = Callable[[Iterable[bytes]], Iterator[tuple[Value, ...]]]


def values_reader(names: Sequence[str], inside: str | None = None) -> ValuesReader:
    """Reader of the values that each of some JSON objects has under these names, null for those it has not; or of
    objects that are the objects' member `inside`."""
    record = define_record(names)
    kind: Any = dict[str, Any] if record is None else record
    outer = kind if inside is None else msgspec.defstruct("Outer", [(inside, kind)], gc=False)
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(outer).decode
    pick: Callable[[Any], tuple[Value, ...]] = msgspec.structs.astuple
    if record is None:

        def pick(found: Any) -> tuple[Value, ...]:
            return tuple(map(found.get, names))

    if inside is None:
        return lambda texts: map(pick, map(decode, texts))
    member = attrgetter(inside)
    return lambda texts: map(pick, map(member, map(decode, texts)))


def json_text(value: list[Any] | dict[str, Any]) -> str:
    """Text of a cell that holds a list or an object."""
    return msgspec.json.encode(value).decode()
