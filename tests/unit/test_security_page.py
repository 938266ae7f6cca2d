"""docs/security.md has every attack once, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")


def test_every_attack_is_listed_with_tests_that_exist() -> None:
    rows = dict(re.findall(r"^\| (S\d+) \|[^|]*\|([^|]*)\|$", PAGE, re.MULTILINE))
    assert list(rows) == [f"S{number}" for number in range(1, 30)]
    named = {path for row in rows.values() for path in re.findall(r"`(tests/[^`]+)`", row)}
    assert len(named) > 20
    assert {path for path in named if not (ROOT / path).exists()} == set()
