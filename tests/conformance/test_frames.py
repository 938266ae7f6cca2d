"""Rows of pandas and polars frames, as `penstock.map` stores them. They are tried in an environment of their own:
`make conformance`."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from typing import Any

ROWS = {"sku": ["a", "b"], "price": [1.5, None], "count": [1, 2]}
EXPECTED = [{"sku": "a", "price": 1.5, "count": 1}, {"sku": "b", "price": None, "count": 2}]

# Where they are not installed this file holds no tests.
if find_spec("pandas") is not None and find_spec("polars") is not None:

    def encoded(frame: Any) -> list[Any]:
        values: Any = import_module("penstock.library.values")
        return [json.loads(row) for row in values.encode_rows(frame)]

    def test_pandas() -> None:
        pandas: Any = import_module("pandas")
        assert encoded(pandas.DataFrame(ROWS)) == EXPECTED
        times = pandas.DataFrame({"at": pandas.to_datetime(["2026-01-02", None])})
        assert encoded(times) == [{"at": "2026-01-02T00:00:00"}, {"at": None}]
        missing = pandas.DataFrame({"n": pandas.array([1, None], dtype="Int64")})
        assert encoded(missing) == [{"n": 1}, {"n": None}]

    def test_polars() -> None:
        polars: Any = import_module("polars")
        assert encoded(polars.DataFrame(ROWS)) == EXPECTED
