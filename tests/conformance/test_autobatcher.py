"""autobatcher: single calls that become batches. It is tried in an environment of its own: `make conformance`."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tests.conformance.conftest import Place

# Where autobatcher is not installed this file holds no tests.
if find_spec("autobatcher") is not None:

    def test_calls_become_a_batch(place: Place) -> None:
        batching: Any = import_module("autobatcher").BatchOpenAI

        async def ask() -> list[Any]:
            client = batching(
                api_key=place.key,
                base_url=f"{place.url}/v1",
                batch_window_seconds=0.5,
                poll_interval_seconds=0.5,
                completion_window="24h",
            )
            async with asyncio.timeout(60):
                asked = [[{"role": "user", "content": f"question {number}"}] for number in range(5)]
                calls = [client.chat.completions.create(model="small", messages=messages) for messages in asked]
                answers = await asyncio.gather(*calls)
            await client.close()
            return answers

        assert all(answer.choices[0].message.content for answer in asyncio.run(ask()))
