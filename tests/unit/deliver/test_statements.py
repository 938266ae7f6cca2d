from __future__ import annotations

import pytest

from penstock.db import sql

_SQL = sql.load("penstock.deliver", "deliver.sql")


@pytest.mark.parametrize("name", ["record_{}delivery_if_held", "put_back_{}deliveries_if_held"])
def test_deliveries_of_both_kinds_are_treated_alike(name: str) -> None:
    of_sinks = _SQL[name.format("sink_")].replace(b"penstock.sink_deliveries", b"penstock.webhook_deliveries")
    assert of_sinks == _SQL[name.format("")]
