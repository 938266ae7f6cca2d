"""langchain's chat model, sync and async, streamed and in parallel. It is tried in an environment of its own:
`make conformance`."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tests.conformance.conftest import Place

# Where langchain is not installed this file holds no tests.
if find_spec("langchain_openai") is not None:

    def model_of(place: Place, **options: Any) -> Any:
        chat = import_module("langchain_openai").ChatOpenAI
        return chat(model="small", base_url=f"{place.url}/v1", api_key=place.key, **options)

    def test_calls_and_streams(place: Place) -> None:
        model = model_of(place)
        assert model.invoke("Hello").content
        assert "".join(piece.content for piece in model.stream("Hello"))
        answers = model.batch([f"question {number}" for number in range(5)])
        assert len({answer.id for answer in answers}) == 5
        assert asyncio.run(model.ainvoke("Hello")).content

    def test_a_session(place: Place) -> None:
        model = model_of(place, default_headers={"X-Session-Id": "langchain"})
        assert [bool(model.invoke(f"turn {number}").content) for number in range(3)] == [True] * 3
