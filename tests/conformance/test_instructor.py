"""instructor's two batch processors. They are tried in an environment of their own: `make conformance`."""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import Place

DEADLINE_S = 60.0

# Where instructor is not installed this file holds no tests.
if find_spec("instructor") is not None:
    BaseModel: Any = import_module("pydantic").BaseModel

    class Colour(BaseModel):  # type: ignore[misc]
        name: str

    def _keep_clients(monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep every client of anthropic: the processor drops its client before it reads the results, and newer
        versions close the connection then, whatever the server."""
        anthropic, kept = import_module("anthropic"), []
        client = anthropic.Anthropic

        def make(*args: Any, **options: Any) -> Any:
            kept.append(client(*args, **options))
            return kept[-1]

        monkeypatch.setattr(anthropic, "Anthropic", make)

    @pytest.mark.parametrize("provider", ["openai", "anthropic"])
    def test_a_batch_of_models(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{place.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", place.key)
        monkeypatch.setenv("ANTHROPIC_BASE_URL", place.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", place.key)
        _keep_clients(monkeypatch)
        processor = import_module("instructor.batch").BatchProcessor(f"{provider}/small", Colour)
        asked = [[{"role": "user", "content": f"A colour, number {number}"}] for number in range(3)]
        file = processor.create_batch_from_messages(asked, file_path=str(tmp_path / "requests.jsonl"))
        batch_id = processor.submit_batch(file)
        until = time.monotonic() + DEADLINE_S
        while processor.get_batch_status(batch_id)["status"] not in ("completed", "ended"):
            assert time.monotonic() < until
        results = processor.retrieve_results(batch_id)
        assert sorted(result.custom_id for result in results) == ["request-0", "request-1", "request-2"]
        # The newest alone: it cannot read a batch without metadata, which other clients make.
        assert [batch.id for batch in processor.list_batches(limit=1)] == [batch_id]
        if provider == "openai":  # the mock upstream answers a schema; it calls no tools
            assert all(result.success and isinstance(result.result, Colour) for result in results)
