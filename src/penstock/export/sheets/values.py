"""Values of a sheet's cells: JSON values, as the stored rows and results have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        return msgspec.defstruct("Record", [(field, Any, None) for field in fields], rename=fields)
    except ValueError:
        return None


def values_reader(names: Sequence[str], inside: str | None = None) -> Callable[[bytes], tuple[Value, ...]]:
    """Reader of the values that a JSON object has under some names, null for those it has not; or of an object that is
    the object's member `inside`."""
    record = define_record(names)
    kind: Any = dict[str, Any] if record is None else record
    outer = kind if inside is None else msgspec.defstruct("Outer", [(inside, kind)])
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(outer).decode
    if inside is None:
        read = decode
    else:
        member = attrgetter(inside)

        def read(text: bytes) -> Any:
            return member(decode(text))

    if record is None:
        return lambda text: tuple(map(read(text).get, names))
    as_tuple = msgspec.structs.astuple
    return lambda text: as_tuple(read(text))


def json_text(value: list[Any] | dict[str, Any]) -> str:
    """Text of a cell that holds a list or an object."""
    return msgspec.json.encode(value).decode()
