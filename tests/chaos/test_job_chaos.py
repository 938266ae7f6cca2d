"""A table through kills of everything, in short; `make chaos-jobs` does it with 100,000 rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.jobs import run
from tests.support.thorough import some


@pytest.mark.parametrize("kind", some(["csv", "xlsx"], 1))
def test_a_table_comes_through_and_back(tmp_path: Path, database_18: str, kind: str) -> None:
    run(tmp_path, database_18, kind, 10_000, print)
