"""Every method the official clients have for what we serve is called somewhere in this folder."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import openai
import pytest

_CALLED = "\n".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_openai*.py"))
# Nobody can delete a model that a provider serves.
_LEFT_OUT = {"models.delete"}


def methods() -> list[str]:
    client = openai.OpenAI(api_key="none")
    found = []
    for resource in ("files", "uploads", "uploads.parts", "batches", "webhooks", "webhooks.event_types", "models"):
        part: Any = client
        for name in resource.split("."):
            part = getattr(part, name, None)
        for name, _ in inspect.getmembers(type(part), inspect.isfunction):
            if part is not None and not name.startswith(("_", "with_")):
                found.append(f"{resource}.{name}")
    return sorted(set(found) - _LEFT_OUT)


@pytest.mark.parametrize("method", methods())
def test_is_called(method: str) -> None:
    assert f'"{method}"' in _CALLED
