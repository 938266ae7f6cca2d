"""A worker process whose parent is gone before it has said what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("told", [b"", b'{"verbose": '])
def test_it_leaves_without_a_word(told: bytes) -> None:
    command = [sys.executable, "-m", "penstock.worker.process"]
    ended = subprocess.run(command, input=told, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
