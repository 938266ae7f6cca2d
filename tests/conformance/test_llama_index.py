"""llama-index's chat model. It is tried in an environment of its own: `make conformance`."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tests.conformance.conftest import Place

# Where llama-index is not installed this file holds no tests.
if find_spec("llama_index") is not None:

    def test_calls_and_streams(place: Place) -> None:
        llms: Any = import_module("llama_index.llms.openai")
        message = import_module("llama_index.core.llms").ChatMessage(role="user", content="Hello")
        # It looks up how much a model takes by its name: one that it knows.
        model = llms.OpenAI(model="gpt-4o-mini", api_base=f"{place.url}/v1", api_key=place.key)
        assert model.chat([message]).message.content
        assert [piece.delta for piece in model.stream_chat([message])]
        assert asyncio.run(model.achat([message])).message.content
