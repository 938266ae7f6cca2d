"""schemathesis over the description that the server gives of itself, against that server: no request makes it fail,
every answer is as described, nothing is let in without a key, and what breaks the description is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.tenants import furnish, tenant_ground
from tests.support.thorough import thorough

EXAMPLES = 12 if thorough() else 1
# An empty file is a file: there is no telling it from no body.
# What is accepted beyond a description's means to tell (a url that is allowed, an id that exists) is tested elsewhere.
_CONFIG = """
[checks]
positive_data_acceptance.enabled = false

[[operations]]
include-name = "PUT /v1/files"
checks.negative_data_rejection.enabled = false
"""
_MAIN = "from schemathesis.cli import schemathesis; schemathesis()"


def test_the_server_keeps_to_its_description(tmp_path: Path, server_18: str) -> None:
    (tmp_path / "schemathesis.toml").write_text(_CONFIG)
    with tenant_ground(tmp_path, server_18) as ground:
        furnish(ground, "root")
        done = subprocess.run(
            [
                *(sys.executable, "-c", _MAIN, "run", f"{ground.server.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {ground.keys['root']}"),
                *("--continue-on-failure", "--no-color"),
                *("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", str(EXAMPLES)),
                *("--generation-deterministic", "--suppress-health-check", "all", "--request-timeout", "30"),
                # What follows a batch that stands still does not end.
                *("--exclude-path-regex", "(/events|/api/ticks)$"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        told = done.stdout[-20_000:] + done.stderr[-5_000:]
        assert done.returncode == 0, told
        assert "Failures:" not in told
        failed = [line for line in ground.server.log.splitlines() if " ERROR " in line or "Traceback" in line]
        assert failed == []
