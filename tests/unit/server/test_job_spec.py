"""Where jobs go: pool and route, and what the operator allows."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.dispatch.providers import Provider
from penstock.dispatch.rows_paths import RowsPath
from penstock.errors import UsageError
from penstock.server.job_spec import JobSpec, place_job

PROVIDERS = [
    Provider("openai", "https://a.example/v1", ("gpt-*",)),
    Provider("shop", "https://b.example", ("none",), rows_paths=(RowsPath.parse("GET /prices/"),)),
]
CHAT = {"type": "chat", "provider": "openai", "model": "gpt-5", "prompt": "{{ title }}"}
HTTP = {"type": "http", "provider": "shop", "method": "GET", "path": "/prices/{{ sku }}"}


def place(definition: dict[str, Any], owner: str = "anna") -> tuple[str, str]:
    return place_job(JobSpec(definition), owner, [], PROVIDERS)


def test_where_definitions_go() -> None:
    assert place(CHAT) == ("serve:openai", "gpt-5")
    # What an upstream asks of one owner's route, the others need not wait for.
    assert place(HTTP) == ("serve:shop", "http:anna")
    assert place(HTTP, "bert") == ("serve:shop", "http:bert")


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (
            {**CHAT, "model": "o9"},
            "processor.model: the provider 'openai' does not serve the model 'o9'",
        ),
        (
            {**HTTP, "provider": "openai", "path": "/v1/files"},
            "processor.path: 'GET /v1/files' is not allowed: "
            "rows_paths of the provider 'openai' says what HTTP jobs may ask of it",
        ),
        (
            {**HTTP, "method": "POST"},
            "processor.path: 'POST /prices/{{ sku }}' is not allowed: "
            "rows_paths of the provider 'shop' says what HTTP jobs may ask of it",
        ),
        (
            {**HTTP, "strategies": [{"name": "a"}, {"name": "b", "path": "/orders/{{ sku }}"}]},
            "processor.path: 'GET /orders/{{ sku }}' is not allowed: "
            "rows_paths of the provider 'shop' says what HTTP jobs may ask of it",
        ),
        ({**HTTP, "provider": "other"}, "processor.provider: there is no provider 'other'"),
    ],
)
def test_what_the_operator_does_not_allow(definition: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        place(definition)
    assert caught.value.message == message
