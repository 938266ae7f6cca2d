"""any-llm's calls and batches. It is tried in an environment of its own: `make conformance`."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.conformance.conftest import Place
from tests.conformance.test_openai import ENDPOINT, requests

DEADLINE_S = 60.0

# Where any-llm is not installed this file holds no tests.
if find_spec("any_llm") is not None:

    def test_a_call_and_a_batch(place: Place, tmp_path: Path) -> None:
        any_llm: Any = import_module("any_llm")
        api: Any = import_module("any_llm.api")
        at = {"api_key": place.key, "api_base": f"{place.url}/v1"}
        asked = [{"role": "user", "content": "Hello"}]
        answer = any_llm.completion(model="small", provider="openai", messages=asked, **at)
        assert answer.choices[0].message.content
        (tmp_path / "requests.jsonl").write_bytes(requests(5))
        batch = api.create_batch("openai", str(tmp_path / "requests.jsonl"), ENDPOINT, **at)
        until = time.monotonic() + DEADLINE_S
        while batch.status != "completed":
            assert time.monotonic() < until
            batch = api.retrieve_batch("openai", batch.id, **at)
        assert batch.request_counts.completed == 5
        assert len(api.retrieve_batch_results("openai", batch.id, **at).results) == 5
        assert batch.id in {entry.id for entry in api.list_batches("openai", **at)}
