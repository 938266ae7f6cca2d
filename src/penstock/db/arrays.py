"""Arrays packed straight into PostgreSQL's binary format.

Settling a thousand rows sends a dozen arrays. The driver's general list adaptation looks at every element; these
wrappers know their type, and made a settle 2.4 times cheaper than arrays sent as text (see docs/adr/0001).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

_HEADER = struct.Struct(">iiIii")
_LENGTH = struct.Struct(">i")
_NULL = b"\xff\xff\xff\xff"
_SWAP = sys.byteorder == "little"


class _Packed:
    """An array already in wire format."""

    __slots__ = ("wire",)

    def __init__(self, wire: bytes) -> None:
        self.wire = wire


class Int4Array(_Packed):
    def __init__(self, values: Sequence[int | None]) -> None:
        if None in values:
            super().__init__(_sparse(23, values, struct.Struct(">i")))
        else:
            super().__init__(_dense_int4([value for value in values if value is not None]))


class Int8Array(_Packed):
    def __init__(self, values: Sequence[int | None]) -> None:
        super().__init__(_sparse(20, values, struct.Struct(">q")))


class Float8Array(_Packed):
    def __init__(self, values: Sequence[float]) -> None:
        super().__init__(_sparse(701, values, struct.Struct(">d")))


class BoolArray(_Packed):
    def __init__(self, values: Sequence[bool]) -> None:
        super().__init__(_sparse(16, values, struct.Struct(">?")))


class TextArray(_Packed):
    def __init__(self, values: Sequence[str | None]) -> None:
        encoded = [None if value is None else value.encode() for value in values]
        super().__init__(_variable(25, encoded))


class ByteaArray(_Packed):
    def __init__(self, values: Sequence[bytes | None]) -> None:
        super().__init__(_variable(17, values))


def _header(oid: int, count: int, has_null: bool) -> bytes:
    return _HEADER.pack(1, has_null, oid, count, 1)


def _dense_int4(values: list[int]) -> bytes:
    # Each element is a length word and a value word: fill every other word, then swap them all at once.
    words = array("i", bytes(8 * len(values)))
    words[0::2] = array("i", [4]) * len(values)
    words[1::2] = array("i", values)
    if _SWAP:
        words.byteswap()
    return _header(23, len(values), False) + words.tobytes()


def _sparse(oid: int, values: Sequence[float | None], word: struct.Struct) -> bytes:
    length = _LENGTH.pack(word.size)
    pack = word.pack
    parts = [_NULL if value is None else length + pack(value) for value in values]
    return _header(oid, len(values), None in values) + b"".join(parts)


def _variable(oid: int, values: Sequence[bytes | None]) -> bytes:
    pack = _LENGTH.pack
    parts = [_header(oid, len(values), None in values)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts.append(pack(len(value)))
            parts.append(value)
    return b"".join(parts)


class _PackedDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: _Packed) -> bytes:
        return obj.wire


def register(context: psycopg.abc.AdaptContext) -> None:
    """Register these types with a connection."""
    adapters = context.adapters
    if adapters is None:
        raise ValueError("the context has no adapters")
    for kind, oid in (
        (Int4Array, 1007),
        (Int8Array, 1016),
        (Float8Array, 1022),
        (BoolArray, 1000),
        (TextArray, 1009),
        (ByteaArray, 1001),
    ):
        dumper = type(f"{kind.__name__}Dumper", (_PackedDumper,), {"oid": oid})
        adapters.register_dumper(kind, dumper)
