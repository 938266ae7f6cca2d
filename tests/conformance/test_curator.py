"""curator's batch mode. It is tried in an environment of its own: `make conformance`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import Place

# Where curator is not installed this file holds no tests.
if find_spec("bespokelabs") is not None:

    def test_a_batch_of_prompts(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TELEMETRY_ENABLED", "false")
        monkeypatch.setenv("CURATOR_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("OPENAI_API_KEY", place.key)
        from importlib import import_module

        curator: Any = import_module("bespokelabs.curator")
        model = curator.LLM(
            model_name="small",
            backend="openai",
            batch=True,
            backend_params={"base_url": f"{place.url}/v1", "api_key": place.key, "batch_check_interval": 1},
        )
        answers = model([f"question {number}" for number in range(5)])
        rows = answers.dataset if hasattr(answers, "dataset") else answers
        assert len(rows) == 5
        assert all(row["response"] for row in rows)
