"""Paths that HTTP jobs may ask for."""

from __future__ import annotations

import pytest

from penstock.dispatch.rows_paths import RowsPath
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("pattern", "method", "template", "allowed"),
    [
        ("/", "POST", "/{{ path }}", True),
        ("GET /prices/", "GET", "/prices/{{ sku }}", True),
        ("GET /prices/", "GET", "/prices/eu/{{ sku }}", True),
        ("GET /prices/", "GET", "/prices/", True),
        ("GET /prices/", "POST", "/prices/{{ sku }}", False),
        ("/prices/", "POST", "/prices/{{ sku }}", True),
        ("/prices/", "GET", "/prices{{ sku }}", False),
        ("/prices/", "GET", "/{{ 'prices' }}/{{ sku }}", False),
        ("/prices/", "GET", "/{# prices #}/prices/", False),
        ("/prices/", "GET", "/v1/files", False),
        ("/search", "GET", "/search", True),
        ("/search", "GET", "/search/{{ sku }}", False),
        ("/search", "GET", "/search{{ sku }}", False),
    ],
)
def test_what_is_allowed(pattern: str, method: str, template: str, allowed: bool) -> None:
    path = RowsPath.parse(pattern)
    assert path.allows(method, template) is allowed
    assert RowsPath.parse(str(path)) == path


@pytest.mark.parametrize("pattern", ["", "prices", "DELETE /prices/", "GET  /x", "/a?b", "/a#b", "/{{ a }}", "get /x"])
def test_what_is_no_path(pattern: str) -> None:
    with pytest.raises(UsageError, match="is not a path"):
        RowsPath.parse(pattern)
