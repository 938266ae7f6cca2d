"""The short form of `make attacks`: what is promised to a tenant holds for some seconds of every attack at once."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from tests.attacks.run import MIB, run, table

RSS_BUDGET_MIB = 1_024
"""What `docs/serve.md` states for the default settings."""


def test_a_tenant_is_served_beside_every_attack(tmp_path: Path, database_18: str) -> None:
    outcome = run(tmp_path, database_18, alone_s=3, beside_s=12)
    assert outcome.failures == [], table(outcome)
    assert outcome.max_rss < RSS_BUDGET_MIB * MIB, table(outcome)
    # A few calls on busy cores say little about the slowest of them: the bound on p95 is for the long run.
    for step in ("upload", "session", "list"):
        assert median(outcome.beside[step]) < 20 * median(outcome.alone[step]), table(outcome)
