"""litellm's batch calls. It is tried in an environment of its own: `make conformance`."""

from __future__ import annotations

import json
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tests.conformance.conftest import Place
from tests.conformance.test_openai import ENDPOINT, requests

# Where litellm is not installed this file holds no tests.
litellm: Any = import_module("litellm") if find_spec("litellm") else None

DEADLINE_S = 60.0

if litellm is not None:

    def at(place: Place) -> dict[str, Any]:
        return {"api_base": f"{place.url}/v1", "api_key": place.key, "custom_llm_provider": "openai"}

    def test_a_batch_from_file_to_answers(place: Place) -> None:
        file = litellm.create_file(file=("requests.jsonl", requests(5)), purpose="batch", **at(place))
        batch = litellm.create_batch(
            completion_window="24h", endpoint=ENDPOINT, input_file_id=file.id, metadata={"from": "litellm"}, **at(place)
        )
        deadline = time.monotonic() + DEADLINE_S
        while batch.status not in ("completed", "failed"):
            assert time.monotonic() < deadline
            batch = litellm.retrieve_batch(batch_id=batch.id, **at(place))
        assert (batch.status, batch.request_counts.completed) == ("completed", 5)
        content = litellm.file_content(file_id=batch.output_file_id, **at(place)).content
        assert len([json.loads(line) for line in content.splitlines()]) == 5
        assert batch.id in {entry.id for entry in litellm.list_batches(**at(place)).data}
        assert litellm.file_retrieve(file_id=file.id, **at(place)).id == file.id
        assert litellm.file_delete(file_id=file.id, **at(place)).deleted

    def test_cancel(place: Place) -> None:
        file = litellm.create_file(file=("requests.jsonl", requests(20_000)), purpose="batch", **at(place))
        batch = litellm.create_batch(completion_window="24h", endpoint=ENDPOINT, input_file_id=file.id, **at(place))
        assert litellm.cancel_batch(batch_id=batch.id, **at(place)).cancelling_at
