from __future__ import annotations

from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.db import arrays

_int4 = st.integers(-(2**31), 2**31 - 1)
_int8 = st.integers(-(2**63), 2**63 - 1)
_text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)

_KINDS: dict[str, tuple[type[Any], str, st.SearchStrategy[Any]]] = {
    "int4": (arrays.Int4Array, "int4[]", st.one_of(_int4, st.none())),
    "int4 dense": (arrays.Int4Array, "int4[]", _int4),
    "int8": (arrays.Int8Array, "int8[]", _int8),
    "float8": (arrays.Float8Array, "float8[]", st.floats(allow_nan=False)),
    "bool": (arrays.BoolArray, "bool[]", st.booleans()),
    "text": (arrays.TextArray, "text[]", st.one_of(_text, st.none())),
    "bytea": (arrays.ByteaArray, "bytea[]", st.one_of(st.binary(max_size=50), st.none())),
}


@pytest.mark.parametrize("name", _KINDS)
def test_what_is_packed_is_what_the_server_reads(database_18: str, name: str) -> None:
    kind, cast, elements = _KINDS[name]
    with psycopg.connect(database_18, autocommit=True) as connection:
        arrays.register(connection)

        @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(elements, max_size=30))
        def round_trip(values: list[Any]) -> None:
            row = connection.execute(f"SELECT %b::{cast}".encode(), [kind(values)]).fetchone()
            assert row == (values,)

        round_trip()
