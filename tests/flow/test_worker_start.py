"""A worker process whose parent is gone before it has said what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("told", [b"", b'{"verbose": '])
@pytest.mark.parametrize("module", ["penstock.cli.serve_worker", "penstock.cli.run_worker"])
def test_it_leaves_without_a_word(module: str, told: bytes) -> None:
    ended = subprocess.run([sys.executable, "-m", module], input=told, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
